"""The documented rights, passwords and certificates suffice; a refusal costs only guesses."""

import logging
from pathlib import Path

import pytest

from drafter_svc.pools.redis_client import RedisClient
from outrider.process.redis.server import RedisServer
from tests.ngram.pools import found, pool, written
from tests.redis_servers import PASSWORD, Deployment, RedisProcess, Standalone, acl_line
from tests.waiting import until

# These commands are needed for a database other than 0, and for a slot that is moving. Other tests
# use these rights.
_SELDOM = {"select", "asking"}


def allowed(line: str) -> set[str]:
    return {word[1:] for word in line.split() if word.startswith("+")}


async def use(server: RedisServer) -> None:
    """Run every kind of command that the pools and `erase` send."""
    async with pool(server, max_entries=16) as made:
        await written(made, *(([i, i + 1], [3]) for i in range(200)))
        assert len(await found(made, *([[i, i + 1]] for i in range(64)))) == 64
        assert made.counters.failed == 0
    client = RedisClient(server)
    try:
        assert await client.newest(b"outrider:{index}", 60, 5) == []
        async for keys in client.scan(b"outrider:*"):
            assert await client.unlink(keys) == len(keys)
    finally:
        await client.aclose()


def used(process: RedisProcess) -> set[str]:
    """Return the commands that the server has run."""
    with process.admin() as client:
        return {name.removeprefix("cmdstat_") for name in client.info("commandstats")}


async def test_exactly_the_documented_rights_are_needed(
    deployment: Deployment,
) -> None:
    deployment.each("CONFIG", "RESETSTAT")
    deployment.each("ACL", "LOG", "RESET")
    await use(deployment.server)
    assert not any(deployment.each("ACL", "LOG"))
    documented = allowed(acl_line()) - _SELDOM
    if not deployment.is_cluster:
        documented -= {"cluster|slots", "command"}
    assert documented <= set.union(*(used(process) for process in deployment.data))


def test_no_right_is_of_a_dangerous_category(redis_server: Standalone) -> None:
    line = acl_line()
    assert "-@all" in line
    assert "+@" not in line
    with redis_server.data[0].admin() as client:
        forbidden = {*client.acl_cat("admin"), *client.acl_cat("dangerous")}
    assert allowed(line) & forbidden == set()
    assert "~outrider:*" in line.split()


async def test_the_user_reaches_no_other_key_and_no_other_command(redis_server: Standalone) -> None:
    with redis_server.data[0].admin() as client:
        for command in (
            ["GET", "outrider:x"],
            ["MGET", "other"],
            ["FLUSHALL"],
            ["KEYS", "*"],
            ["CONFIG", "GET", "*"],
        ):
            reply = client.execute_command("ACL", "DRYRUN", "outrider", *command)
            assert b"permissions" in reply, command
        assert client.execute_command("ACL", "DRYRUN", "outrider", "MGET", "outrider:x") == b"OK"


async def test_a_wrong_password_costs_guesses_and_one_warning(
    deployment: Deployment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lookups go on returning at once, for longer than the first backoff."""
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    server = deployment.reached_with(wrong)
    with caplog.at_level(logging.INFO, "drafter_svc.pools.redis"):
        async with pool(server) as made:
            for _ in range(2):
                made.offer(made.tenant("t"), [1], [2])
                assert await found(made, [[1]]) == [[]]
                await until(lambda: made.available)
            assert made.counters.failed >= 2
            assert made.counters.written == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert PASSWORD not in caplog.text


@pytest.mark.slow
async def test_without_the_password_file_no_command_is_sent(
    redis_server: Standalone,
) -> None:
    """The server admits the default user without a password. The pool must not act as that user."""
    async with pool(redis_server.server) as made:
        await written(made, ([1], [2]))
        redis_server.password_file.unlink()
        with redis_server.data[0].admin() as client:
            client.client_kill_filter(user="outrider")
        for _ in range(3):
            assert await found(made, [[1]]) == [[]]
            await until(lambda: made.available)
        redis_server.password_file.write_text(PASSWORD)
        assert await found(made, [[1]]) == [[2]]


async def test_a_changed_password_file_is_used(redis_server: Standalone) -> None:
    async with pool(redis_server.server) as made:
        await written(made, ([1], [2]))
        redis_server.password_file.write_text("new")
        with redis_server.data[0].admin() as client:
            client.execute_command("ACL", "SETUSER", "outrider", ">new", f"<{PASSWORD}")
            client.client_kill_filter(user="outrider")
        assert await found(made, [[1]]) == [[2]]
