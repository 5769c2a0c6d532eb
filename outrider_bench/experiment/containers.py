"""`--with compose`: runs processes as containers of a compose file that grows with each start.

Containers have fixed addresses, so that a command line can name a process before it starts. The
machine reaches all of them, so that the load generator stays outside.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx

from outrider.errors import invalid
from outrider.process.ports import free_port
from outrider_bench.experiment.compose_file import Images, Service, Subnets, compose_file
from outrider_bench.experiment.hosts import LOOPBACK, TAIL_LINES, Launch

PROJECT = "outrider-experiment"
_FIRST_PORT = 20_000
_OF_PROJECT = f"label=com.docker.compose.project={PROJECT}"
_BUILD = "compose/compose.sh build, or compose/ci-up.sh"
_STOP_S = 12
_CALL_S = 60.0
_ENDED = (httpx.codes.NOT_FOUND, httpx.codes.CONFLICT, httpx.codes.NOT_MODIFIED)


class ContainerHandle:
    """A container by its id."""

    def __init__(self, container_id: str, engine: httpx.AsyncClient) -> None:
        self._id = container_id
        self._engine = engine
        self._cpu_s = 0.0

    async def alive(self) -> bool:
        """Whether the container runs; a paused one does, a removed one does not."""
        return bool((await self._state()).get("Running"))

    async def stop(self) -> None:
        """Let the engine send SIGTERM, and SIGKILL after 12 s; return when it has ended."""
        await self.resume()  # a paused process takes no signal
        await self._command(f"stop?t={_STOP_S}")

    async def kill(self) -> None:
        """Let the engine send SIGKILL; return when the container has ended."""
        await self.resume()
        await self._command("kill")
        await self._command("wait")

    async def pause(self) -> None:
        """Freeze all processes of the container."""
        await self._command("pause")

    async def resume(self) -> None:
        """Let a paused container go on; does nothing to another one."""
        if (await self._state()).get("Paused"):
            await self._command("unpause")

    async def tail(self) -> list[str]:
        """The last `TAIL_LINES` lines that it printed; one with its status follows its end."""
        command = ["docker", "logs", "--tail", str(TAIL_LINES), self._id]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        printed, _ = await process.communicate()
        lines = printed.decode(errors="replace").splitlines()
        state = await self._state()
        if not state.get("Running"):
            lines.append(f"ended with status {state.get('ExitCode', 'unknown')}")
        return lines[-TAIL_LINES:]

    async def cpu_s(self) -> float:
        """User and system time in seconds since its start, as the engine counts them."""
        answer = await self._engine.get(f"/containers/{self._id}/stats?stream=false&one-shot=true")
        if answer.is_success:
            used_ns = answer.json()["cpu_stats"]["cpu_usage"]["total_usage"]
            # The engine reports 0 once the container has ended; then the last figure counts.
            self._cpu_s = max(self._cpu_s, used_ns / 1e9)
        return self._cpu_s

    async def _state(self) -> dict[str, Any]:
        """The engine's state of the container; empty once it has been removed."""
        answer = await self._engine.get(f"/containers/{self._id}/json")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return {}
        state: dict[str, Any] = answer.raise_for_status().json()["State"]
        return state

    async def _command(self, command: str) -> None:
        """Send the engine a command. A container that has ended or is gone is no error."""
        answer = await self._engine.post(f"/containers/{self._id}/{command}")
        if answer.status_code not in _ENDED:
            answer.raise_for_status()


class Project:
    """A compose project: its services so far, and the commands of Compose and the engine."""

    def __init__(
        self,
        directory: Path,
        compose: Sequence[str],
        engine: httpx.AsyncClient,
        images: Images,
        machine_address: str,
    ) -> None:
        self.machine_address = machine_address
        """The address by which containers of all networks reach this machine."""
        self.path = directory / "compose.yaml"
        self.subnets = Subnets()
        self._directory = directory
        self._compose = [*compose, "--project-name", PROJECT, "--file", str(self.path)]
        self._engine = engine
        self._images = images
        self._services: dict[str, Service] = {}
        self._numbers: dict[str, int] = {}

    def host(self, name: str, network: str | None) -> ContainerHost:
        """A host for the process `name` and others beside it.

        They listen in `network`; None is the network of the machine.
        """
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        return ContainerHost(self, network, number)

    async def start(self, service: Service) -> ContainerHandle:
        """Add or replace a service and start its container.

        Raises OSError with the engine's message.
        """
        name = service.launch.name
        self._services[name] = service
        services = list(self._services.values())
        self.path.write_text(compose_file(services, self.subnets, self._images))
        await self._run("up", "--detach", "--no-deps", "--no-build", "--force-recreate", name)
        return ContainerHandle(await self._id_of(name), self._engine)

    async def _id_of(self, name: str) -> str:
        """The engine's id of a service's container, which may have ended already.

        Compose 1.29 lists only containers that run, so this asks the engine.
        """
        service = f"label=com.docker.compose.service={name}"
        filters = ("--filter", _OF_PROJECT, "--filter", service)
        found = await _output("docker", "ps", "--all", "--quiet", "--no-trunc", *filters)
        return found.strip()

    def write_files(self, launch: Launch) -> Path | None:
        """Write a launch's files to a directory that only this user reads."""
        if not launch.files:
            return None
        directory = self._directory / f"files-{launch.name}"
        directory.mkdir(mode=0o700, exist_ok=True)
        for name, text in launch.files.items():
            (directory / name).write_text(text)
        return directory

    async def image_ids(self) -> dict[str, str]:
        """The id of each image by name; raises OSError that says how to build a missing one."""
        ids = {}
        for name in self._images.names:
            answer = await self._engine.get(f"/images/{name}/json")
            if answer.status_code == httpx.codes.NOT_FOUND:
                raise OSError(f"there is no image {name}; build it with {_BUILD}")
            ids[name] = str(answer.raise_for_status().json()["Id"])
        return ids

    async def down(self) -> None:
        """Remove containers and networks, also those of an interrupted run."""
        if not self.path.exists():
            self.path.write_text(compose_file([], self.subnets, self._images))
        await self._run("down", "--volumes", "--remove-orphans", "--timeout", str(_STOP_S))

    async def _run(self, *words: str) -> str:
        return await _output(*self._compose, *words)


async def _output(*command: str) -> str:
    """Run a command and return its output; raises OSError with its errors when it fails."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    output, errors = await process.communicate()
    if process.returncode != 0:
        said = errors.decode(errors="replace").strip()[-2000:]
        raise OSError(f"{' '.join(command)} failed: {said}")
    return output.decode()


class ContainerHost:
    """Containers with one address. The first has the network, and later ones share it."""

    def __init__(self, project: Project, network: str | None, number: int) -> None:
        self._project = project
        self._network = network
        self._number = number
        self._first: str | None = None
        self._ports = itertools.count(_FIRST_PORT)

    @property
    def address(self) -> str:
        """The containers' IP address: loopback without a network, else one of the network's."""
        if self._network is None:
            return LOOPBACK
        return self._project.subnets.address(self._network, self._number)

    async def free_port(self) -> int:
        """A port; nothing else listens at the containers' own address."""
        if self._network is None:
            return free_port(self.address)
        return next(self._ports)

    async def start(self, launch: Launch) -> ContainerHandle:
        """Start the launch in a container beside the first one.

        Raises OSError when Compose cannot start it.
        """
        self._first = self._first or launch.name
        beside = None
        if self._network is not None and launch.name != self._first:
            beside = self._first
        addresses = {}
        if beside is None:
            addresses = self._addresses(launch)
        files = self._project.write_files(launch)
        return await self._project.start(Service(launch, addresses, beside, files))

    def _addresses(self, launch: Launch) -> dict[str, str]:
        """An address in each network of the addresses in the command line.

        So a drafter reaches its link, and not the verifier behind it.
        """
        if self._network is None:
            return {}
        subnets = self._project.subnets
        return {
            name: subnets.address(name, self._number)
            for name in subnets.named_in(launch) or [self._network]
        }


@asynccontextmanager
async def containers(images: Images | None = None) -> AsyncIterator[Project]:
    """A project whose containers and networks are removed when the context ends.

    Raises OutriderError(INVALID_VALUE) without Compose, and OSError when no engine answers.
    """
    compose = await compose_command()
    images = images or Images.from_environment()
    async with engine_client() as engine:
        with tempfile.TemporaryDirectory(prefix="outrider-compose-") as directory:
            address = await bridge_address(engine)
            project = Project(Path(directory), compose, engine, images, address)
            await project.down()
            try:
                yield project
            finally:
                await asyncio.shield(project.down())


async def bridge_address(engine: httpx.AsyncClient) -> str:
    """The machine's address on the engine's default network, which exists before the experiment."""
    answer = await engine.get("/networks/bridge")
    config = answer.raise_for_status().json()["IPAM"]["Config"][0]
    # Docker 20 does not say the gateway until the engine has been restarted once. It is the
    # network's first address.
    first = next(ip_network(config["Subnet"]).hosts())
    return str(config.get("Gateway", first))


async def compose_command() -> list[str]:
    """`docker compose`, or `docker-compose` if docker has no such plugin."""
    if shutil.which("docker") is None:
        raise invalid("with", "compose needs the command docker, which is not installed")
    try:
        await _output("docker", "compose", "version")
        return ["docker", "compose"]
    except OSError:
        if shutil.which("docker-compose") is not None:
            return ["docker-compose"]
    raise invalid("with", "compose needs docker compose or docker-compose; neither is installed")


@asynccontextmanager
async def engine_client() -> AsyncIterator[httpx.AsyncClient]:
    """A client of the engine's API; raises OSError where no engine answers."""
    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not address.startswith("unix://"):
        problem = f"compose needs an engine of this machine, and DOCKER_HOST is {address}"
        raise invalid("with", problem)
    transport = httpx.AsyncHTTPTransport(uds=address.removeprefix("unix://"))
    client = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=_CALL_S)
    async with client:
        try:
            (await client.get("/_ping")).raise_for_status()
        except httpx.HTTPError as error:
            raise OSError(f"no container engine answers at {address}: {error}") from error
        yield client
