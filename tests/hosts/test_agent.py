"""An agent starts processes for a controller, and ends them with the controller's lease."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest
from agents import PATIENCE_S, ROOT, agent, held, listens, proxy, until

from outrider.errors import OutriderError
from outrider.process.ports import free_port
from outrider_bench.experiment.hosts import Launch
from outrider_bench.experiment.remote import RemoteHandle, RemoteHost, remote_hosts


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


async def test_the_tail_of_a_killed_process_has_its_signal() -> None:
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


async def test_two_agents_serve_as_two_machines() -> None:
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
from outrider_bench.experiment.hosts import Launch
from outrider_bench.experiment.remote import remote_hosts
async def main(address, commit, *arguments):
    launch = Launch("proxy", "outrider_bench.experiment.link_process", arguments)
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


async def test_an_agent_refuses_to_start_programs_of_others() -> None:
    async with agent() as near, held(near) as hosts:
        for launch, reason in REFUSED:
            assert reason in await refused(hosts.remote["near"], launch)


async def test_files_reach_the_remote_process_and_no_one_else() -> None:
    arguments = "--family ngram --verifier 127.0.0.1:1 --redis redis://127.0.0.1:1/0"
    words = (*arguments.split(), "--pool-secret-file", "{files}/secret")
    files = {"secret": "a secret of 32 bytes and a few more"}
    launch = Launch("drafter", "drafter_svc", words, files=files)
    async with agent() as near, held(near) as hosts:
        handle = await hosts.remote["near"].start(launch)
        path = await asyncio.to_thread(secret_of_child, near.process.pid)
        assert await asyncio.to_thread(path.read_text) == launch.files["secret"]
        assert (await asyncio.to_thread(path.parent.stat)).st_mode & 0o077 == 0
        await handle.stop()
        assert not await asyncio.to_thread(path.exists)


def secret_of_child(parent: int) -> Path:
    """The path of the secret in the command line of the drafter that `parent` started."""
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
