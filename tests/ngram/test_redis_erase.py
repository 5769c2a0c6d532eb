"""`python -m drafter_svc erase` deletes all n-grams of one tenant, and none of other tenants."""

import asyncio
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from drafter_svc.erase import main
from tests.ngram.pools import SECRET, found, pool, written
from tests.redis_servers import Deployment, Standalone


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    return path


async def erase(*flags: str) -> str:
    """Run the command; return its output."""
    with redirect_stdout(StringIO()) as output:
        await asyncio.to_thread(main, list(flags))
    return output.getvalue()


async def test_erase_deletes_all_n_grams_of_the_tenant_alone(
    deployment: Deployment, secret_file: Path
) -> None:
    pairs = [([i], [i + 1]) for i in range(600)]
    async with (
        pool(deployment.server) as made,
        pool(deployment.server, fingerprint="f") as second,
    ):
        await written(made, *pairs, tenant="goes")
        await written(second, *pairs[:10], tenant="goes")
        await written(made, *pairs, tenant="stays")
        kept = len(deployment.all_keys())
        out = await erase(
            *deployment.flags(), "--tenant", "goes", "--pool-secret-file", str(secret_file)
        )
        assert out == "610 n-grams and texts erased\n"
        # The 16 indexes are deleted as well; a tenant's pools share them.
        assert kept - len(deployment.all_keys()) == 610 + 16
        assert await found(made, *([[i]] for i in range(600)), tenant="goes") == [[]] * 600
        assert await found(made, *([[i]] for i in range(600)), tenant="stays") == [
            [i + 1] for i in range(600)
        ]


async def test_the_public_pool_and_the_unnamed_tenant_are_erased_alone(
    redis_server: Standalone, secret_file: Path
) -> None:
    secret = ("--pool-secret-file", str(secret_file))
    async with (
        pool(redis_server.server, public=True) as public,
        pool(redis_server.server) as private,
    ):
        await written(public, ([1], [2]), ([2], [3]))
        await written(private, ([1], [2]), tenant="")
        await written(private, ([1], [2]), tenant="a")
        out = await erase(*redis_server.flags(), "--is-public-pool", *secret)
        assert out == "2 n-grams and texts erased\n"
        assert await found(private, [[1]], tenant="") == [[2]]
        out = await erase(*redis_server.flags(), "--tenant", "", *secret)
        assert out == "1 n-grams and texts erased\n"
        assert await found(private, [[1]], tenant="a") == [[2]]


def test_missing_settings_and_failures_are_reported(
    redis_server: Standalone, secret_file: Path
) -> None:
    secret = ["--pool-secret-file", str(secret_file)]
    for flags, message in (
        (["--tenant", "a", *secret], "redis must be given"),
        ([*redis_server.flags(), *secret], "tenant must be given, or is-public-pool"),
        (
            ["--redis", "redis://127.0.0.1:1", "--tenant", "a", *secret],
            "Redis failed, so some entries may be left",
        ),
    ):
        with pytest.raises(SystemExit, match=f"drafter erase: {message}"):
            main(flags)
