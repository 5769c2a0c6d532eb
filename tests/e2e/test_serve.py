"""`outrider serve` as a user starts it: it answers, and leaves no process."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from waiting import wait_until

from outrider.process.ports import free_port

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start `outrider serve`; yields its process and URL once it is ready."""
    port = free_port("127.0.0.1")
    flags = ["--target", "models/target", "--drafter", "ngram", "--http-port", str(port)]
    flags += ["--model-name", "small"]
    flags += ["--grpc-port", str(free_port("127.0.0.1")), "--verifier-port", "0"]
    with log.open("wb") as output:
        command = [sys.executable, "-m", "outrider.launch.cli", "serve", *flags]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: b"Ready." in log.read_bytes() or process.poll() is not None, 120)
        assert process.poll() is None, log.read_text()
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow  # It starts a stack of its own.
def test_serve_answers_and_leaves_no_process_behind(tmp_path: Path) -> None:
    with serving(tmp_path / "log") as (process, url):
        body = {"model": "small", "prompt": "def main(", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 8
        started = children(process.pid)
        assert len(started) == len(("verifier", "drafter", "gateway"))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        wait_until(lambda: not any(map(runs, started)), 15)
        printed = (tmp_path / "log").read_text()
        assert "leaked" not in printed
        assert printed.startswith("loading models/target ...\n")
        # Nothing in it looks like a failure, or comes from a progress bar.
        for word in ("refused", "unavailable", "UNAVAILABLE", "Loading weights", "0 of 1"):
            assert word not in printed
