"""`outrider serve` as a user starts it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.process.network.ports import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
_START_S = 180


@contextmanager
def serving(log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start `outrider serve` on free ports; yield its process and URL once it is ready."""
    port = free_port("127.0.0.1")
    ports = ["--http-port", str(port), "--grpc-port", "0", "--verifier-port", "0"]
    command = [sys.executable, "-m", "outrider_cli.main", "serve", *arguments, *ports]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: b"Ready." in log.read_bytes() or process.poll() is not None, _START_S)
        assert process.poll() is None, log.read_text()
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
