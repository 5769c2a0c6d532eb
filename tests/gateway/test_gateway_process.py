"""`python -m gateway` prints its addresses, ends on a signal, and explains bad settings."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import httpx
import pytest
from gateway_rig import TARGET

COMMAND = [sys.executable, "-m", "gateway", "--verifier", "127.0.0.1:9"]
COMMAND += ["--tokenizer", TARGET, "--http-port", "0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_gateway_prints_its_addresses_and_ends_on_a_signal(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--grpc-listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = next(word for word in line.split() if word.startswith("http://"))
        assert httpx.get(f"{url}/livez").status_code == 200
        assert httpx.get(f"{url}/readyz").json()["status"] == "unavailable"
        started = time.monotonic()
        process.send_signal(number)
        assert process.wait(5) == 0
        assert time.monotonic() - started < 2
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
        (["--colour", "red"], 2, "colour"),
        (["--tokenizer", "/nowhere"], 1, "there is no directory /nowhere"),
        (["--http-host", "0.0.0.0"], 2, "give --open to let everybody in"),
        (["--keys-file", "/nowhere"], 1, "keys-file /nowhere cannot be read"),
        (["--keys", "{"], 1, "keys is not YAML"),
        (["--open", "--grpc-listen", "256.0.0.1:1"], 1, "cannot listen on 256.0.0.1:1"),
        (["--open", "--http-host", "256.0.0.1"], 1, "256.0.0.1"),
    ],
)
def test_the_error_for_a_bad_setting_names_it(
    arguments: list[str], status: int, words: str
) -> None:
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=20)
    assert result.returncode == status
    assert words in result.stderr
    assert "Traceback" not in result.stderr
