"""`outrider serve` as a user starts it."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from outrider.process.network.ports import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
_START_S = 180
_PROGRAM = (sys.executable, "-m", "outrider_cli.main")


@contextmanager
def serving(
    log: Path, *arguments: str, program: Sequence[str] = _PROGRAM, at: Path = ROOT
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start `outrider serve` in a folder, on free ports; yield its process and URL when ready.

    `program` is the command `outrider`.
    """
    port = free_port("127.0.0.1")
    ports = ["--http-port", str(port), "--grpc-port", "0", "--verifier-port", "0"]
    command = [*program, "serve", *arguments, *ports]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=at, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: b"Ready." in log.read_bytes() or process.poll() is not None, _START_S)
        assert process.poll() is None, log.read_text()
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
