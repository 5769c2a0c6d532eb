"""Limits of an API key: requests, tokens and sequences, in a minute and at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio
from gateway_rig import Rig, echo
from keyed_rig import ALICE, BOB, auth, entry, keyed_rig
from redis.exceptions import ConnectionError as RedisConnectionError
from waiting import until

from gateway.access import redis_rate_windows
from gateway.access.limits import Limits
from gateway.access.rate_windows import RateWindows
from gateway.access.redis_rate_windows import Counters, RedisRateWindows
from gateway.text.choices import Event
from gateway.text.deltas import TextDelta
from gateway.text.prompts import Prompts
from gateway.upstream.verifier_stream import late
from outrider.errors import OutriderError, Reason
from outrider.process import rpc_errors
from outrider.process.key_file import write_keys
from outrider.protocol.messages import TokenSource
from outrider.v1 import generation_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = {"prompt": "if x", "temperature": 0, "max_tokens": 8}


class Clock:
    """A wall clock that a test sets. It begins 20 s before the end of a minute."""

    def __init__(self) -> None:
        self.seconds = 1_000_000 * 60 + 40.0

    def __call__(self) -> float:
        return self.seconds


Limited = Callable[..., Awaitable[Rig]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def limited(
    prompts: Prompts, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Limited]:
    """Changes a gateway's keys, so that alice has some limits and bob has none."""
    folder = tmp_path_factory.mktemp("keys")
    async with keyed_rig(prompts, folder, [entry(BOB, "bob")]) as rig:

        async def change(clock: Clock | None = None, **limits: int) -> Rig:
            write_keys(folder / "keys.yaml", [entry(ALICE, "alice", **limits), entry(BOB, "bob")])
            assert rig.gateway.gate.keys is not None
            await rig.gateway.gate.keys.reload()
            rig.gateway.gate.limits.windows = RateWindows(clock or Clock())
            rig.script.answer = echo
            return rig

        yield change


async def counted(limits: Limits, kind: str) -> int:
    """The amount of a limit that alice has used in this minute."""
    return (await limits.windows.add(f"alice/{kind}", 0, limits.windows.now()[0])).total


async def post(rig: Rig, key: str = ALICE, **given: Any) -> Any:
    return await rig.http.post("/v1/completions", json=BODY | given, headers=auth(key))


async def test_too_many_requests_get_429_until_the_next_minute(limited: Limited) -> None:
    clock = Clock()
    rig = await limited(clock, requests_per_minute=2)
    first, second, third = [await post(rig) for _ in range(3)]
    assert [answer.status_code for answer in (first, second, third)] == [200, 200, 429]
    remaining = "x-ratelimit-remaining-requests"
    assert [answer.headers[remaining] for answer in (first, second, third)] == ["1", "0", "0"]
    assert third.headers["retry-after"] == "20"
    assert third.headers["x-ratelimit-limit-requests"] == "2"
    assert third.headers["x-ratelimit-reset-requests"] == "20s"
    error = third.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert (await post(rig, BOB)).status_code == 200
    assert "x-ratelimit-limit-requests" not in (await post(rig, BOB)).headers
    clock.seconds += 20
    assert (await post(rig)).status_code == 200


async def test_tokenizing_counts_as_a_request(limited: Limited) -> None:
    rig = await limited(requests_per_minute=1)
    answers = [
        await rig.http.post("/tokenize", json={"prompt": "x"}, headers=auth(ALICE))
        for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 429]


async def test_a_request_may_reserve_at_most_the_whole_limit(limited: Limited) -> None:
    rig = await limited(tokens_per_minute=50)
    answers = [await post(rig, max_tokens=1000) for _ in range(2)]
    # The chat's default is all that the context leaves.
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answers.append(await rig.http.post("/v1/chat/completions", json=chat, headers=auth(ALICE)))
    # The first requests gave their unused tokens back, but the third needs the whole minute.
    assert [answer.status_code for answer in answers] == [200, 429, 429]


async def test_a_failed_request_gives_its_tokens_back(limited: Limited) -> None:
    rig = await limited(tokens_per_minute=100)
    rig.script.answer = lambda _: [OutriderError(Reason.OVERLOADED, "full")]
    for _ in range(5):
        answer = await post(rig, max_tokens=90)
        assert answer.json()["error"]["code"] == "overloaded"
    limits = rig.gateway.gate.limits
    assert await counted(limits, "tokens") == 0
    assert limits.running["alice"] == 0


async def test_only_so_many_sequences_run_at_once(limited: Limited) -> None:
    rig = await limited(concurrent_sequences=3)
    rig.says("one two three", pause_s=0.05)
    running = asyncio.create_task(post(rig, n=2))
    await until(lambda: rig.script.running == 2)
    refused = await post(rig, n=2)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert (await post(rig, n=4)).json()["error"]["param"] == "n"
    assert (await post(rig)).status_code == 200
    assert (await running).status_code == 200
    assert (await post(rig, n=3)).status_code == 200


async def test_sequences_of_a_minute_are_bounded(limited: Limited) -> None:
    rig = await limited(sequences_per_minute=4)
    answers = [await post(rig, n=n) for n in (3, 2, 1)]
    assert [answer.status_code for answer in answers] == [200, 429, 200]


async def test_grpc_tells_when_to_retry(limited: Limited) -> None:
    rig = await limited(requests_per_minute=1)
    request = generation_pb2.GenerateTextRequest(prompt="x")
    metadata = tuple(auth(ALICE).items())
    _ = [each async for each in rig.generation.GenerateText(request, metadata=metadata)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [each async for each in rig.generation.GenerateText(request, metadata=metadata)]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = rpc_errors.error_of(caught.value)
    assert error.reason is Reason.RATE_LIMIT_EXCEEDED
    assert error.retry_after_s == 20.0


def deltas(count: int) -> AsyncGenerator[Event, None]:
    async def made() -> AsyncGenerator[Event, None]:
        for _ in range(count):
            yield 0, TextDelta("x", [5], [TokenSource.PLAIN])

    return made()


@pytest.mark.parametrize(
    ("answer", "written", "charged"),
    [
        pytest.param(80, 3, 0, id="a leftover is not given back"),
        pytest.param(10, 30, 35 - 15, id="tokens beyond the reservation count"),
    ],
)
async def test_in_the_minute_after_a_reservation_only_more_tokens_count(
    answer: int, written: int, charged: int
) -> None:
    clock = Clock()
    limits = Limits(RateWindows(clock))
    grant = await limits.admit(entry(ALICE, "alice", tokens_per_minute=100))
    events = grant.metered(deltas(written), prompt=5, answer=answer, sequences=1, gathered=False)
    await anext(events)
    clock.seconds += 60
    assert len([event async for event in events]) == written - 1
    assert await counted(limits, "tokens") == charged


@pytest.mark.parametrize(
    ("gathered", "taken", "charged"), [(False, 0, 5), (False, 2, 7), (True, 0, 85), (True, 2, 85)]
)
async def test_a_client_that_leaves_pays_for_the_work(
    gathered: bool, taken: int, charged: int
) -> None:
    limits = Limits(RateWindows(Clock()))
    grant = await limits.admit(entry(ALICE, "alice", tokens_per_minute=100))
    begun, forever = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncGenerator[Event, None]:
        async for event in deltas(taken):
            yield event
        begun.set()
        await forever.wait()

    async def read() -> None:
        metered = grant.metered(slow(), prompt=5, answer=80, sequences=1, gathered=gathered)
        _ = [event async for event in metered]

    reading = asyncio.create_task(read())
    await begun.wait()
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    assert await counted(limits, "tokens") == charged
    assert limits.running["alice"] == 0


@pytest.mark.parametrize(("gathered", "charged"), [(False, 5), (True, 85)])
async def test_an_answer_that_is_late_is_paid_for(gathered: bool, charged: int) -> None:
    limits = Limits(RateWindows(Clock()))
    grant = await limits.admit(entry(ALICE, "alice", tokens_per_minute=100))

    async def too_slow() -> AsyncGenerator[Event, None]:
        for event in [event async for event in deltas(0)]:
            yield event
        raise late()

    metered = grant.metered(too_slow(), prompt=5, answer=80, sequences=1, gathered=gathered)
    with pytest.raises(OutriderError, match="timeout"):
        _ = [event async for event in metered]
    assert await counted(limits, "tokens") == charged


async def test_a_request_without_tokens_left_takes_no_sequences() -> None:
    limits = Limits(RateWindows(Clock()))
    key = entry(ALICE, "alice", tokens_per_minute=10, sequences_per_minute=5)
    await (await limits.admit(key)).take("tokens", 10, 6)
    grant = await limits.admit(key)
    with pytest.raises(OutriderError, match="10 tokens of this minute: 4 are left"):
        await anext(grant.metered(deltas(1), prompt=5, answer=1, sequences=2, gathered=False))
    assert await counted(limits, "sequences") == 0
    assert await counted(limits, "tokens") == 6


async def test_a_late_count_of_an_earlier_minute_keeps_this_minutes_counts() -> None:
    counts = RateWindows(Clock())
    this, _ = counts.now()
    await counts.add("a/tokens", 5, this)
    late = await counts.add("a/tokens", 2, this - 1)
    assert late.total == 7
    await counts.correct("a/tokens", -2, this - 1, late)
    # It was counted in this minute, and so is taken back from it.
    assert (await counts.add("a/tokens", 0, this)).total == 5


class FakeCounters(Counters):
    """A Redis that answers once it is `open`, unless it is `broken`."""

    def __init__(self, *, broken: bool = False) -> None:
        self.calls = 0
        self.broken = broken
        self.open = asyncio.Event()
        self.open.set()
        self.counts: Counter[str] = Counter()

    async def add(self, name: str, amount: int) -> int:
        self.calls += 1
        await self.open.wait()
        if self.broken:
            raise RedisConnectionError("refused")
        self.counts[name] += amount
        return self.counts[name]

    async def close(self) -> None:
        """There is no connection."""


async def test_after_a_failure_waiting_commands_leave_redis_alone() -> None:
    counters = FakeCounters(broken=True)
    shared = RedisRateWindows(counters, Clock())
    counters.open.clear()
    burst = [asyncio.create_task(shared.add("a", 1, 0)) for _ in range(200)]
    await until(lambda: counters.calls > 0)
    counters.open.set()
    assert {(await adding).total for adding in burst} == set(range(1, 201))
    assert counters.calls == 4


@pytest.mark.parametrize("broken_at_first", [True, False])
async def test_a_reservation_is_settled_where_it_was_counted(
    broken_at_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_rate_windows, "_REDIS_PAUSE_S", 0.0)
    counters = FakeCounters(broken=broken_at_first)
    limits = Limits(RedisRateWindows(counters, Clock()))
    grant = await limits.admit(entry(ALICE, "alice", tokens_per_minute=100))
    events = grant.metered(deltas(1), prompt=5, answer=80, sequences=1, gathered=False)
    await anext(events)
    counters.broken = not broken_at_first
    assert [event async for event in events] == []
    # Redis has all of the reservation, since it could not be given back, or none of it.
    assert sum(counters.counts.values()) == (0 if broken_at_first else 85)
    counters.broken = True
    assert await counted(limits, "tokens") == (6 if broken_at_first else 0)


async def test_a_client_that_leaves_during_its_reservation_takes_nothing() -> None:
    counters = FakeCounters()
    limits = Limits(RedisRateWindows(counters, Clock()))
    counters.open.clear()
    key = entry(ALICE, "alice", requests_per_minute=5)
    asking = asyncio.create_task(limits.admit(key))
    await until(lambda: counters.calls == 1)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    counters.open.set()
    await limits.windows.close()
    assert counters.calls == 2
    assert sum(counters.counts.values()) == 0


@pytest.mark.parametrize("url", ["http://a", "redis", "redis+sentinel://", "memory://"])
async def test_a_wrong_url_of_redis_is_refused(url: str) -> None:
    with pytest.raises(OutriderError, match="limits-redis must"):
        RedisRateWindows.of(url, None, None)


async def test_a_clock_that_is_set_back_begins_a_new_count() -> None:
    clock = Clock()
    counts = RateWindows(clock)
    await counts.add("a/tokens", 5, counts.now()[0])
    clock.seconds -= 3600
    assert (await counts.add("a/tokens", 2, counts.now()[0])).total == 2
