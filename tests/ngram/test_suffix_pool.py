"""Suffix trees that replicas share through a real Redis are kept, bounded and erased.

No draft waits for Redis.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.erase import main as erase
from drafter_svc.families.settings import SuffixSettings
from drafter_svc.families.suffix import SuffixFamily
from drafter_svc.pools import corpora as corpora_module
from drafter_svc.pools.corpora import Corpora
from drafter_svc.pools.keys import PoolKeys, TextKeys, is_index
from drafter_svc.pools.redis_client import RedisClient
from drafter_svc.pools.texts import MAX_TEXT_TOKENS, TextPool
from outrider.process.redis.server import RedisServer
from outrider.protocol.draft_messages import Window
from tests.family_rig import Rig, opened_sequence
from tests.ngram.pools import FINGERPRINT, SECRET
from tests.redis_servers import Deployment, Standalone
from tests.waiting import until

pytest.importorskip(
    "arctic_inference", reason="the suffix family's package is missing: make suffix"
)
TEXT = [1, 2, 3, 4, 5]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the trees with Redis so often that tests need not wait."""
    for name in ("_SYNC_S", "_IDLE_S", "_RETRY_S"):
        monkeypatch.setattr(corpora_module, name, 0.02)


@dataclass
class Replica:
    """A suffix drafter's connection to a verifier."""

    rig: Rig
    pool: TextPool
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def wrote(self, text: list[int], tenant: str = "a") -> None:
        """Open a sequence, commit this output and close it."""
        number = next(self.numbers)
        self.rig.open(opened_sequence(number, [9], Window(64, 16), 4, tenant=tenant))
        self.rig.commit(number, *text)
        self.rig.close(number)

    async def guess(self, context: list[int], tenant: str = "a") -> list[int]:
        """Return the draft for a sequence that so far is a prompt of this context."""
        number = next(self.numbers)
        window = Window(64, 16)
        self.rig.open(
            opened_sequence(number, context, window, 4, tenant=tenant, prompt_length=len(context))
        )
        guessed = [proposal.token_ids for proposal in (await self.rig.draft()).proposals]
        self.rig.close(number)
        return guessed[0] if guessed else []

    async def until_guessed(self, context: list[int], wanted: list[int], tenant: str = "a") -> None:
        async def is_guessed() -> bool:
            return await self.guess(context, tenant) == wanted

        await until(is_guessed)

    async def compared(self) -> None:
        """Wait until a whole comparison with Redis has begun and ended."""
        before = self.pool.counters.lookups
        await until(lambda: self.pool.counters.lookups >= before + 4)


@asynccontextmanager
async def replica(server: RedisServer, **options: Any) -> AsyncIterator[Replica]:
    """Yield a replica. `options` are parameters of PoolKeys and TextPool."""
    public = options.pop("public", False)
    keys = PoolKeys(options.pop("secret", SECRET), public=public)
    made = TextPool(server, keys, options.pop("fingerprint", FINGERPRINT), 4096, **options)
    family = SuffixFamily(SuffixSettings(), Corpora(made.max_texts, is_public=public, pool=made))
    try:
        yield Replica(Rig(family), made)
    finally:
        await family.aclose()


async def test_replicas_draft_from_each_others_texts(deployment: Deployment) -> None:
    async with replica(deployment.server) as one, replica(deployment.server) as other:
        one.wrote(TEXT)
        await other.until_guessed([8, 1, 2], [3, 4])
        other.wrote([21, 22, 23, 24])
        await one.until_guessed([8, 21, 22], [23, 24])
        assert one.pool.counters.written == other.pool.counters.found == 1


async def test_texts_are_separated_by_tenant_tokenizer_and_secret(
    redis_server: Standalone,
) -> None:
    async with replica(redis_server.server) as one:
        one.wrote(TEXT)
        await until(lambda: one.pool.counters.written == 1)
        others: list[tuple[dict[str, Any], str]] = [
            ({}, "b"),
            ({}, ""),
            ({"fingerprint": "f" * 20}, "a"),
            ({"secret": b"b" * 20}, "a"),
            ({"public": True}, "a"),
        ]
        for options, tenant in others:
            async with replica(redis_server.server, **options) as other:
                assert await other.guess([8, 1, 2], tenant) == []
                await other.compared()
                assert await other.guess([8, 1, 2], tenant) == []
                assert other.pool.counters.found == 0


async def test_a_public_pool_serves_all_tenants(redis_server: Standalone) -> None:
    async with (
        replica(redis_server.server, public=True) as one,
        replica(redis_server.server, public=True) as other,
    ):
        one.wrote(TEXT, "a")
        await other.until_guessed([8, 1, 2], [3, 4], "b")


async def test_prompts_and_predictions_never_reach_redis(redis_server: Standalone) -> None:
    async with replica(redis_server.server) as one:
        prompt = [31, 32, 33]
        more: dict[str, Any] = {"tenant": "a", "prompt_length": 3, "prediction": [41, 42, 43]}
        one.rig.open(opened_sequence(1000, prompt, Window(64, 16), 4, **more))
        one.rig.commit(1000, 1, 2)
        one.rig.close(1000)
        await until(lambda: one.pool.counters.written == 1)
        with redis_server.data[0].admin() as client:
            [key] = [key for key in redis_server.all_keys() if not is_index(key)]
            assert client.get(key) == array("I", [1, 2]).tobytes()


async def test_the_memory_survives_restarts_of_drafter_and_redis(tmp_path: Path) -> None:
    server = Standalone(tmp_path, None, "appendonly yes")
    try:
        async with replica(server.server) as one:
            one.wrote(TEXT)
            await until(lambda: one.pool.counters.written == 1)
        server.kill()
        server.start()
        async with replica(server.server) as other:
            assert await other.guess([8, 1, 2]) == []
            await other.until_guessed([8, 1, 2], [3, 4])
    finally:
        server.close()


async def test_a_connection_that_comes_back_shares_again(redis_server: Standalone) -> None:
    async with replica(redis_server.server) as one:
        made = TextPool(redis_server.server, PoolKeys(SECRET), FINGERPRINT, 4096)
        corpora = Corpora(1000, pool=made)
        for text in ([11, 12, 13, 14], [15, 16, 17, 18]):
            family = SuffixFamily(SuffixSettings(), corpora)
            second = SuffixFamily(SuffixSettings(), corpora)
            Replica(Rig(family), made).wrote(text)
            await family.aclose()
            # The second family's connection still shares texts.
            await one.until_guessed([8, *text[:2]], text[2:])
            await second.aclose()


async def test_number_size_and_age_of_texts_are_bounded(deployment: Deployment) -> None:
    async with (
        replica(deployment.server, max_texts=3, ttl_s=100) as one,
        replica(deployment.server) as other,
    ):
        for start in range(100, 150, 10):
            one.wrote([*range(start, start + 4)])
            await one.compared()
        texts = [key for key in deployment.all_keys() if not is_index(key)]
        assert len(texts) == 3
        for process in deployment.data:
            with process.admin() as client:
                assert all(0 < client.ttl(key) <= 100 for key in client.keys("*"))
        # The newest texts are kept.
        await other.until_guessed([8, 140, 141], [142, 143])
        assert await other.guess([8, 120, 121]) == [122, 123]
        assert await other.guess([8, 110, 111]) == []
        one.wrote([token % 4096 for token in range(3 * MAX_TEXT_TOKENS)])
        await until(lambda: one.pool.counters.written == 6)
        assert max(lengths(deployment)) == 4 * MAX_TEXT_TOKENS


def lengths(deployment: Deployment) -> list[int]:
    """Return the number of bytes of each text in Redis."""
    found = []
    for process in deployment.data:
        with process.admin() as client:
            found += [int(client.strlen(key)) for key in client.keys("*") if not is_index(key)]
    return found


async def test_texts_that_grow_old_leave_the_trees_too(redis_server: Standalone) -> None:
    async with (
        replica(redis_server.server, ttl_s=1) as one,
        replica(redis_server.server, ttl_s=1) as other,
    ):
        one.wrote(TEXT)
        await other.until_guessed([8, 1, 2], [3, 4])
        await other.until_guessed([8, 1, 2], [])
        await one.until_guessed([8, 1, 2], [])


async def test_equal_texts_are_one_text(redis_server: Standalone) -> None:
    async with replica(redis_server.server) as one:
        for _ in range(5):
            one.wrote(TEXT)
            await one.compared()
        assert len(redis_server.all_keys()) == 2
        assert await one.guess([8, 1, 2]) == [3, 4]


async def test_erase_deletes_a_tenants_texts_from_redis_and_from_all_trees(
    deployment: Deployment, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    async with replica(deployment.server) as one, replica(deployment.server) as other:
        for tenant in ("goes", "stays"):
            one.wrote(TEXT, tenant)
            one.wrote([11, 12, 13, 14], tenant)
            await other.until_guessed([8, 1, 2], [3, 4], tenant)
            await other.until_guessed([8, 11, 12], [13, 14], tenant)
        flags = [*deployment.flags(), "--pool-secret-file", str(secret), "--tenant", "goes"]
        with redirect_stdout(StringIO()) as output:
            await asyncio.to_thread(erase, flags)
        assert output.getvalue() == "2 n-grams and texts erased\n"
        for each in (one, other):
            await each.until_guessed([8, 1, 2], [], "goes")
            await each.until_guessed([8, 11, 12], [], "goes")
            await each.compared()
            assert await each.guess([8, 1, 2], "stays") == [3, 4]
        assert len([key for key in deployment.all_keys() if not is_index(key)]) == 2


def planted(client: Any, keys: TextKeys, digest: bytes, value: bytes) -> None:
    """Write a text as somebody without the pool's secret."""
    client.set(keys.index + digest, value)
    client.zadd(keys.index, {digest: 4_000_000_000})


async def test_a_poisoned_pool_plants_no_text(redis_server: Standalone) -> None:
    async with replica(redis_server.server) as one:
        one.wrote(TEXT, "b")
        one.wrote([11, 12, 13, 14])
        await until(lambda: one.pool.counters.written == 2)
    ours, theirs = (PoolKeys(SECRET).texts(name, FINGERPRINT) for name in "ab")
    value = array("I", TEXT).tobytes()
    with redis_server.data[0].admin() as client:
        # Another text, another tenant's text, ids out of range, too many ids, bytes that are no
        # ids, two entries of the index that lead to no text, a value of another type.
        planted(client, ours, bytes(16), value)
        planted(client, ours, theirs.digest(TEXT), value)
        planted(client, ours, ours.digest([5000]), array("I", [5000]).tobytes())
        planted(client, ours, b"1" * 16, bytes(4 * MAX_TEXT_TOKENS + 4))
        planted(client, ours, b"2" * 16, b"abc")
        client.zadd(ours.index, {b"gone" * 4: 4_000_000_000, b"short": 4_000_000_000})
        client.lpush(ours.index + b"list" * 4, 1)
        client.zadd(ours.index, {b"list" * 4: 4_000_000_000})
    async with replica(redis_server.server) as other:
        await other.until_guessed([8, 11, 12], [13, 14])
        assert await other.guess([8, 1, 2]) == []
        counters = other.pool.counters
        assert (counters.found, counters.malformed, counters.missed) == (1, 5, 2)
        # A refused text is not read again.
        await other.compared()
        assert (counters.found, counters.malformed, counters.missed) == (1, 5, 2)


async def test_a_hostile_index_costs_bounded_reads(redis_server: Standalone) -> None:
    keys = PoolKeys(SECRET).texts("a", FINGERPRINT)
    with redis_server.data[0].admin() as client:
        client.zadd(keys.index, {i.to_bytes(16, "big"): 4_000_000_000 + i for i in range(5000)})
    async with replica(redis_server.server, max_texts=100) as one:
        assert await one.guess([8, 1, 2]) == []
        await one.compared()
        await one.compared()
        assert one.pool.counters.missed == 100
        with redis_server.data[0].admin() as client:
            client.delete(keys.index)
            client.set(keys.index, "no index")
        await until(lambda: one.pool.counters.failed >= 2)
        one.wrote(TEXT)
        assert await one.guess([8, 1, 2]) == [3, 4]


async def test_drafts_go_on_without_redis_and_texts_reach_it_later(
    redis_server: Standalone, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(redis_server.server) as one, replica(redis_server.server) as other:
        one.wrote(TEXT)
        await other.until_guessed([8, 1, 2], [3, 4])
        redis_server.kill()
        await until(lambda: one.pool.counters.failed > 0 and other.pool.counters.failed > 0)
        for each in (one, other):
            assert await each.guess([8, 1, 2]) == [3, 4]
        one.wrote([11, 12, 13, 14])
        assert await one.guess([8, 11, 12]) == [13, 14]
        redis_server.start()
        await other.until_guessed([8, 11, 12], [13, 14])
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "drafting without its pool" in caplog.text


async def test_one_tenants_broken_index_stops_no_other_tenant(
    redis_server: Standalone, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    broken = PoolKeys(SECRET).texts("broken", FINGERPRINT).index
    with redis_server.data[0].admin() as client:
        client.set(broken, "no index")
        async with replica(redis_server.server) as one, replica(redis_server.server) as other:
            for each in (one, other):
                each.wrote([21, 22, 23, 24], "broken")
            await until(lambda: one.pool.counters.failed > 1 and other.pool.counters.failed > 1)
            one.wrote(TEXT)
            await other.until_guessed([8, 1, 2], [3, 4])
            assert caplog.text.count("Redis fails") == 2
            assert "answers again" not in caplog.text
            client.delete(broken)
            await until(lambda: caplog.text.count("answers again") == 2)
            assert client.zcard(broken) == 1


async def test_texts_are_read_and_dropped_while_redis_refuses_writes(
    redis_server: Standalone,
) -> None:
    keys = PoolKeys(SECRET).texts("a", FINGERPRINT)
    async with replica(redis_server.server) as one, replica(redis_server.server) as other:
        one.wrote(TEXT)
        one.wrote([11, 12, 13, 14])
        await other.until_guessed([8, 1, 2], [3, 4])
        await other.until_guessed([8, 11, 12], [13, 14])
        with redis_server.data[0].admin() as client:
            client.config_set("maxmemory", 1)
            for each in (one, other):
                each.wrote([21, 22, 23, 24])
            await until(lambda: one.pool.counters.failed and other.pool.counters.failed)
            client.zrem(keys.index, keys.digest(TEXT))
            for each in (one, other):
                await each.until_guessed([8, 1, 2], [])
                assert await each.guess([8, 11, 12]) == [13, 14]
            async with replica(redis_server.server) as third:
                third.wrote([31, 32, 33, 34])
                await third.until_guessed([8, 11, 12], [13, 14])
            client.config_set("maxmemory", 0)
        await until(lambda: one.pool.counters.written == 3)


async def test_an_erased_text_does_not_come_back_with_the_next_verifier(
    redis_server: Standalone,
) -> None:
    made = TextPool(redis_server.server, PoolKeys(SECRET), FINGERPRINT, 4096)
    corpora = Corpora(1000, pool=made)
    family = SuffixFamily(SuffixSettings(), corpora)
    leaving = Replica(Rig(family), made)
    leaving.wrote(TEXT)
    await until(lambda: made.counters.written == 1)
    # This text still waits when the verifier leaves.
    leaving.wrote([11, 12, 13, 14])
    await family.aclose()
    assert made.counters.dropped == 1
    redis_server.data[0].admin().flushall()
    family = SuffixFamily(SuffixSettings(), corpora)
    back = Replica(Rig(family), made)
    for context in ([8, 1, 2], [8, 11, 12]):
        await back.until_guessed(context, [])
    await back.compared()
    assert redis_server.all_keys() == []
    await family.aclose()


async def test_running_and_empty_requests_push_out_no_text_for_good(
    redis_server: Standalone,
) -> None:
    async with replica(redis_server.server, max_texts=3) as one:
        one.wrote(TEXT)
        await until(lambda: one.pool.counters.written == 1)
        for _ in range(20):
            assert await one.guess([8, 1, 2]) == [3, 4]
        for number in range(1000, 1010):
            one.rig.open(opened_sequence(number, [9], Window(64, 16), 4, tenant="a"))
        for number in range(1000, 1010):
            one.rig.close(number)
        await one.until_guessed([8, 1, 2], [3, 4])


async def test_a_text_whose_reading_was_cancelled_is_still_missing() -> None:
    corpora = Corpora(10, pool=TextPool(RedisServer.parse("redis://a"), PoolKeys(SECRET), "", 10))
    trees, _ = corpora.begin("a", [], [])
    digest = bytes(16)
    reading = asyncio.create_task(trees.insert(digest, [7] * MAX_TEXT_TOKENS))
    await asyncio.sleep(0)
    assert trees.missing([digest]) == []
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert trees.missing([digest]) == [digest]
    await trees.insert(digest, TEXT)
    assert trees.missing([digest]) == []


async def test_a_client_that_cannot_be_made_ends_no_sharing(redis_server: Standalone) -> None:
    class Late(TextPool):
        def connect(self) -> RedisClient:
            if self.counters.failed < 3:
                raise OSError("the certificate is being replaced")
            return super().connect()

    made = Late(redis_server.server, PoolKeys(SECRET), FINGERPRINT, 4096)
    family = SuffixFamily(SuffixSettings(), Corpora(1000, pool=made))
    Replica(Rig(family), made).wrote(TEXT)
    await until(lambda: made.counters.written == 1)
    await family.aclose()


async def test_a_poisonous_text_stops_no_reading(redis_server: Standalone) -> None:
    keys = PoolKeys(SECRET).texts("a", FINGERPRINT)
    async with replica(redis_server.server) as one:
        with redis_server.data[0].admin() as client:
            # The client takes this for the head of a list of a million elements.
            planted(client, keys, bytes(16), b"*1000000")
        one.wrote([2**24, 42, 43, 44])
        one.wrote(TEXT)
        await until(lambda: one.pool.counters.written == 1)
        assert one.pool.counters.dropped == 1
        await one.compared()
        # No tree keeps what nobody can erase.
        assert await one.guess([8, 42, 43]) == []
        assert one.pool.counters.malformed == 1
        async with replica(redis_server.server) as other:
            assert await other.guess([8, 11, 12]) == []
            await until(lambda: other.pool.counters.malformed)
            one.wrote([11, 12, 13, 14])
            await other.until_guessed([8, 11, 12], [13, 14])
            assert one.pool.counters.failed == other.pool.counters.failed == 0


async def test_texts_of_a_65th_tenant_replace_texts_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpora_module, "_MAX_CORPORA", 2)
    async with replica(RedisServer.parse("redis://127.0.0.1:1")) as one:
        for tenant in ("a", "b", "c"):
            one.wrote(TEXT, tenant)
            one.wrote(TEXT, tenant)
        assert one.pool.counters.dropped == 1


async def test_what_waits_for_a_dead_redis_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora_module, "_MAX_UNWRITTEN", 8)
    async with replica(RedisServer.parse("redis://127.0.0.1:1"), max_texts=10) as one:
        for i in range(100):
            one.wrote([i, i + 1000, i + 2000])
        # This text is already among those that wait to be written.
        one.wrote([0, 1000, 2000])
        assert one.pool.counters.dropped == 100 - 8
        [trees] = one.rig.session._strategy._corpora._corpora.values()  # type: ignore[attr-defined]
        assert len(trees.unwritten) == 8
        assert len(trees._names) <= 20
        assert await one.guess([8, 99]) == [1099]


async def test_a_frozen_redis_delays_no_draft(redis_server: Standalone) -> None:
    async with replica(redis_server.server) as one:
        one.wrote(TEXT)
        await until(lambda: one.pool.counters.written == 1)
        redis_server.data[0].freeze()
        try:
            one.wrote([11, 12, 13, 14])
            # The task now waits for Redis.
            await asyncio.sleep(0.1)
            async with asyncio.timeout(1):
                for _ in range(20):
                    assert await one.guess([8, 1, 2]) == [3, 4]
                    assert await one.guess([8, 11, 12]) == [13, 14]
        finally:
            redis_server.data[0].thaw()
        await until(lambda: one.pool.counters.written == 2)


async def test_sharing_ends_at_every_moment(redis_server: Standalone) -> None:
    for steps in range(0, 60, 2):
        async with asyncio.timeout(5), replica(redis_server.server) as one:
            one.wrote([steps, *TEXT])
            for _ in range(steps):
                await asyncio.sleep(0)
