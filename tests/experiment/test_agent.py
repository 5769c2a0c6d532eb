"""An agent starts processes for a controller, and ends them with the controller's lease."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import waiting
import yaml

from bench.experiment.hosts import Launch
from bench.experiment.records import Folder, Measurement
from bench.experiment.remote import Hosts, RemoteHandle, RemoteHost, check_hosts, remote_hosts
from bench.experiment.spec import Experiment
from bench.experiment.tls import Tls
from outrider.errors import OutriderError
from outrider.launch.stack import free_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0


@dataclass
class Agent:
    process: asyncio.subprocess.Process
    address: str
    commit: str


@asynccontextmanager
async def agent(*flags: str) -> AsyncIterator[Agent]:
    """`outrider agent` on a free port of the loopback interface."""
    command = [
        sys.executable,
        "-m",
        "outrider.launch.cli",
        "agent",
        "--listen",
        "127.0.0.1:0",
        *flags,
    ]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        words = line.split()
        yield Agent(process, words[3], words[-1])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


def held(near: Agent) -> AbstractAsyncContextManager[Hosts]:
    """The machine of an agent, as the host `near`."""
    return remote_hosts({"near": near.address}, None, near.commit)


def proxy(name: str = "proxy", **more: object) -> tuple[Launch, int]:
    """A light process of Outrider, and the port that it listens on while it runs."""
    control, listen = free_port("127.0.0.1"), free_port("127.0.0.1")
    arguments = (
        "--control",
        f"127.0.0.1:{control}",
        "--forward",
        f"127.0.0.1:{listen}=127.0.0.1:1",
    )
    return Launch(name, "bench.experiment.link_process", arguments, **more), control  # type: ignore[arg-type]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def until(holds: Callable[[], bool]) -> None:
    async def asked() -> bool:
        return holds()

    await waiting.until(asked)


async def refused(host: RemoteHost, launch: Launch) -> str:
    with pytest.raises(OSError, match="host near") as caught:
        await host.start(launch)
    return str(caught.value)


async def test_a_remote_process_is_started_watched_and_stopped() -> None:
    launch, port = proxy()
    async with agent() as near, held(near) as hosts:
        handle = await hosts.remote["near"].start(launch)
        await until(lambda: listens(port))
        assert await handle.alive()
        assert await handle.cpu_s() > 0
        await handle.stop()
        assert not await handle.alive()
        assert not listens(port)
        assert (await handle.tail())[-1] == "ended with status 0"


async def test_a_killed_process_tells_its_signal() -> None:
    launch, port = proxy()
    async with agent() as near, held(near) as hosts:
        handle = await hosts.remote["near"].start(launch)
        await until(lambda: listens(port))
        await handle.kill()
        assert (await handle.tail())[-1] == "ended with status -9"


async def test_a_paused_process_answers_again_after_it_is_resumed() -> None:
    launch, port = proxy()
    async with agent() as near, held(near) as hosts:
        handle = await hosts.remote["near"].start(launch)
        await until(lambda: listens(port))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await handle.pause()
        writer.write(b"{}\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(
                asyncio.shield(reading := asyncio.ensure_future(reader.readline())), 0.5
            )
        await handle.resume()
        assert b"traffic" in await asyncio.wait_for(reading, PATIENCE_S)
        writer.close()
        await writer.wait_closed()


async def test_two_agents_stand_for_two_machines() -> None:
    first, first_port = proxy("first")
    second, second_port = proxy("second")
    async with agent() as far, agent() as near:
        addresses = {"far": far.address, "near": near.address}
        async with remote_hosts(addresses, None, near.commit) as hosts:
            one, other = hosts.remote["far"], hosts.remote["near"]
            await one.start(first)
            await other.start(second)
            await until(lambda: listens(first_port) and listens(second_port))
            assert one.machine.fingerprint == other.machine.fingerprint
            assert hosts.here.address == "127.0.0.1"


async def test_processes_end_when_the_controller_lets_go() -> None:
    launch, port = proxy()
    async with agent() as near:
        async with held(near) as hosts:
            await hosts.remote["near"].start(launch)
            await until(lambda: listens(port))
        await until(lambda: not listens(port))


CONTROLLER = """
import asyncio, sys
from bench.experiment.hosts import Launch
from bench.experiment.remote import remote_hosts
async def main(address, commit, *arguments):
    launch = Launch("proxy", "bench.experiment.link_process", arguments)
    async with remote_hosts({"near": address}, None, commit) as hosts:
        await hosts.remote["near"].start(launch)
        await asyncio.Event().wait()
asyncio.run(main(*sys.argv[1:]))
"""


async def test_processes_end_when_the_controller_is_killed() -> None:
    launch, port = proxy()
    async with agent() as near:
        command = [sys.executable, "-c", CONTROLLER, near.address, near.commit, *launch.arguments]
        controller = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
        await until(lambda: listens(port))
        controller.kill()
        await controller.wait()
        await until(lambda: not listens(port))


async def test_processes_end_when_the_agent_is_stopped() -> None:
    launch, port = proxy()
    async with agent() as near, held(near) as hosts:
        handle = await hosts.remote["near"].start(launch)
        await until(lambda: listens(port))
        near.process.send_signal(signal.SIGTERM)
        await near.process.wait()
        assert not listens(port)
        with pytest.raises(ConnectionError, match="host near"):
            await handle.alive()


async def test_a_second_controller_is_refused_until_the_first_has_gone() -> None:
    async with agent() as near:
        addresses = {"near": near.address}
        async with remote_hosts(addresses, None, near.commit):
            with pytest.raises(OSError, match="another experiment holds this machine"):
                async with remote_hosts(addresses, None, near.commit):
                    pass
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    async with remote_hosts(addresses, None, near.commit):
                        return
                except OSError:
                    await asyncio.sleep(0.05)


async def test_an_agent_of_another_commit_is_refused() -> None:
    async with agent() as near:
        with pytest.raises(
            OutriderError,
            match=f"hosts: near runs Outrider of commit {near.commit[:8]}.*, and this is abc",
        ):
            async with remote_hosts({"near": near.address}, None, "abc"):
                pass


async def test_an_agent_that_is_not_there_is_named() -> None:
    with pytest.raises(OSError, match=r"host near: .*refused"):
        async with remote_hosts({"near": f"127.0.0.1:{free_port('127.0.0.1')}"}, None, "abc"):
            pass


REFUSED = [
    (Launch("x", "http.server"), "module must be one of verifier_svc, drafter_svc"),
    (Launch("x", "", program="sh"), "program must be redis-server, not 'sh'"),
    (Launch("x", "gateway", program="sh"), "program must be empty with a module"),
    (Launch("x y", "gateway"), "name must be 1 to 64 letters"),
    (Launch("x", "gateway", ("a",) * 129), "arguments must be at most 128, not 129"),
    (Launch("x", "gateway", ("a" * 4097,)), "arguments must each have at most 4096 bytes"),
    (Launch("x", "gateway", ("a\nb",)), "arguments must have no control characters"),
    (Launch("x", "gateway", ("{files}/a",)), "arguments name {files}, but there are no files"),
    (Launch("x", "gateway", ("--config", "x.yaml")), "--config is refused"),
    (Launch("x", "verifier_svc", ("--trust-remote-code",)), "--trust-remote-code is refused"),
    (Launch("x", "drafter_svc", ("--family", "os.path:join")), "--family must be a name"),
    (Launch("x", "drafter_svc", ("--family=os.path:join",)), "--family must be a name"),
    (Launch("x", "", ("--loadmodule", "/tmp/x.so"), program="redis-server"), "not '--loadmodule'"),
    (Launch("x", "", ("/tmp/redis.conf",), program="redis-server"), "takes no file of settings"),
    (Launch("x", "gateway", environment={"LD_PRELOAD": "x"}), "environment may set HF_HUB_OFFLINE"),
    (
        Launch("x", "gateway", environment={str(i): "" for i in range(17)}),
        "environment must have at most 16",
    ),
    (Launch("x", "gateway", files={"../x": ""}), "files must have plain names"),
    (
        Launch("x", "gateway", files={str(i): "" for i in range(9)}),
        "files must be at most 8, not 9",
    ),
    (Launch("x", "gateway", files={"x": "a" * 65_537}), "files must each have at most 65536 bytes"),
    (Launch("x", "gateway", cores="4000"), "cores must be among"),
]


async def test_an_agent_refuses_whatever_is_not_of_outrider() -> None:
    async with agent() as near, held(near) as hosts:
        for launch, reason in REFUSED:
            assert reason in await refused(hosts.remote["near"], launch)


async def test_files_reach_the_remote_process_and_no_one_else() -> None:
    arguments = (
        "--family",
        "ngram",
        "--verifier",
        "127.0.0.1:1",
        "--redis",
        "redis://127.0.0.1:1/0",
    )
    arguments += ("--pool-secret-file", "{files}/secret")
    launch = Launch(
        "drafter", "drafter_svc", arguments, files={"secret": "a secret of 32 bytes and a few more"}
    )
    async with agent() as near, held(near) as hosts:
        handle = await hosts.remote["near"].start(launch)
        path = await asyncio.to_thread(secret_of_child, near.process.pid)
        assert await asyncio.to_thread(path.read_text) == launch.files["secret"]
        assert (await asyncio.to_thread(path.parent.stat)).st_mode & 0o077 == 0
        await handle.stop()
        assert not await asyncio.to_thread(path.exists)


def secret_of_child(parent: int) -> Path:
    """The path that the drafter which `parent` started was given."""
    for _ in range(200):
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            if "drafter_svc" in words:
                return Path(words[words.index("--pool-secret-file") + 1])
        time.sleep(0.05)
    raise AssertionError(f"no child of {parent} is a drafter")


async def test_calls_without_the_lease_are_refused() -> None:
    async with agent() as near, held(near) as hosts:
        stranger = RemoteHost("near", "127.0.0.1", hosts.remote["near"].channel)
        launch, _ = proxy()
        assert "lease_id is not that of the lease" in await refused(stranger, launch)
        unknown = RemoteHandle(hosts.remote["near"], "x-0")
        with pytest.raises(OSError, match="process_id 'x-0' is none of this lease's processes"):
            await unknown.alive()


def openssl(directory: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)


def authority(directory: Path) -> Path:
    """A new directory with an authority and a certificate that it signed for 127.0.0.1."""
    directory.mkdir()
    new = (
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    )
    openssl(directory, *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    signed = (
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-subj",
        "/CN=agent",
    )
    openssl(directory, *new, *signed, "-keyout", "key.pem", "-out", "cert.pem")
    return directory


def tls_of(directory: Path, ca: Path | None = None) -> Tls:
    return Tls(directory / "cert.pem", directory / "key.pem", (ca or directory) / "ca.pem")


def flags_of(tls: Tls) -> list[str]:
    return ["--tls-cert", str(tls.cert), "--tls-key", str(tls.key), "--tls-ca", str(tls.ca)]


async def test_mutual_tls_lets_in_only_who_has_a_certificate(tmp_path: Path) -> None:
    ours, others = authority(tmp_path / "ours"), authority(tmp_path / "others")
    launch, port = proxy()
    async with agent(*flags_of(tls_of(ours))) as near:
        addresses = {"near": near.address}
        for stranger in (None, tls_of(others, ca=ours)):
            with pytest.raises(OSError, match="host near"):
                async with remote_hosts(addresses, stranger, near.commit):
                    pass
        async with remote_hosts(addresses, tls_of(ours), near.commit) as hosts:
            await hosts.remote["near"].start(launch)
            await until(lambda: listens(port))


async def test_a_controller_refuses_an_agent_of_another_authority(tmp_path: Path) -> None:
    ours, others = authority(tmp_path / "ours"), authority(tmp_path / "others")
    async with agent(*flags_of(tls_of(others, ca=ours))) as near:
        with pytest.raises(OSError, match="host near"):
            async with remote_hosts({"near": near.address}, tls_of(ours), near.commit):
                pass


BAD_FLAGS = [
    (
        ["--listen", "0.0.0.0:7070"],
        "listen 0.0.0.0:7070 is not on loopback, so it needs mutual TLS",
    ),
    (["--listen", "7070"], "listen must be host:port with a port of at most 65535, not '7070'"),
    (["--tls-cert", "x"], "tls_key must be given too"),
    (["--tls-cert", "x", "--tls-key", "x", "--tls-ca", "x"], "tls_cert x is not a file"),
]


@pytest.mark.parametrize(("flags", "reason"), BAD_FLAGS, ids=lambda value: str(value)[:30])
def test_an_agent_that_would_not_be_protected_does_not_start(flags: list[str], reason: str) -> None:
    command = [sys.executable, "-m", "outrider.launch.cli", "agent", *flags]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


async def test_a_host_beyond_loopback_is_not_dialled_without_tls() -> None:
    with pytest.raises(
        OutriderError, match=r"hosts: far 10.0.0.2:7070 is not on loopback, so it needs mutual TLS"
    ):
        async with remote_hosts({"far": "10.0.0.2:7070"}, None, "abc"):
            pass


EXPERIMENT = """
name: apart
target: {threads: 1, host: near}
drafters: {far: {family: ngram, host: far, link: wire}}
links: {wire: {round_trip_ms: 2}}
workload: {kinds: [rewriting], output_tokens: 16}
use: [far]
repetitions: 1
trace: true
"""


@pytest.mark.slow
async def test_an_experiment_runs_with_verifier_and_drafter_on_two_machines(tmp_path: Path) -> None:
    file = tmp_path / "apart.yaml"
    await asyncio.to_thread(file.write_text, EXPERIMENT)
    async with agent() as far, agent() as near:
        command = [sys.executable, "-m", "outrider.launch.cli", "experiment", "run", str(file)]
        command += ["--out", str(tmp_path), "--hosts", f"far={far.address},near={near.address}"]
        running = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
        assert await asyncio.wait_for(running.wait(), 300) == 0
    found, measured = await asyncio.to_thread(results, tmp_path / "apart")
    assert set(measured) == {"plain", "drafted"}
    assert [measurement.errors for measurement in measured.values()] == [[], []]
    assert len({measurement.texts_sha256 for measurement in measured.values()}) == 1
    assert measured["drafted"].links["wire"].up_bytes > 0
    assert measured["drafted"].cpu_s["far-1"] > 0
    assert measured["drafted"].step_split_s["forward"] > 0
    assert set(found.about()["places"]) == {"far", "near"}


def results(directory: Path) -> tuple[Folder, dict[str, Measurement]]:
    """The only folder of an experiment, with the measurements of its only cell by way."""
    [about] = directory.glob("*/run.json")
    folder = Folder(about.parent)
    [cell] = folder.path.glob("cells/*")
    return folder, {
        measurement.way: measurement for _, measurement in folder.measurements(cell.name)
    }


def run_with(*flags: str) -> str:
    """What `outrider experiment run` says when it refuses these flags."""
    command = [
        sys.executable,
        "-m",
        "outrider.launch.cli",
        "experiment",
        "run",
        "experiments/small.yaml",
        *flags,
    ]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


BAD_HOSTS = [
    ("far", "hosts must be NAME=HOST:PORT with commas between them, not 'far'"),
    ("far=10.0.0.2", "hosts: far must be host:port"),
    ("far=127.0.0.1:1,far=127.0.0.1:2", "hosts name far twice"),
    ("far=127.0.0.1:1", "hosts give far, which the experiment does not name"),
]


@pytest.mark.parametrize(("hosts", "reason"), BAD_HOSTS, ids=lambda value: str(value)[:30])
def test_hosts_that_do_not_fit_the_experiment_are_refused(hosts: str, reason: str) -> None:
    assert reason in run_with("--hosts", hosts)


def test_a_host_of_the_experiment_without_an_address_is_named() -> None:
    named = Experiment.model_validate(yaml.safe_load(EXPERIMENT))
    with pytest.raises(
        OutriderError, match="hosts must give the address of far, which the experiment names"
    ):
        check_hosts([named], {"near": "127.0.0.1:1"})
