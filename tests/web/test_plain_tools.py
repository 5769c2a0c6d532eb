"""The lines for grpcurl, `buf curl` and curl in docs/api.md work with a real gateway and verifier.

No package registry has grpcurl, so `buf curl` makes the calls of grpcurl's lines, with reflection.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.stack import ROOT
from tests.web.site_rig import Site

pytestmark = pytest.mark.slow

SECTION = re.search(
    r"^## Plain tools\n(.*?)^## ", (ROOT / "docs/api.md").read_text(), re.MULTILINE | re.DOTALL
)
assert SECTION is not None
GRPCURL, BUF, CURL = re.findall(r"```sh\n(.*?)```", SECTION[1], re.DOTALL)
EXPECTED = {
    "GenerateText": "FINISH_REASON_",
    "GenerateTokens": "FINISH_REASON_",
    "Check": '"SERVING"',
    "GetModel": '"MODEL_STAGE_READY"',
    "list": "grpc.health.v1.Health",
}


def as_buf(line: str) -> str:
    """Return the `buf curl` line that makes the call of a grpcurl line."""
    parts = re.fullmatch(r"grpcurl -plaintext (-d '.*' )?(\S+) (\S+)", line)
    assert parts is not None
    data, address, method = parts.groups(default="")
    if method == "list":
        return f"buf curl --protocol grpc {data}--list-services http://{address}"
    return f"buf curl --protocol grpc {data}http://{address}/{method}"


def output(lines: str, site: Site, npm_packages: Path) -> str:
    """Return a shell's output for documented lines, with the ports of this test's processes."""
    for documented, here in (
        ("127.0.0.1:8000", site.url.removeprefix("http://")),
        ("127.0.0.1:8001", site.gateway.grpc_address),
        ("127.0.0.1:50051", site.stack.address),
    ):
        lines = lines.replace(documented, here)
    path = f"{npm_packages / '.bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-ec", lines],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode(errors="replace")


@pytest.mark.parametrize("line", [*GRPCURL.splitlines(), *BUF.splitlines()])
def test_each_documented_line_works(line: str, site: Site, npm_packages: Path) -> None:
    command = as_buf(line) if line.startswith("grpcurl") else line
    assert EXPECTED[re.split(r"[/ ]", line)[-1]] in output(command, site, npm_packages)


def test_curl_alone_streams_over_connect(site: Site, npm_packages: Path) -> None:
    printed = output(CURL, site, npm_packages)
    assert printed.count('"text"') > 1
    assert printed.count("FINISH_REASON_") == 1
    assert printed.endswith("\x02\0\0\0\x02{}")
