"""`python -m gateway` prints its addresses, ends on a signal, and explains bad settings."""

from __future__ import annotations

import signal
import subprocess
import sys

import httpx
import pytest
from gateway_rig import TARGET

COMMAND = [sys.executable, "-m", "gateway", "--verifier", "127.0.0.1:9"]
COMMAND += ["--tokenizer", TARGET, "--http-port", "0"]


def test_the_gateway_prints_its_addresses_and_ends_on_a_signal() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--grpc-listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = next(word for word in line.split() if word.startswith("http://"))
        assert httpx.get(f"{url}/livez").status_code == 200
        assert httpx.get(f"{url}/readyz").json()["status"] == "unavailable"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (
            ["--http-port", "70000"],
            2,
            "http-port: must be less than or equal to 65535, not '70000'",
        ),
        (["--open", "--grpc-listen", "256.0.0.1:1"], 1, "cannot listen on 256.0.0.1:1"),
    ],
)
def test_the_error_for_a_bad_setting_names_it(
    arguments: list[str], status: int, words: str
) -> None:
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=20)
    assert result.returncode == status
    assert words in result.stderr
    assert "Traceback" not in result.stderr
