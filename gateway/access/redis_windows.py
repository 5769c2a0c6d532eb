"""Counts of each key's use in a Redis that several gateways share, by the `limits` library."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from limits.aio.storage import RedisClusterStorage, RedisSentinelStorage, RedisStorage, Storage
from limits.storage import storage_from_string
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.access.windows import MINUTE_S, Count, Windows
from outrider.errors import invalid
from outrider.process.redis_credentials import Credentials

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


class RedisWindows(Windows):
    """Windows in Redis. While Redis fails, they are in memory."""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._storage = storage
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
                return await self._storage.incr(f"{name}/{minute}", _KEPT_S, amount)
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

    async def close(self) -> None:
        """Let the commands end, and close all connections. Never raises."""
        while self._commands:
            await asyncio.wait(self._commands)
        if not isinstance(self._storage, RedisStorage):
            return
        bridge: Any = self._storage.bridge
        client = bridge.get_connection()
        closing = [client.aclose()]
        if isinstance(self._storage, RedisSentinelStorage):
            closing.append(bridge.sentinel.aclose())
        if isinstance(self._storage, RedisClusterStorage):
            # After a failure the client believes that it is closed, but its connections are open.
            nodes = client.nodes_manager
            closing += [nodes.aclose(), nodes.aclose("startup_nodes")]
        failures = filter(None, await asyncio.gather(*closing, return_exceptions=True))
        if failure := next(failures, None):
            log.warning("a connection to Redis did not close properly: %s", failure)

    def _pause(self, error: Exception) -> None:
        now = time.monotonic()
        self._paused_until = now + _REDIS_PAUSE_S
        if now - self._warned_at >= _WARNING_INTERVAL_S:
            self._warned_at = now
            log.warning("limits are counted by this gateway alone, since Redis fails: %s", error)


def _without_user(url: str) -> tuple[str, str]:
    """The URL without its user, and the user. redis-py takes the user from one place alone.

    Raises ValueError for a URL that has a password as well.
    """
    parts = urlsplit(url)
    user, at, servers = parts.netloc.rpartition("@")
    if ":" in user:
        raise ValueError("the password is in limits-redis-password-file, so the URL must have none")
    return urlunsplit(parts._replace(netloc=servers)) if at else url, unquote(user)


def storage_of(url: str, password_file: Path | None, ca_file: Path | None) -> Storage:
    """The storage of `limits` for the Redis of a URL.

    Raises OutriderError(INVALID_VALUE) for a wrong URL and a file that cannot be read.
    """
    options: dict[str, Any] = {
        "implementation": "redispy",
        "key_prefix": "outrider:limits",
        "socket_timeout": _REDIS_TIMEOUT_S,
        "socket_connect_timeout": _REDIS_CONNECT_S,
    }
    try:
        if password_file is not None:
            url, user = _without_user(url)
            login = Credentials(user, "", password_file)
            # Without the file the gateway should not start.
            login.get_credentials()
            options["credential_provider"] = login
        if ca_file is not None:
            options["ssl_ca_certs"] = str(ca_file)
        if url.startswith("rediss+"):
            # `limits` knows TLS by the scheme of a single server alone.
            url = url.replace("rediss+", "redis+", 1)
            options["ssl"] = True
        if url.startswith("redis+sentinel:"):
            # `limits` adds user and password. Without the others, redis-py tries a Sentinel ten
            # times, for 5 s each.
            shared = ("socket", "ssl", "credential")
            own = {k: v for k, v in options.items() if k.startswith(shared)}
            options["sentinel_kwargs"] = {**own, "retry": Retry(NoBackoff(), 0)}
        elif url.startswith("redis+cluster:"):
            # Retry once and at once: a cluster's pooled connection may lead to a server that is
            # gone. By default redis-py retries for seconds.
            options["retry"] = Retry(NoBackoff(), 1)
        storage = storage_from_string(f"async+{url}", **options)
    except OSError as error:
        raise invalid("limits-redis-password-file", f"cannot be read: {error}") from error
    # The library raises various errors for a wrong URL.
    except Exception as error:
        raise invalid("limits-redis", f"cannot be used: {error}") from error
    if not isinstance(storage, RedisStorage):
        raise invalid("limits-redis", "must be the URL of a Redis")
    return storage
