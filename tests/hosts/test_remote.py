"""Processes of an experiment on another machine are started, watched and ended over ssh."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from ssh_server import OUTRIDER, ROOT, SshServer, held, listens, proxy, ssh_server
from waiting import until

from outrider.errors import OutriderError
from outrider_bench.experiment.hosts import Launch
from outrider_bench.experiment.records import Folder, Measurement
from outrider_bench.experiment.remote import (
    RemoteHandle,
    RemoteHost,
    remote_hosts,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def near(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SshServer]:
    async with ssh_server(tmp_path_factory.mktemp("ssh")) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(near: SshServer) -> AsyncIterator[RemoteHost]:
    """A connection that most tests share: to start its far end takes seconds."""
    launch, port = proxy()
    async with held(near) as hosts:
        await hosts["near"].start(launch)
        await until(lambda: listens(port))
        yield hosts["near"]
    assert not listens(port), "processes end when the experiment lets go"


async def test_a_remote_process_is_started_watched_and_stopped(host: RemoteHost) -> None:
    launch, port = proxy()
    handle = await host.start(launch)
    await until(lambda: listens(port))
    assert await handle.alive()
    assert await handle.cpu_s() > 0
    await handle.stop()
    assert not await handle.alive()
    assert not listens(port)
    assert (await handle.tail())[-1] == "ended with status 0"


async def ended(handle: RemoteHandle) -> None:
    async def is_dead() -> bool:
        return not await handle.alive()

    await until(is_dead)


async def test_a_remote_process_gets_its_environment(host: RemoteHost) -> None:
    code = "import os; print(os.environ['WORD'])"
    launch = Launch("reader", "", ("-c", code), sys.executable, {"WORD": "hat"})
    handle = await host.start(launch)
    await ended(handle)
    assert await handle.tail() == ["hat", "ended with status 0"]


async def test_the_tail_of_a_killed_process_has_the_status_of_its_signal(
    host: RemoteHost,
) -> None:
    launch, port = proxy()
    handle = await host.start(launch)
    await until(lambda: listens(port))
    await handle.kill()
    assert (await handle.tail())[-1] == "ended with status 137"


async def test_a_program_that_is_not_there_ends_with_its_name(host: RemoteHost) -> None:
    handle = await host.start(Launch("none", "", (), "/no/such/program"))
    await ended(handle)
    assert "/no/such/program" in " ".join(await handle.tail())


async def test_a_process_whose_connection_is_lost_counts_as_ended_and_ends(
    host: RemoteHost,
) -> None:
    launch, port = proxy()
    handle = await host.start(launch)
    await until(lambda: listens(port))
    handle._process.kill()
    await ended(handle)
    await until(lambda: not listens(port))


async def test_a_checkout_of_another_commit_is_refused(near: SshServer) -> None:
    with pytest.raises(OutriderError, match=r"hosts.near has Outrider of commit .*, and this is x"):
        async with remote_hosts({"near": near.target}, "x"):
            pass


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("127.0.0.1:/no/such/checkout", "host near: .*/no/such/checkout"),
        ("nobody-of-that-name@127.0.0.1:/", "host near: .*Permission denied"),
    ],
)
async def test_a_machine_that_cannot_be_used_is_named_with_ssh_s_reason(
    near: SshServer, target: str, reason: str
) -> None:
    with pytest.raises(OSError, match=reason):
        async with remote_hosts({"near": target}, "x"):
            pass


@pytest.mark.parametrize("target", ["far", "far:", ":outrider", "-oProxyCommand=x:outrider"])
async def test_a_target_that_is_none_is_refused_by_its_name(target: str) -> None:
    with pytest.raises(OutriderError, match=r"hosts.far must be an ssh destination and"):
        async with remote_hosts({"far": target}, "x"):
            pass


EXPERIMENT = """
name: apart
hosts: {near: TARGET, far: TARGET}
target: {threads: 1, host: near}
drafters: {far: {family: ngram, host: far, link: wire}}
links: {wire: {round_trip_ms: 2}}
workload: {kinds: [rewriting], output_tokens: 16}
use: [far]
repetitions: 1
"""


@pytest.mark.slow  # starts two stacks with the bundled target
async def test_an_experiment_runs_with_verifier_and_drafter_on_two_machines(
    near: SshServer, tmp_path: Path
) -> None:
    file = tmp_path / "apart.yaml"
    await asyncio.to_thread(file.write_text, EXPERIMENT.replace("TARGET", near.target))
    command = [*OUTRIDER, "lab", "run", str(file), "--out", str(tmp_path)]
    running = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    async with asyncio.timeout(300):
        assert await running.wait() == 0
    found, measured = await asyncio.to_thread(results, tmp_path / "apart")
    assert set(measured) == {"plain", "drafted"}
    assert [measurement.errors for measurement in measured.values()] == [[], []]
    assert len({measurement.texts_sha256 for measurement in measured.values()}) == 1
    assert measured["drafted"].links["wire"].up_bytes > 0
    assert measured["drafted"].cpu_s["far-1"] > 0
    assert set(found.about()["places"]) == {"far", "near"}


def results(directory: Path) -> tuple[Folder, dict[str, Measurement]]:
    """The only folder of an experiment, with the measurements of its only cell by way."""
    [about] = directory.glob("*/run.json")
    folder = Folder(about.parent)
    [cell] = folder.path.glob("cells/*")
    return folder, {
        measurement.way: measurement for _, measurement in folder.measurements(cell.name)
    }
