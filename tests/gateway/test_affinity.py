"""A request goes where its prompt's prefix is cached, unless that replica has too much to do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from gateway.upstream.prefixes import BLOCK_TOKENS, PrefixRecord, prefixes
from gateway.upstream.routing import Router
from outrider.errors import OutriderError, Reason
from outrider.protocol.model_info import Load
from tests.gateway.scripted_verifier import ready

LOST = OutriderError(Reason.VERIFIER_UNAVAILABLE, "connection refused")
PLACES = 64


@pytest_asyncio.fixture
async def router() -> AsyncIterator[Router]:
    router = Router(["a:1", "b:1", "c:1", "d:1"], "print")
    for replica in router.replicas:
        replica.info = ready("print", load=Load(0, 0, PLACES, 1024))
        replica.problem = None
    yield router
    await router.close()


def text(blocks: int, number: int = 0) -> list[int]:
    """Return a text of `blocks` blocks.

    Texts with different numbers differ from their first token on.
    """
    return [number * 1000 + i for i in range(blocks * BLOCK_TOKENS)]


def picked(router: Router, prompt: Sequence[int], tenant: str = "") -> str:
    return router.pick(None, prefixes(tenant, prompt)).replica.address


def busy(router: Router, *counts: int) -> None:
    """Give each replica as many sequences as its number in `counts` says."""
    for replica, count in zip(router.replicas, counts, strict=True):
        replica.sequences = set(range(count))


async def test_the_next_turn_of_a_chat_goes_where_the_last_one_went(router: Router) -> None:
    busy(router, 3, 0, 0, 0)
    assert picked(router, text(3)) == "b:1"
    busy(router, 0, 3, 0, 0)
    assert picked(router, [*text(3), 7, 7, 7]) == "b:1"
    assert picked(router, text(9)) == "b:1"
    assert picked(router, text(3, number=1)) == "a:1"


async def test_a_prompt_without_a_whole_block_goes_to_the_least_busy(router: Router) -> None:
    prompt = text(1)[:-1]
    assert picked(router, prompt) == "a:1"
    busy(router, 1, 0, 0, 0)
    assert picked(router, prompt) == "b:1"


async def test_the_longest_prefix_decides(router: Router) -> None:
    busy(router, 0, 1, 1, 1)
    assert picked(router, text(8)) == "a:1"
    busy(router, 9, 0, 1, 1)
    other = [*text(4), *text(4, number=1)]
    assert picked(router, other) == "b:1"
    busy(router, 1, 1, 0, 0)
    assert picked(router, [*text(8), *text(2, number=2)]) == "a:1"
    assert picked(router, [*other, *text(2, number=2)]) == "b:1"


async def test_tenants_do_not_follow_each_other(router: Router) -> None:
    assert set(prefixes("alice", text(4))).isdisjoint(prefixes("bob", text(4)))
    assert picked(router, text(4), "alice") == "a:1"
    busy(router, 1, 0, 0, 0)
    assert picked(router, text(4), "bob") == "b:1"
    assert picked(router, text(4), "alice") == "a:1"


async def test_ids_that_no_model_has_are_left_to_the_checks_of_the_request(router: Router) -> None:
    assert picked(router, [-1, 2**80, *text(1)]) == "a:1"


async def test_a_replica_that_takes_no_requests_is_not_followed(router: Router) -> None:
    a, b, _, _ = router.replicas
    assert picked(router, text(4)) == "a:1"
    a.mark_lost(LOST)
    assert picked(router, text(4)) == "b:1"
    a.problem = None
    b.retired_at = 0.0
    assert picked(router, text(4)) == "a:1"
    a.full = True
    assert picked(router, text(4)) == "c:1"


@pytest.mark.parametrize("ended_share", [0.0, 0.5])
async def test_a_hot_prefix_overloads_no_replica(router: Router, ended_share: float) -> None:
    """All requests share one system prompt. Every second request continues it in its own way."""
    for number in range(240):
        prompt = [*text(8), *text(2, number=number)] if number % 2 else text(8)
        pick = router.pick(None, prefixes("", prompt))
        pick.replica.sequences.add(number)
        counts = [len(replica.sequences) for replica in router.replicas]
        assert max(counts) <= 1.25 * sum(counts) / 4 + PLACES / 16 + 1
        if number % 4 < 4 * ended_share:
            fullest = max(router.replicas, key=lambda replica: len(replica.sequences))
            fullest.sequences.pop()
    assert min(len(replica.sequences) for replica in router.replicas) > 0


async def test_a_replica_whose_cache_is_full_counts_as_busier(router: Router) -> None:
    a, b, c, d = router.replicas
    a.info = ready("print", load=Load(4, 0, PLACES, 1024, kv_cache_usage=0.9))
    b.info = ready("print", load=Load(2, 3, PLACES, 1024, kv_cache_usage=0.8))
    busy(router, 4, 5, 20, 30)
    assert router.pick(None).replica is c
    picked(router, text(4))
    assert (a.own_count, d.own_count) == (4, 30)
    for replica in (b, c, d):
        replica.mark_lost(LOST)
    assert router.pick(None).replica is a


async def test_an_earlier_turn_is_found_after_the_sequence_has_moved(router: Router) -> None:
    found = prefixes("", text(4))
    lost = router.pick(None, found)
    lost.replica.mark_lost(LOST)
    fallback = await router.pick_fallback(lost, LOST)
    router.sent.note(found, fallback.replica.address)
    lost.replica.problem = None
    busy(router, 0, 1, 0, 0)
    assert fallback.replica.address == picked(router, text(4)) == "b:1"


def test_the_record_forgets_the_least_recent_and_the_longest_first() -> None:
    record = PrefixRecord(most=6)
    record.note(prefixes("", text(4)), "a:1")
    record.note(prefixes("", text(2, number=1)), "b:1")
    assert list(record.holders(prefixes("", text(4)))) == ["a:1"]
    record.note(prefixes("", text(3, number=2)), "c:1")
    assert list(record.holders(prefixes("", text(1)))) == ["a:1"]
    for number, address in ((1, "b:1"), (2, "c:1")):
        assert list(record.holders(prefixes("", text(2, number=number)))) == [address]
    record.note(prefixes("", text(6, number=3)), "d:1")
    assert list(record.holders(prefixes("", text(4)))) == []
