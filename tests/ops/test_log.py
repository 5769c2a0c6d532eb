"""`outrider serve` with a full, unread or closed log, and with a task that fails."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from outrider_cli import serve
from tests.waiting import wait_until

TALKS = """
import os, pathlib
new = pathlib.Path(f"new-{os.getpid()}")
for count in range(10**9):
    print(150 * "x", flush=True)
    if count % 100 == 0:
        new.write_text(f"{os.getpid()} {count}")
        new.replace("progress")
"""
SUPERVISES = """
import asyncio, sys
from outrider_cli.serve import supervise
from outrider_cli.serve_settings import ServeSettings
from outrider_cli.stack_plan import Stack
from outrider_cli.supervisor import Child
stack = Stack([Child("talks", "talks", [])], "http://127.0.0.1:1", "", "")
sys.exit(asyncio.run(supervise(stack, ServeSettings(target="t"))))
"""
# More lines than the pipes and queues between the child and the log can hold.
MANY = 3_000


class Rig:
    """The process of `outrider serve`, whose only child never stops printing."""

    def __init__(self, directory: Path, program: str = SUPERVISES) -> None:
        self.directory = directory
        self.command = [sys.executable, "-c", program]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}
        (directory / "talks.py").write_text(TALKS)

    def start(self, stdout: int) -> subprocess.Popen[str]:
        """Start `serve` with this standard output."""
        return subprocess.Popen(
            self.command,
            cwd=self.directory,
            env=self.environment,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def progress(self) -> tuple[int, int]:
        """Return the child's process id, and the number of lines that it has printed."""
        try:
            pid, count = (self.directory / "progress").read_text().split()
        except FileNotFoundError:
            return 0, 0
        return int(pid), int(count)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@contextmanager
def small_file_system(directory: Path) -> Iterator[Path | None]:
    """Mount a tmpfs of 256 KiB; yield None if this user may not mount one."""
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", directory],
        capture_output=True,
        check=False,
    )
    try:
        yield directory if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", directory], check=True)


def assert_goes_on(rig: Rig, serving: subprocess.Popen[str]) -> None:
    """Assert that the child's pipe is read, and that a killed child is restarted."""
    wait_until(lambda: rig.progress[1] > MANY)
    first = rig.progress[0]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: rig.progress[0] != first and rig.progress[1] > MANY)
    assert serving.poll() is None


def assert_stops(rig: Rig, serving: subprocess.Popen[str]) -> None:
    """Assert that SIGTERM ends `serve` with status 0, and its child too."""
    serving.terminate()
    assert serving.wait(20) == 0, serving.communicate()[1]
    serving.communicate()
    assert not Path(f"/proc/{rig.progress[0]}").exists()


def test_a_log_on_a_full_disk_blocks_nothing_and_resumes_with_space(
    rig: Rig, tmp_path: Path
) -> None:
    with small_file_system(tmp_path / "small") as small:
        path = Path("/dev/full")
        if small:
            path = small / "log"
            (small / "filler").write_bytes(bytes(192 * 1024))
        with path.open("wb") as log:
            serving = rig.start(log.fileno())
        assert_goes_on(rig, serving)
        if small:
            assert path.stat().st_size <= 64 * 1024
            (small / "filler").unlink()
            wait_until(
                lambda: "lines were dropped: the log could not be written" in path.read_text()
            )
            ends = ("xxx", "restarting it in 0.5 s", "written", "...")
            assert all(line.endswith(ends) for line in path.read_text().splitlines()[:-1])
        assert_stops(rig, serving)


def test_a_closed_pipe_ends_serve_without_a_traceback(rig: Rig) -> None:
    """In `outrider serve | head -3`, `head` closes the pipe in this way."""
    serving = rig.start(subprocess.PIPE)
    assert serving.stdout is not None
    assert all(serving.stdout.readline() for _ in range(3))
    serving.stdout.close()
    serving.stdout = None
    _, errors = serving.communicate(timeout=20)
    assert errors == "outrider serve: stopped, since nobody reads its output any more\n"
    assert serving.returncode == 1
    assert not Path(f"/proc/{rig.progress[0]}").exists()


def test_a_failed_supervising_task_ends_serve_with_the_reason(tmp_path: Path) -> None:
    """A reader of pipes with a bug makes the task fail."""
    broken = """
import outrider_cli.supervisor
calls = []
read = outrider_cli.supervisor._line
async def line(output):
    calls.append(output)
    if len(calls) > 1000:
        raise RuntimeError("a bug")
    return await read(output)
outrider_cli.supervisor._line = line
"""
    rig = Rig(tmp_path, broken + SUPERVISES)
    serving = rig.start(subprocess.DEVNULL)
    _, errors = serving.communicate(timeout=30)
    assert serving.returncode == 1
    assert errors.startswith("outrider serve: a supervising task failed: ")
    assert errors.endswith("RuntimeError: a bug\n")
    assert not Path(f"/proc/{rig.progress[0]}").exists()


def test_a_line_is_shown_as_its_process_wrote_it() -> None:
    """The path in an access line is the client's text, which may look like the console's markup."""
    line = "path=/:key:/[bold]x[/]/\\[y\\ \\"
    output = io.StringIO()
    Console(file=output, highlight=False, soft_wrap=True).print(serve._shown("gateway", line))
    assert output.getvalue() == f"   gateway │ {line}\n"
