"""`outrider drafter erase`: delete what a tenant, or the public pool, has in Redis."""

from __future__ import annotations

import asyncio
import sys

from drafter_svc.config import EraseSettings
from drafter_svc.pools.keys import PoolKeys, is_index, read_secret
from drafter_svc.pools.redis_client import FAILURES, RedisClient
from outrider.errors import OutriderError, invalid
from outrider.process.settings.config import parse


async def erase(client: RedisClient, pattern: bytes) -> int:
    """Delete from all servers every key that matches `pattern`, a glob as Redis's SCAN takes it.

    Returns the number of n-grams and texts deleted. Raises one of FAILURES if Redis fails.
    """
    count = 0
    # Scan for keys instead of reading the indexes: a Redis short of memory may have evicted an
    # index before the entries that it lists.
    async for keys in client.scan(pattern):
        count += await client.unlink([key for key in keys if not is_index(key)])
        await client.unlink([key for key in keys if is_index(key)])
    return count


async def _erase(settings: EraseSettings) -> int:
    server = settings.redis_server()
    if server is None:
        raise invalid("redis", "must be given")
    if (settings.tenant is None) != settings.is_public_pool:
        raise invalid("tenant", "must be given, or is-public-pool instead of it")
    keys = PoolKeys(read_secret(settings.pool_secret_file), public=settings.is_public_pool)
    client = RedisClient(server)
    try:
        return await erase(client, keys.pattern(settings.tenant or ""))
    finally:
        await client.aclose()


def main(arguments: list[str], program: str = "drafter erase") -> None:
    """Delete a tenant's n-grams and texts, or the public pool's, and print their number.

    Exit with status 2 if a setting cannot be parsed, and with status 1 if a setting is missing or
    wrong in another way, or if Redis fails midway. In both cases, print why.
    """
    settings = parse(EraseSettings, program, arguments)
    try:
        count = asyncio.run(_erase(settings))
    except OutriderError as error:
        raise SystemExit(f"{program}: {error}") from error
    except FAILURES as error:
        message = f"Redis failed, so some entries may be left; run it again: {error}"
        raise SystemExit(f"{program}: {message}") from error
    print(f"{count} n-grams and texts erased")
    if count == 0:
        whose = "the public pool" if settings.is_public_pool else f"tenant {settings.tenant!r}"
        hint = "is the name right, and the --pool-secret-file the one that the drafters use?"
        print(f"{program}: Redis has none of {whose}; {hint}", file=sys.stderr)
