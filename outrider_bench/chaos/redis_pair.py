"""A Redis master, its replica, and a Sentinel that makes the replica the master if it has to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from outrider_bench.experiment.hosts import FILES, LOOPBACK, Launch
from outrider_bench.experiment.launches import redis_launch
from outrider_bench.experiment.processes import StackFailed

_SERVICE = "pool"
_CONFIGURATION = "sentinel.conf"
_DOWN_MS = 1000
"""Time after which the Sentinel replaces a master that does not answer."""
_WHOLE_S = 60.0
_LOOK_S = 0.2


def server_launch(name: str, port: int, directory: Path) -> Launch:
    """The command line of a server whose files are in `directory`, under its name."""
    launch = redis_launch(LOOPBACK, port)
    files = ("--dir", str(directory), "--dbfilename", f"{name}.rdb")
    return replace(launch, name=name, arguments=(*launch.arguments, *files))


@dataclass(frozen=True, slots=True)
class RedisPair:
    """Two servers, by name and port, and the port of their Sentinel. The first begins as master."""

    ports: Mapping[str, int]
    sentinel: int

    @property
    def url(self) -> str:
        """The URL for a drafter."""
        return f"redis+sentinel://{LOOPBACK}:{self.sentinel}/{_SERVICE}"

    def launches(self, directory: Path) -> Iterator[Launch]:
        """The command lines of all three; a replica keeps the master's data in `directory`."""
        first = next(iter(self.ports.values()))
        for name, port in self.ports.items():
            launch = server_launch(name, port, directory)
            more = () if port == first else ("--replicaof", LOOPBACK, str(first))
            yield replace(launch, arguments=(*launch.arguments, *more))
        lines = (
            f"bind {LOOPBACK}",
            f"port {self.sentinel}",
            "protected-mode no",
            f"sentinel monitor {_SERVICE} {LOOPBACK} {first} 1",
            f"sentinel down-after-milliseconds {_SERVICE} {_DOWN_MS}",
            f"sentinel failover-timeout {_SERVICE} 5000",
        )
        yield Launch(
            "sentinel",
            "",
            (f"{FILES}/{_CONFIGURATION}", "--sentinel"),
            program="redis-server",
            files={_CONFIGURATION: "\n".join(lines) + "\n"},
        )

    async def master(self) -> str:
        """The name of the server that takes writes, as the Sentinel says."""
        _, port = await self._ask("GET-MASTER-ADDR-BY-NAME")
        return next(name for name, own in self.ports.items() if own == int(port))

    async def until_whole(self, former: str = "") -> None:
        """Wait until the master has a replica, and is not the former one.

        Raises StackFailed after 60 s.
        """
        until = time.monotonic() + _WHOLE_S
        while await self.master() == former or not await self._has_replica():
            if time.monotonic() > until:
                raise StackFailed(f"no master with a replica in {_WHOLE_S:.0f} s")
            await asyncio.sleep(_LOOK_S)

    async def _has_replica(self) -> bool:
        states = await self._ask("REPLICAS")
        return any(
            state[b"flags"] == b"slave" and state[b"master-link-status"] == b"ok"
            for state in states
        )

    async def _ask(self, question: str) -> Any:
        # redis-py's execute_command has no types.
        redis: Any = Redis(host=LOOPBACK, port=self.sentinel, socket_timeout=5.0)
        async with redis as client:
            return await client.execute_command(f"SENTINEL {question}", _SERVICE)
