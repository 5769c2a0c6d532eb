"""`--with compose`: runs each process in a container of a service of compose/compose.yaml.

That file says the image, the networks, the cores and the rights. `docker compose run` starts the
container with the command line of the experiment; a container's name is its address.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import yaml

from outrider.errors import invalid
from outrider.process.network.ports import free_port
from outrider_bench.experiment.hosts import TAIL_LINES, Launch, process_cpu_s

PROJECT = "outrider-experiment"
_COMPOSE = Path(__file__).parents[2] / "compose"
_SERVICES = {
    "verifier_svc": "verifier",
    "gateway": "gateway",
    "drafter_svc ngram": "drafter-ngram",
    "drafter_svc model": "drafter-model",
    "drafter_svc grammar": "drafter-grammar",
    "outrider_bench.experiment.link_process": "drafter-ngram",
}


def service_of(launch: Launch) -> str:
    """The service whose image has a process; raises OutriderError(INVALID_VALUE) if none has it."""
    program = f"{launch.module or launch.program} {_value(launch, '--family')}".strip()
    if program not in _SERVICES:
        raise invalid("with", f"compose has no image for {launch.name}, which runs {program}")
    device = _value(launch, "--device") or "cpu"
    return _SERVICES[program] if device == "cpu" else f"{_SERVICES[program]}-gpu"


def _value(launch: Launch, flag: str) -> str:
    arguments = launch.arguments
    return arguments[arguments.index(flag) + 1] if flag in arguments else ""


def run_words(launch: Launch, unset: Iterable[str]) -> Iterator[str]:
    """The words behind `compose run`; `unset` are the service's own settings, taken away."""
    # Shared files and sockets belong to the caller, and paths are relative to the caller's folder.
    yield from ("--detach", "--no-deps", "--name", f"{PROJECT}-{launch.name}")
    yield from ("--user", f"{os.getuid()}:{os.getgid()}", "--workdir", str(Path.cwd()))
    for path in launch.shares:
        yield from ("--volume", f"{path.absolute()}:{path.absolute()}")
    for name, value in launch.environment.items():
        yield from ("-e", f"{name}={value}")
    yield from ("--entrypoint", "env", service_of(launch))
    for name in unset:
        yield from ("-u", name)
    yield from launch.command(python="python")


class ContainerHandle:
    """A container by its name, as a Handle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._cpu_s = 0.0

    async def alive(self) -> bool:
        """As Handle.alive."""
        return await _inspect(self._name, "{{.State.Running}}") == "true"

    async def stop(self) -> None:
        """As Handle.stop."""
        await _try("docker", "stop", "--time", "12", self._name)

    async def tail(self) -> list[str]:
        """As Handle.tail; a line with its status follows its end."""
        lines = (await _try("docker", "logs", "--tail", str(TAIL_LINES), self._name)).splitlines()
        if not await self.alive():
            status = await _inspect(self._name, "{{.State.ExitCode}}")
            lines.append(f"ended with status {status}")
        return lines[-TAIL_LINES:]

    async def cpu_s(self) -> float:
        """As Handle.cpu_s; the last figure, once it has ended."""
        pids = (await _try("docker", "top", self._name, "-eo", "pid")).split()[1:]
        with suppress(FileNotFoundError, ProcessLookupError):
            self._cpu_s = max(self._cpu_s, sum(process_cpu_s(int(pid)) for pid in pids))
        return self._cpu_s


class ContainerHost:
    """One container. Its processes are reached by name, and by this machine at `here`."""

    bind = "0.0.0.0"

    def __init__(self, name: str) -> None:
        self.address = f"{PROJECT}-{name}"
        self.here = ""

    async def free_port(self) -> int:
        """A port that no process listens on here, and so not in the container either."""
        return free_port()

    async def start(self, launch: Launch) -> ContainerHandle:
        """Start or replace the container; raises OSError with what Compose says if it cannot."""
        services = yaml.safe_load((_COMPOSE / "compose.yaml").read_text())["services"]
        words = run_words(launch, services[service_of(launch)].get("environment", ()))
        await _try("docker", "rm", "--force", self.address)
        await _compose("run", *words, cores=launch.cores or "")
        addresses = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
        self.here = (await _inspect(self.address, addresses)).partition(" ")[0]
        return ContainerHandle(self.address)


@asynccontextmanager
async def containers() -> AsyncIterator[dict[str, str]]:
    """The images' ids; its end removes the containers.

    Raises OutriderError(INVALID_VALUE) without docker, and OSError without an engine or an image.
    """
    if shutil.which("docker") is None:
        raise invalid("with", "compose needs the command docker, which is not installed")
    tag = os.environ.get("OUTRIDER_TAG") or "dev"
    known = yaml.safe_load((_COMPOSE / "compose.yaml").read_text())["services"]
    # Services may share an image.
    images = {known[service]["image"].partition(":")[0] for service in _SERVICES.values()}
    names = [f"{image}:{tag}" for image in images if image.startswith("outrider-")]
    await _down()
    ids = {name: await _inspect(name, "{{.Id}}") for name in sorted(names)}
    if missing := [name for name, image_id in ids.items() if not image_id]:
        raise OSError(f"there is no image {missing[0]}; build it with compose/compose.sh build")
    try:
        yield ids
    finally:
        await asyncio.shield(_down())


async def _down() -> None:
    """Remove the containers and networks of this run and of interrupted runs."""
    label = f"label=com.docker.compose.project={PROJECT}"
    found = await _output("docker", "ps", "--all", "--quiet", "--filter", label)
    await _try("docker", "rm", "--force", *found.split())
    await _compose("down", "--volumes", "--remove-orphans")


async def _compose(*words: str, cores: str = "") -> None:
    command = (str(_COMPOSE / "compose.sh"), "--project-name", PROJECT, *words)
    await _output(*command, OUTRIDER_VERIFIER_CPUSET=cores)


async def _inspect(name: str, field: str) -> str:
    """A field of a container, image or network; "" if there is none of this name."""
    return (await _try("docker", "inspect", "--format", field, name)).strip()


async def _try(*command: str) -> str:
    """The output of a command, "" if it fails: the container has ended or is gone."""
    with suppress(OSError):
        return await _output(*command)
    return ""


async def _output(*command: str, **environment: str) -> str:
    """Run a command and return what it prints; raises OSError with its errors when it fails."""
    pipe = asyncio.subprocess.PIPE
    given = {**os.environ, "COMPOSE_PROFILES": "cpu,gpu", **environment}
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=given)
    output, errors = [printed.decode(errors="replace") for printed in await process.communicate()]
    if process.returncode != 0:
        raise OSError(f"{' '.join(command[:5])} failed: {errors.strip()[-2000:]}")
    # `docker logs` passes on what a process printed as errors.
    return output + (errors if command[1] == "logs" else "")
