"""Finds the host of each process: this machine, another machine, or a container."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from outrider.errors import invalid
from outrider_bench.experiment.containers import ContainerHost, containers
from outrider_bench.experiment.hosts import Host, LocalHost
from outrider_bench.experiment.remote import RemoteHost, local_host, remote_hosts, used_hosts
from outrider_bench.experiment.spec import Experiment


@dataclass(frozen=True, slots=True)
class Places:
    """The hosts of an experiment's processes."""

    here: LocalHost = field(default_factory=LocalHost)
    remote: Mapping[str, RemoteHost] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of other machines by name, and ids of images; empty if neither is used."""
    compose: bool = False
    """Whether each process is a container."""

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of a hash of `about`; empty if `about` is."""
        if not self.about:
            return ""
        text = json.dumps(dict(self.about), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def host(self, name: str, machine: str | None) -> Host:
        """The host of the process `name`, such as verifier-1 or link-wire.

        `machine` is a name of the file's `hosts`; None is this machine. Raises
        OutriderError(INVALID_VALUE) for another machine beside containers.
        """
        if not self.compose:
            return self.here if machine is None else self.remote[machine]
        if machine is not None:
            problem = "is another machine; --with compose keeps all processes on this one"
            raise invalid("host", f"{machine} of {name} {problem}")
        return ContainerHost(name)


@asynccontextmanager
async def places(
    experiments: Sequence[Experiment], commit: str, *, compose: bool = False
) -> AsyncIterator[Places]:
    """Hold the hosts of all cells' processes until the context ends.

    With `compose` each process is a container. Raises OutriderError(INVALID_VALUE) for places that
    do not fit the experiment, and OSError when a machine or the engine does not answer.
    """
    async with AsyncExitStack() as stack:
        remote = await stack.enter_async_context(remote_hosts(used_hosts(experiments), commit))
        if compose:
            yield Places(about=await stack.enter_async_context(containers()), compose=True)
            return
        about = {
            name: host.machine.fingerprint
            for name, host in remote.items()
            if host.machine is not None
        }
        yield Places(local_host(remote), remote, about)
