"""`python -m gateway` prints its addresses, ends on a signal, and explains bad settings."""

from __future__ import annotations

import signal
import subprocess
import sys

import httpx

from tests.gateway.gateway_rig import TARGET

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


def test_an_address_that_cannot_be_bound_ends_it_with_a_sentence() -> None:
    command = [*COMMAND, "--open", "--grpc-listen", "256.0.0.1:1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "cannot listen on 256.0.0.1:1" in result.stderr
    assert "Traceback" not in result.stderr
