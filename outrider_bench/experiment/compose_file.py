"""Writes the compose file of an experiment, with a network for each link and fixed addresses.

Knows no engine. compose/compose.yaml builds the images.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from outrider.errors import invalid
from outrider_bench.experiment.hosts import Launch

CORE = "core"
"""The network of processes that no link separates."""

FILES_DIRECTORY = "/run/outrider/files"
_SUBNET = "10.213"
_ADDRESS = re.compile(rf"\b{re.escape(_SUBNET)}\.(\d+)\.\d+\b")
_IMAGES = {
    "verifier_svc": "outrider-verifier",
    "gateway": "outrider-gateway",
    "outrider_bench.experiment.link_process": "outrider-drafter-ngram",
}
_DRAFTER_IMAGES = {"ngram": "outrider-drafter-ngram", "model": "outrider-drafter-model"}


@dataclass(frozen=True, slots=True)
class Images:
    """The images of containers."""

    tag: str = "dev"
    redis: str = "redis:7-bookworm"

    @classmethod
    def from_environment(cls) -> Images:
        """Read the variables of compose/compose.yaml."""
        tag = os.environ.get("OUTRIDER_TAG") or cls().tag
        return cls(tag, os.environ.get("OUTRIDER_REDIS_IMAGE") or cls().redis)

    @property
    def names(self) -> list[str]:
        """The images that compose/compose.yaml builds for the CPU."""
        built = {*_IMAGES.values(), *_DRAFTER_IMAGES.values()}
        return [f"{name}:{self.tag}" for name in sorted(built)]

    def of(self, launch: Launch) -> str:
        """The image of a process; raises OutriderError(INVALID_VALUE) if no image has it."""
        if launch.program == "redis-server":
            return self.redis
        family = value_of(launch, "--family") or ""
        if launch.module == "drafter_svc":
            name = _DRAFTER_IMAGES.get(family)
        else:
            name = _IMAGES.get(launch.module)
        if name is None:
            program = f"{launch.module or launch.program} {family}"
            raise invalid("container", f"{launch.name} runs {program}, which is in no image")
        variant = ""
        if gpu_of(launch) is not None:
            variant = "-gpu"
        return f"{name}{variant}:{self.tag}"


@dataclass(frozen=True, slots=True)
class Service:
    """A process with its networks."""

    launch: Launch
    addresses: Mapping[str, str]
    """Its address by network; without any it uses the machine's network."""
    beside: str | None = None
    """The service whose network it shares, if any."""
    files: Path | None = None
    """A directory of this machine with the launch's files."""


class Subnets:
    """Gives each network a subnet, in the order of the first calls."""

    def __init__(self) -> None:
        self._networks = [CORE]

    def of(self, network: str) -> str:
        """The first three numbers of the network's addresses."""
        if network not in self._networks:
            self._networks.append(network)
        return f"{_SUBNET}.{self._networks.index(network)}"

    def address(self, network: str, number: int) -> str:
        """The address of the process with this number, 1 to 250."""
        if not 1 <= number <= 250:
            raise invalid("drafters", f"make more than 250 containers: number {number}")
        # The first address is the machine's.
        return f"{self.of(network)}.{number + 1}"

    def named_in(self, launch: Launch) -> list[str]:
        """The networks of the addresses in a command line."""
        numbers = _ADDRESS.findall(" ".join(launch.arguments))
        return list(dict.fromkeys(self._networks[int(number)] for number in numbers))


def compose_file(services: Sequence[Service], subnets: Subnets, images: Images) -> str:
    """The compose file as YAML, for Compose v2 and docker-compose 1.29."""
    described = {service.launch.name: _service(service, images) for service in services}
    names = dict.fromkeys(name for service in services for name in service.addresses)
    networks = {
        name: {"ipam": {"config": [{"subnet": f"{subnets.of(name)}.0/24"}]}} for name in names
    }
    content: dict[str, Any] = {"version": "2.4", "services": described}
    if networks:
        content["networks"] = networks
    return yaml.safe_dump(content, sort_keys=False, width=1000)


def _service(service: Service, images: Images) -> dict[str, Any]:
    """A service, hardened as in compose/compose.yaml.

    It has no limit on memory or CPU, which would change the figures.
    """
    launch = service.launch
    words = launch.command(FILES_DIRECTORY, python="python")
    described: dict[str, Any] = {
        "image": images.of(launch),
        # Shared files and sockets belong to the caller.
        "user": f"{os.getuid()}:{os.getgid()}",
        "entrypoint": list(map(_literal, words)),
        "command": [],
        "environment": {name: _literal(value) for name, value in launch.environment.items()},
        "working_dir": str(Path.cwd()),
        "volumes": _volumes(service),
        "healthcheck": {"disable": True},
        "init": True,
        "restart": "no",
        "read_only": True,
        "tmpfs": ["/tmp:mode=1777,size=256m"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "pids_limit": 512,
        "stop_grace_period": "20s",
    }
    if "--numa-node" in launch.arguments:
        # The engine's filter of system calls demands it for binding memory to a node.
        described["cap_add"] = ["SYS_NICE"]
    # A drafter has a setting for its cores, and pins itself.
    cores = launch.cores or value_of(launch, "--cores")
    if cores is not None:
        described["cpuset"] = cores
    gpu = gpu_of(launch)
    if gpu is not None:
        devices = [{"driver": "nvidia", "device_ids": [gpu], "capabilities": ["gpu"]}]
        described["deploy"] = {"resources": {"reservations": {"devices": devices}}}
    return described | _place(service)


def _place(service: Service) -> dict[str, Any]:
    if service.beside is not None:
        return {"network_mode": f"service:{service.beside}"}
    if not service.addresses:
        return {"network_mode": "host"}
    return {
        "networks": {name: {"ipv4_address": address} for name, address in service.addresses.items()}
    }


def _volumes(service: Service) -> list[dict[str, Any]]:
    # The engine takes only absolute paths. The container's working directory is the caller's.
    paths = [str(path.absolute()) for path in service.launch.shares]
    shared = [{"type": "bind", "source": path, "target": path} for path in paths]
    if service.files is None:
        return shared
    files = {"type": "bind", "source": str(service.files), "target": FILES_DIRECTORY}
    return [*shared, {**files, "read_only": True}]


def _literal(text: str) -> str:
    """Escape text, so that Compose replaces no variable in it."""
    return text.replace("$", "$$")


def value_of(launch: Launch, flag: str) -> str | None:
    """The value of a flag of a command line; None if the flag is not given."""
    arguments = launch.arguments
    if flag in arguments[:-1]:
        return arguments[arguments.index(flag) + 1]
    return None


def gpu_of(launch: Launch) -> str | None:
    """The number of the GPU that a process computes on; None for the CPU."""
    device = value_of(launch, "--device") or "cpu"
    if not device.startswith("cuda"):
        return None
    return device.partition(":")[2] or "0"
