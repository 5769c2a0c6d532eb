"""Finds the host of each process: this machine, another machine, or a container."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from outrider.errors import invalid
from outrider_bench.experiment.compose_file import CORE
from outrider_bench.experiment.containers import Project, containers
from outrider_bench.experiment.hosts import Host
from outrider_bench.experiment.remote import Hosts, remote_hosts, used_hosts
from outrider_bench.experiment.spec import Experiment, drafters_of

_LINK = "link-"


@dataclass(frozen=True, slots=True)
class Where:
    """The settings of the command line for places."""

    ssh: str = "ssh"
    """The command of ssh, with options if it has any."""
    compose: bool = False
    """Whether all processes are containers."""


@dataclass(frozen=True, slots=True)
class Places:
    """The hosts of an experiment's processes."""

    hosts: Hosts
    project: Project | None
    compose: bool
    about: Mapping[str, str]
    """Fingerprints of other machines by name, and ids of images; empty if neither is used."""

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of a hash of `about`; empty if `about` is."""
        if not self.about:
            return ""
        text = json.dumps(dict(self.about), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def here(self) -> str:
        """The IP address of this machine that all processes reach."""
        if self.compose and self.project is not None:
            return self.project.machine_address
        return self.hosts.here.address

    def host(self, name: str, machine: str | None, is_container: bool) -> Host:
        """The host of the process `name`, such as verifier-1 or link-wire.

        `machine` is a name of the file's `hosts`; None is this machine. Raises
        OutriderError(INVALID_VALUE) for a container that cannot be started.
        """
        if machine is not None:
            return self._remote(name, machine, is_container)
        if self.project is not None and self.compose:
            network = CORE
            if name.startswith(_LINK):
                network = name.removeprefix(_LINK)
            return self.project.host(name, network)
        if not is_container:
            return self.hosts.here
        if self.project is None:
            raise invalid("container", f"{name} needs a container engine: give --with compose")
        return self.project.host(name, None)

    def _remote(self, name: str, machine: str, is_container: bool) -> Host:
        if self.compose:
            problem = "is another machine; --with compose keeps all processes on this one"
            raise invalid("host", f"{machine} of {name} {problem}")
        if is_container:
            problem = f"is to be one on host {machine}, where ssh starts processes alone"
            raise invalid("container", f"{name} {problem}")
        return self.hosts.remote[machine]


@asynccontextmanager
async def places(
    experiments: Sequence[Experiment], where: Where, commit: str
) -> AsyncIterator[Places]:
    """Hold the hosts of all cells' processes until the context ends.

    Raises OutriderError(INVALID_VALUE) for places that do not fit the experiment, and OSError when
    a machine or the engine does not answer.
    """
    wants_engine = where.compose or any(
        drafter.container for one in experiments for _, drafter in drafters_of(one)
    )
    async with AsyncExitStack() as stack:
        hosts = await stack.enter_async_context(
            remote_hosts(used_hosts(experiments), where.ssh, commit)
        )
        project = await stack.enter_async_context(containers()) if wants_engine else None
        about = {
            name: host.machine.fingerprint
            for name, host in hosts.remote.items()
            if host.machine is not None
        }
        if project is not None:
            about |= await project.image_ids() | {"compose": str(where.compose)}
        yield Places(hosts, project, where.compose, about)
