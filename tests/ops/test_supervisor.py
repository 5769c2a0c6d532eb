"""The supervisor restarts children that die, reports failed starts, and leaves nothing running."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider_cli import supervisor
from outrider_cli.supervisor import Child, StartFailed, Supervisor
from tests.waiting import until, wait_until

LIVES = "import time; print('up', flush=True); time.sleep(60)"
FAILS = "raise SystemExit('no such model')"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""
WITH_CHILD = "import subprocess; print('up', flush=True); subprocess.run(['sleep', '60'])"
LEAVES_A_NOTE = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("note").touch(), sys.exit()))
print("up", flush=True)
time.sleep(60)
"""
SUPERVISES = """
import asyncio
from outrider_cli.supervisor import Child, Supervisor
async def main():
    supervisor = Supervisor(lambda name, line: print(f"{name}: {line}", flush=True))
    supervisor.start(Child("waits", "waits", []))
    await asyncio.sleep(60)
asyncio.run(main())
"""


class Rig:
    """A supervisor whose children are small programs, and the lines that they printed."""

    def __init__(self, directory: Path) -> None:
        self.lines: list[tuple[str, str]] = []
        self.supervisor = Supervisor(lambda name, line: self.lines.append((name, line)))
        self._directory = directory

    def start(self, name: str, program: str) -> Child:
        """Start a child that runs this program."""
        (self._directory / f"{name}.py").write_text(program)
        child = Child(name, name, [], {"PYTHONPATH": str(self._directory)})
        self.supervisor.start(child)
        return child


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    await made.supervisor.stop()


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_killed_child_is_restarted_after_a_delay(rig: Rig) -> None:
    child = rig.start("lives", LIVES)
    await until(lambda: ("lives", "up") in rig.lines)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: rig.lines.count(("lives", "up")) == 2)
    assert child.pid != first
    assert ("outrider", "lives ended with status -9; restarting it in 0.5 s") in rig.lines


async def test_a_child_that_fails_while_the_stack_starts_ends_the_start(rig: Rig) -> None:
    rig.start("fails", FAILS)
    with pytest.raises(StartFailed, match="fails could not start: it ended with status 1"):
        await rig.supervisor.settle(asyncio.sleep(10))
    assert ("fails", "no such model") in rig.lines


async def test_a_child_that_fails_after_the_start_is_restarted(rig: Rig) -> None:
    await rig.supervisor.settle(asyncio.sleep(0))
    child = rig.start("fails", FAILS)
    await until(lambda: child.restarts == 1)


def test_children_get_sigterm_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(LEAVES_A_NOTE)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", SUPERVISES]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "waits: up\n"
        supervisor.kill()
    wait_until((tmp_path / "note").exists)


async def test_stopping_ends_a_child_and_its_own_children(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_STOP_S", 0.5)
    child = rig.start("parent", WITH_CHILD)
    await until(lambda: ("parent", "up") in rig.lines)
    group = child.pid
    assert group is not None
    await rig.supervisor.stop()
    await until(lambda: not group_exists(group))
    assert child.restarts == 0


async def test_an_interrupted_stop_still_kills_a_child_that_ignores_sigterm(rig: Rig) -> None:
    child = rig.start("stubborn", STUBBORN)
    await until(lambda: ("stubborn", "up") in rig.lines)
    stopping = asyncio.create_task(rig.supervisor.stop())
    await asyncio.sleep(0.1)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    group = child.pid
    assert group is not None
    await until(lambda: not group_exists(group))


@pytest.mark.parametrize("turns", range(1, 8))
async def test_a_child_that_is_being_started_is_stopped_too(rig: Rig, turns: int) -> None:
    child = rig.start("lives", LIVES)
    for _ in range(turns):
        await asyncio.sleep(0)
    await rig.supervisor.stop()
    assert child.pid is None or not group_exists(child.pid)


async def test_a_very_long_line_is_shown_in_pieces_and_the_next_line_follows(rig: Rig) -> None:
    program = "print('a' * 300_000); print('after', flush=True); import time; time.sleep(60)"
    rig.start("talks", program)
    await until(lambda: ("talks", "after") in rig.lines)
    assert "".join(line for _, line in rig.lines) == "a" * 300_000 + "after"
