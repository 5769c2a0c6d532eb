"""`--with compose`: the container engine as hosts, one a container, from a compose file that grows with each start.

Containers have fixed addresses, so that a process can be told where another will listen. The machine itself reaches all
of them, so that the load generator stays outside.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.experiment.compose_file import Images, Service, Subnets, compose_file
from bench.experiment.hosts import TAIL_LINES, Launch, LocalHost
from outrider.errors import invalid
from outrider.launch.stack import free_port

PROJECT = "outrider-experiment"
_FIRST_PORT = 20_000
_OF_PROJECT = f"label=com.docker.compose.project={PROJECT}"
_BUILD = "docker compose -f compose/compose.yaml build (or docker-compose), or compose/ci-up.sh"
_STOP_S = 12
_CALL_S = 60.0


class ContainerHandle:
    """A container by its id."""

    def __init__(self, name: str, container_id: str, engine: httpx.AsyncClient) -> None:
        self._name = name
        self._id = container_id
        self._engine = engine
        self._cpu_s = 0.0

    @property
    def name(self) -> str:
        return self._name

    async def alive(self) -> bool:
        return bool((await self._state()).get("Running"))

    async def stop(self) -> None:
        await self.resume()  # a paused process takes no signal
        await self._told(f"stop?t={_STOP_S}")

    async def kill(self) -> None:
        await self.resume()
        await self._told("kill")
        await self._told("wait")

    async def pause(self) -> None:
        await self._told("pause")

    async def resume(self) -> None:
        if (await self._state()).get("Paused"):
            await self._told("unpause")

    async def tail(self) -> list[str]:
        process = await asyncio.create_subprocess_exec(
            "docker",
            "logs",
            "--tail",
            str(TAIL_LINES),
            self._id,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
        state = await self._state()
        ended = (
            []
            if state.get("Running")
            else [f"ended with status {state.get('ExitCode', 'unknown')}"]
        )
        return [*printed.decode(errors="replace").splitlines(), *ended][-TAIL_LINES:]

    async def cpu_s(self) -> float:
        answer = await self._engine.get(f"/containers/{self._id}/stats?stream=false&one-shot=true")
        if answer.is_success:
            used_ns = answer.json()["cpu_stats"]["cpu_usage"]["total_usage"]
            # Zero once the container has ended; then the last figure stands.
            self._cpu_s = max(self._cpu_s, used_ns / 1e9)
        return self._cpu_s

    async def _state(self) -> dict[str, Any]:
        """Empty once the container has been removed."""
        answer = await self._engine.get(f"/containers/{self._id}/json")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return {}
        state: dict[str, Any] = answer.raise_for_status().json()["State"]
        return state

    async def _told(self, what: str) -> None:
        """Tell the engine; that the container has ended, or is gone, is no error."""
        answer = await self._engine.post(f"/containers/{self._id}/{what}")
        if answer.status_code not in (
            httpx.codes.NOT_FOUND,
            httpx.codes.CONFLICT,
            httpx.codes.NOT_MODIFIED,
        ):
            answer.raise_for_status()


class Project:
    """A compose project: the services so far, and the commands of Compose and the engine."""

    def __init__(
        self,
        directory: Path,
        compose: Sequence[str],
        engine: httpx.AsyncClient,
        images: Images,
        machine_address: str,
    ) -> None:
        self.machine_address = machine_address
        """The address of the machine itself, which containers of all networks reach."""
        self.path = directory / "compose.yaml"
        self.subnets = Subnets()
        self._directory = directory
        self._compose = [*compose, "--project-name", PROJECT, "--file", str(self.path)]
        self._engine = engine
        self._images = images
        self._services: dict[str, Service] = {}
        self._numbers: dict[str, int] = {}

    def host(self, name: str, network: str | None) -> ContainerHost:
        """The host that begins with process `name`, which listens in `network`; None is that of the machine itself."""
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        return ContainerHost(self, network, number)

    async def start(self, service: Service) -> ContainerHandle:
        """Add a service, or replace it, and start its container; raises OSError with the engine's words."""
        name = service.launch.name
        self._services[name] = service
        self.path.write_text(
            compose_file(list(self._services.values()), self.subnets, self._images)
        )
        await self._run("up", "--detach", "--no-deps", "--no-build", "--force-recreate", name)
        return ContainerHandle(name, await self._id_of(name), self._engine)

    async def _id_of(self, name: str) -> str:
        """The engine's id of a service's container, which may have ended already: Compose 1.29 lists what runs alone."""
        label = f"label=com.docker.compose.service={name}"
        found = await _output(
            "docker",
            "ps",
            "--all",
            "--quiet",
            "--no-trunc",
            "--filter",
            _OF_PROJECT,
            "--filter",
            label,
        )
        return found.strip()

    def write_files(self, launch: Launch) -> Path | None:
        """The directory with a launch's files, which only this user reads."""
        if not launch.files:
            return None
        directory = self._directory / f"files-{launch.name}"
        directory.mkdir(mode=0o700, exist_ok=True)
        for name, text in launch.files.items():
            (directory / name).write_text(text)
        return directory

    async def image_ids(self) -> dict[str, str]:
        """The id of each image that was built here; raises OSError that says how to build one that is missing."""
        ids = {}
        for name in self._images.names:
            answer = await self._engine.get(f"/images/{name}/json")
            if answer.status_code == httpx.codes.NOT_FOUND:
                raise OSError(f"there is no image {name}; build it with {_BUILD}")
            ids[name] = str(answer.raise_for_status().json()["Id"])
        return ids

    async def down(self) -> None:
        """Remove containers and networks, also those of a run that was cut off."""
        if not self.path.exists():
            self.path.write_text(compose_file([], self.subnets, self._images))
        await self._run("down", "--volumes", "--remove-orphans", "--timeout", str(_STOP_S))

    async def _run(self, *words: str) -> str:
        return await _output(*self._compose, *words)


async def _output(*command: str) -> str:
    """What a command prints; raises OSError with its words when it fails."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    output, errors = await process.communicate()
    if process.returncode != 0:
        said = errors.decode(errors="replace").strip()[-2000:]
        raise OSError(f"{' '.join(command)} failed: {said}")
    return output.decode()


class ContainerHost:
    """Containers with one address: the first has the network, and those that are started later share it."""

    def __init__(self, project: Project, network: str | None, number: int) -> None:
        self._project = project
        self._network = network
        self._number = number
        self._first: str | None = None
        self._ports = itertools.count(_FIRST_PORT)

    @property
    def address(self) -> str:
        if self._network is None:
            return LocalHost.address
        return self._project.subnets.address(self._network, self._number)

    async def free_port(self) -> int:
        """Nothing else listens at the containers' own address."""
        return free_port(self.address) if self._network is None else next(self._ports)

    async def start(self, launch: Launch) -> ContainerHandle:
        self._first = self._first or launch.name
        beside = self._first if self._network is not None and launch.name != self._first else None
        addresses = self._addresses(launch) if beside is None else {}
        return await self._project.start(
            Service(launch, addresses, beside, self._project.write_files(launch))
        )

    def _addresses(self, launch: Launch) -> dict[str, str]:
        """In each network that the command line names an address of: so a drafter reaches its link, and not what is behind."""
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

    Raises OutriderError(INVALID_VALUE) where there is no Compose, and OSError where no engine answers.
    """
    compose = await compose_command()
    async with engine_client() as engine:
        with tempfile.TemporaryDirectory(prefix="outrider-compose-") as directory:
            address = await bridge_address(engine)
            project = Project(
                Path(directory), compose, engine, images or Images.from_environment(), address
            )
            await project.down()
            try:
                yield project
            finally:
                await asyncio.shield(project.down())


async def bridge_address(engine: httpx.AsyncClient) -> str:
    """The machine's address on the engine's own network, which is there before any of the experiment."""
    answer = await engine.get("/networks/bridge")
    address: str = answer.raise_for_status().json()["IPAM"]["Config"][0]["Gateway"]
    return address


async def compose_command() -> list[str]:
    """`docker compose`, or `docker-compose` where the engine's command has no such plugin."""
    if shutil.which("docker") is None:
        raise invalid("with", "compose needs the command docker, which is not installed")
    process = await asyncio.create_subprocess_exec(
        "docker",
        "compose",
        "version",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    if await process.wait() == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        raise invalid(
            "with", "compose needs docker compose or docker-compose, and neither is installed"
        )
    return ["docker-compose"]


@asynccontextmanager
async def engine_client() -> AsyncIterator[httpx.AsyncClient]:
    """A client of the engine's API; raises OSError where no engine answers."""
    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not address.startswith("unix://"):
        raise invalid(
            "with", f"compose needs an engine of this machine, and DOCKER_HOST is {address}"
        )
    transport = httpx.AsyncHTTPTransport(uds=address.removeprefix("unix://"))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://engine", timeout=_CALL_S
    ) as client:
        try:
            (await client.get("/_ping")).raise_for_status()
        except httpx.HTTPError as error:
            raise OSError(f"no container engine answers at {address}: {error}") from error
        yield client
