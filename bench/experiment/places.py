"""Where the processes of a run go: this machine, machines of `--hosts`, containers of `--with compose`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from bench.experiment.compose_file import CORE
from bench.experiment.containers import Project, containers
from bench.experiment.hosts import Host
from bench.experiment.remote import Hosts, check_hosts, remote_hosts
from bench.experiment.spec import Experiment, drafters_of
from bench.experiment.tls import Tls
from outrider.errors import invalid

_LINK = "link-"


@dataclass(frozen=True, slots=True)
class Where:
    """What the command line says of places: addresses of agents by name, and whether all processes are containers."""

    addresses: Mapping[str, str]
    tls: Tls | None = None
    compose: bool = False


@dataclass(frozen=True, slots=True)
class StackPlaces:
    """Implements `bench.experiment.hosts.Places`."""

    hosts: Hosts
    project: Project | None
    compose: bool
    about: Mapping[str, str]
    """Fingerprints of other machines by name, and ids of images; empty where all processes run on this machine."""

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of `about`; empty of nothing."""
        text = json.dumps(dict(self.about), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8] if self.about else ""

    @property
    def here(self) -> str:
        """The address under which the processes reach this machine."""
        if self.compose and self.project is not None:
            return self.project.machine_address
        return self.hosts.here.address

    def host(self, name: str, machine: str | None, is_container: bool) -> Host:
        """Raises OutriderError(INVALID_VALUE) for a place that is not there."""
        if machine is not None:
            return self._remote(name, machine, is_container)
        if self.project is not None and self.compose:
            return self.project.host(
                name, name.removeprefix(_LINK) if name.startswith(_LINK) else CORE
            )
        if not is_container:
            return self.hosts.here
        if self.project is None:
            raise invalid("container", f"{name} is to be one, and no engine was asked for")
        return self.project.host(name, None)

    def _remote(self, name: str, machine: str, is_container: bool) -> Host:
        if self.compose:
            raise invalid(
                "host",
                f"{machine} of {name} is another machine; --with compose keeps all processes on this one",
            )
        if is_container:
            raise invalid(
                "container",
                f"{name} is to be one on host {machine}, where an agent starts processes alone",
            )
        if machine not in self.hosts.remote:
            raise invalid(
                "host", f"{machine} of {name} needs --hosts with the address of its agent"
            )
        return self.hosts.remote[machine]


@asynccontextmanager
async def places(
    experiments: Sequence[Experiment], where: Where, commit: str
) -> AsyncIterator[StackPlaces]:
    """The places of all cells' processes, for as long as the context lasts.

    Raises OutriderError(INVALID_VALUE) for places that do not fit the experiment, and OSError when an agent or the engine
    does not answer.
    """
    check_hosts(experiments, where.addresses)
    wants_engine = where.compose or any(
        drafter.container for one in experiments for _, drafter in drafters_of(one)
    )
    async with AsyncExitStack() as stack:
        hosts = await stack.enter_async_context(remote_hosts(where.addresses, where.tls, commit))
        project = await stack.enter_async_context(containers()) if wants_engine else None
        about = {name: host.machine.fingerprint for name, host in hosts.remote.items()}
        if project is not None:
            about |= await project.image_ids() | {"compose": str(where.compose)}
        yield StackPlaces(hosts, project, where.compose, about)
