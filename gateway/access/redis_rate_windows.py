"""Counts of each key's use in a Redis that several gateways share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.access.rate_windows import MINUTE_S, Count, RateWindows
from outrider.errors import OutriderError
from outrider.process.redis_replies import bound_replies
from outrider.process.redis_server import RedisServer, close
from outrider.process.tls import Tls

log = logging.getLogger(__name__)

# A window is kept for longer than its minute, since the clocks of two gateways may differ.
_KEPT_S = 2 * MINUTE_S
_REDIS_TIMEOUT_S = 0.1
_REDIS_CONNECT_S = 0.5
# After a failure, Redis is left alone for this time, and counts go on in memory.
_REDIS_PAUSE_S = 5.0
_WARNING_INTERVAL_S = 60.0
# Each running command has a connection. redis-py fails a command that would need a 101st. For each
# TLS connection it loads the system's authorities, for 0.02 s in which nothing else runs: if many
# connections begin together, they miss their time-outs.
_MAX_RUNNING = 4


_PREFIX = "outrider:limits:"
_ADD = """
local total = redis.call('INCRBY', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return total
"""


class Counters:
    """Counters in a Redis, which expire. Make and use them on a running event loop."""

    def __init__(self, server: RedisServer) -> None:
        self._client = server.client(_REDIS_TIMEOUT_S, _REDIS_CONNECT_S)
        bound_replies(self._client)

    async def add(self, name: str, amount: int) -> int:
        """Add to a counter and return its sum. Raises an error of redis-py if Redis fails."""
        # redis-py has no type for a script's result.
        client: Any = self._client
        return int(await client.eval(_ADD, 1, f"{_PREFIX}{name}", amount, _KEPT_S))

    async def close(self) -> None:
        """Close all connections, also if one fails; then raise the first failure."""
        await close(self._client)


class RedisRateWindows(RateWindows):
    """Rate windows in Redis. While Redis fails, they are in memory."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._counters = counters
        self._paused_until = 0.0
        self._warned_at = -_WARNING_INTERVAL_S
        self._commands: set[asyncio.Task[int | None]] = set()
        self._running = asyncio.Semaphore(_MAX_RUNNING)

    async def add(self, name: str, amount: int, minute: int) -> Count:
        """Add to a count of a minute. If the caller leaves meanwhile, nothing is added."""
        if time.monotonic() >= self._paused_until:
            command = self._begin(name, amount, minute)
            try:
                # A caller that leaves must not cut the command off from its answer.
                total = await asyncio.shield(command)
            except asyncio.CancelledError:
                self._take_back(command, name, amount, minute)
                raise
            if total is not None:
                return Count(total, is_shared=True)
        return await super().add(name, amount, minute)

    async def correct(self, name: str, amount: int, minute: int, counted: Count) -> None:
        """Adjust the counter, Redis or local, that `counted` used; not while Redis is down."""
        if not counted.is_shared:
            await super().correct(name, amount, minute, counted)
        elif time.monotonic() >= self._paused_until:
            await asyncio.shield(self._begin(name, amount, minute))

    def _begin(self, name: str, amount: int, minute: int) -> asyncio.Task[int | None]:
        """Add to a count in Redis. The result is None if Redis fails."""
        command = asyncio.create_task(self._command(name, amount, minute))
        self._commands.add(command)
        command.add_done_callback(self._commands.discard)
        return command

    async def _command(self, name: str, amount: int, minute: int) -> int | None:
        async with self._running:
            # Redis may have failed while this command waited for its turn.
            if time.monotonic() < self._paused_until:
                return None
            try:
                return await self._counters.add(f"{name}/{minute}", amount)
            # Neither a faulty server nor a bug in the client may end a request.
            except Exception as error:  # noqa: BLE001
                self._pause(error)
                return None

    def _take_back(
        self, command: asyncio.Task[int | None], name: str, amount: int, minute: int
    ) -> None:
        """Subtract what the command adds, once it has ended."""

        def ended(_: asyncio.Task[int | None]) -> None:
            if not command.cancelled() and command.result() is not None:
                self._begin(name, -amount, minute)

        command.add_done_callback(ended)

    @classmethod
    def of(cls, url: str, password_file: Path | None, tls: Tls | None) -> RedisRateWindows:
        """Rate windows in the Redis of a URL; `tls` has this process's certificate.

        Raises OutriderError(INVALID_VALUE) for a wrong URL and a file that cannot be read.
        """
        try:
            return cls(Counters(RedisServer.parse(url, password_file, tls)))
        except OutriderError as error:
            # It names the settings of a drafter, which lack the prefix.
            message = f"limits-{error.message}"
            raise OutriderError(error.reason, message, f"limits-{error.field}") from error

    async def close(self) -> None:
        """Let the commands end, and close all connections. Never raises."""
        while self._commands:
            await asyncio.wait(self._commands)
        try:
            await self._counters.close()
        # Neither a faulty server nor a bug in the client may keep the gateway from ending.
        except Exception as failure:  # noqa: BLE001
            log.warning("a connection to Redis did not close properly: %s", failure)

    def _pause(self, error: Exception) -> None:
        now = time.monotonic()
        self._paused_until = now + _REDIS_PAUSE_S
        if now - self._warned_at >= _WARNING_INTERVAL_S:
            self._warned_at = now
            log.warning("limits are counted by this gateway alone, since Redis fails: %s", error)
