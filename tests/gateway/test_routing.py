"""Each request goes to the least busy ready replica of its model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.upstream.routing import Router
from outrider.errors import OutriderError, Reason
from outrider.protocol.model_info import Load, ModelInfo, Stage
from tests.gateway.scripted_verifier import ready

LOST = OutriderError(Reason.VERIFIER_UNAVAILABLE, "connection refused")


@pytest_asyncio.fixture
async def router() -> AsyncIterator[Router]:
    router = Router(["a:1", "b:1", "c:1"], "print")
    for replica in router.replicas:
        replica.info = ready("print")
        replica.problem = None
    yield router
    await router.close()


async def test_the_least_busy_ready_replica_is_picked(router: Router) -> None:
    for replica, count in zip(router.replicas, (3, 1, 0), strict=True):
        replica.sequences |= set(range(count))
    router.replicas[2].problem = OutriderError(Reason.NOT_READY, "loading")
    assert router.pick("models/target").replica.address == "b:1"
    router.replicas[1].sequences |= set(range(4))
    assert router.pick(None).replica.address == "a:1"
    router.replicas[1].sequences.clear()
    assert router.pick(None).replica.address == "b:1"


async def test_a_replica_with_room_is_picked_before_a_full_one(router: Router) -> None:
    small, large, refusing = router.replicas
    small.info = ready("print", load=Load(4, 4, 4, 4))
    large.info = refusing.info = ready("print", load=Load(0, 0, 64, 1024))
    small.foreign_count, refusing.full = 8, True
    large.sequences |= set(range(40))
    assert router.pick(None).replica is large


async def test_replicas_are_compared_by_what_they_can_run(router: Router) -> None:
    for replica, places, count in zip(router.replicas, (4, 64, 8), (2, 16, 4), strict=True):
        replica.info = ready("print", load=Load(0, 0, places, 1024))
        replica.sequences |= set(range(count))
    assert router.pick(None).replica.address == "b:1"
    router.replicas[1].foreign_count = 48
    assert router.pick(None).replica.address == "a:1"


async def test_a_model_is_served_by_those_replicas_that_have_it(router: Router) -> None:
    router.replicas[1].info = ModelInfo("large", Stage.READY, tokenizer_fingerprint="print")
    assert router.pick("large").replica.address == "b:1"
    with pytest.raises(OutriderError, match="the names here are large, models/target"):
        router.pick("other")


async def test_a_model_is_looked_up_at_the_replica_with_the_longest_context(router: Router) -> None:
    router.replicas[1].info = longer = ready("print", context_length=4096)
    router.replicas[2].info = ready("print", context_length=9000, model_id="large")
    for name in ("models/target", None):
        assert router.lookup(name) == ("models/target", longer)
    router.replicas[0].sequences |= set(range(2))
    router.replicas[1].sequences |= set(range(2))
    # If the request names no model, it gets the model of the replica that `pick` would choose.
    assert router.lookup(None) == ("large", router.replicas[2].info)


async def test_a_lost_replica_is_not_picked(router: Router) -> None:
    for replica in router.replicas[:2]:
        replica.mark_lost(LOST)
    assert {router.pick(None).replica.address for _ in range(4)} == {"c:1"}
    router.replicas[2].mark_lost(LOST)
    with pytest.raises(OutriderError, match="the verifier does not answer") as caught:
        router.pick(None)
    assert caught.value.reason is Reason.VERIFIER_UNAVAILABLE
    with pytest.raises(OutriderError) as again:
        router.pick(None)
    assert again.value is not caught.value


async def test_news_that_come_before_a_sequence_waits_are_not_missed(router: Router) -> None:
    pick = router.pick(None)
    for replica in router.replicas:
        replica.mark_lost(LOST)
    waiting = asyncio.create_task(router.pick_fallback(pick, LOST, wait_s=60.0))
    # The task has looked at the replicas, but its wait may begin a turn of the event loop later.
    await asyncio.sleep(0)
    router.replicas[2].problem = None
    router._wake()
    assert (await asyncio.wait_for(waiting, 5)).replica is router.replicas[2]
