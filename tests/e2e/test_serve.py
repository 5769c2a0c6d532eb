"""`outrider serve` as a user starts it: it answers, and leaves no process."""

import signal
from pathlib import Path

import httpx
import pytest

from tests.serving import serving
from tests.waiting import wait_until

FLAGS = ("--target", "models/target", "--drafter", "ngram", "--model-name", "small")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow  # This test starts a separate stack.
def test_serve_answers_and_leaves_no_process_behind(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *FLAGS) as (process, url):
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
        # Nothing in the output looks like a failure, or comes from a progress bar.
        for word in ("refused", "unavailable", "UNAVAILABLE", "Loading weights", "0 of 1"):
            assert word not in printed
