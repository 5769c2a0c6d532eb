"""The page's data: sources of tokens in answers; events with processes and sums of requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.access.gate import Identity
from gateway.http import page
from gateway.http.page import MOST_FEEDS
from gateway.text.prompts import Prompts
from outrider.protocol.messages import (
    FinishReason,
    PauseReason,
    SpeculationPause,
    SpeculationStats,
    TokenChunk,
    TokenSource,
)
from tests.gateway.gateway_rig import Rig, events_of, text_by_part
from tests.gateway.keyed_rig import ALICE, BOB, CAROL, entry, keyed_rig
from tests.gateway.scripted_verifier import last, plain

pytestmark = pytest.mark.asyncio(loop_scope="session")

STATS = SpeculationStats(
    forward_count=2,
    draft_count=2,
    draft_token_count=6,
    accepted_token_count=3,
    histogram=[1, 0, 0, 1],
    max_draft_tokens=4,
)


def drafted(
    token_ids: list[int], *sources: TokenSource, drafter: str = "ngram-1", drafts: int = 3
) -> TokenChunk:
    return TokenChunk(token_ids, list(sources), drafter_id=drafter, draft_token_count=drafts)


async def chunks(rig: Rig, body: dict[str, Any]) -> list[dict[str, Any]]:
    return events_of(await rig.http.post("/v1/completions", json={**body, "stream": True}))


async def test_tokens_with_their_sources_join_to_the_text(rig: Rig) -> None:
    text = "if é: x = '€'"
    ids = rig.prompts.tokenizer.encode(text).ids
    sources = [TokenSource.ACCEPTED] * (len(ids) - 1) + [TokenSource.BONUS]
    rig.script.answer = lambda _: [drafted(ids, *sources), last([3], FinishReason.STOP, STATS)]
    streamed = await chunks(rig, {"prompt": "x", "speculation": {"tokens": True}})
    tokens = [
        token
        for chunk in streamed
        for choice in chunk["choices"]
        for token in choice.get("speculation", {}).get("tokens", [])
    ]
    whole = (
        await rig.http.post(
            "/v1/completions", json={"prompt": "x", "speculation": {"tokens": True}}
        )
    ).json()
    assert whole["choices"][0]["speculation"]["tokens"] == tokens
    assert "".join(token["text"] for token in tokens) == whole["choices"][0]["text"] == text
    assert [token["source"] for token in tokens] == ["accepted"] * (len(ids) - 1) + ["bonus"]
    assert {token["drafter"] for token in tokens} == {"ngram-1"}
    for chunk in await chunks(rig, {"prompt": "x"}):
        assert all("speculation" not in choice for choice in chunk["choices"])


@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_each_token_tells_its_part_of_the_answer(rig: Rig, chunk: int) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "clock")]
    weather = '<tool_call>\n{"name": "weather", "arguments": {"a": "</tool_call>"}}\n</tool_call>'
    clock = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    body = {"messages": [{"role": "user", "content": "x"}], "speculation": {"tokens": True}}
    for said, parts in (
        (f"Is 1 <t?\n{weather}\n{clock}\n", ["Is 1 <t?", weather, clock]),
        (f"{clock}{weather}", ["", clock, weather]),
        (" It is\n<tool_call, is it? ", ["It is\n<tool_call, is it?", "", ""]),
    ):
        rig.says(said, chunk)
        answer = await rig.http.post("/v1/chat/completions", json=body | {"tools": tools})
        texts = text_by_part(answer.json()["choices"][0])
        names = ("content", "tool_calls[0]", "tool_calls[1]")
        assert [texts.get(name, "").strip() for name in names] == parts
        assert "".join(texts.values()) == said
    rig.says(weather, chunk)
    answer = await rig.http.post("/v1/chat/completions", json=body)
    assert "part" not in answer.json()["choices"][0]["speculation"]["tokens"][0]


async def test_sources_of_tokens_are_refused_with_stop_strings(rig: Rig) -> None:
    answer = await rig.http.post(
        "/v1/completions", json={"prompt": "x", "stop": "y", "speculation": {"tokens": True}}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculation.tokens"


async def events(
    rig: Rig, count: int, headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(30), rig.http.stream("GET", "/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if len(found) == count:
                    return found
    raise AssertionError("the events ended")


@contextlib.asynccontextmanager
async def feed(rig: Rig, token: str) -> AsyncIterator[httpx.Response]:
    """Yield an open stream of events, of a caller with this bearer token."""
    headers = {"authorization": f"Bearer {token}"}
    async with rig.http.stream("GET", "/events", headers=headers) as response:
        yield response


@pytest.mark.parametrize("holders", [(ALICE,), (ALICE, CAROL)], ids=["1 tenant", "2 tenants"])
async def test_a_tenant_has_a_few_streams_of_events_and_others_have_their_own(
    holders: tuple[str, ...], prompts: Prompts, tmp_path: Path
) -> None:
    entries = [entry(ALICE, "alice"), entry(BOB, "bob"), entry(CAROL, "carol")]
    async with keyed_rig(prompts, tmp_path, entries) as rig, AsyncExitStack() as stack:
        for key in holders:
            for _ in range(MOST_FEEDS):
                response = await stack.enter_async_context(feed(rig, key))
                assert response.status_code == 200
            async with feed(rig, key) as refused:
                assert refused.status_code == 429
                error = json.loads(await refused.aread())["error"]
                assert error["code"] == "rate_limit_exceeded"
                assert error["message"].startswith(f"{MOST_FEEDS} streams of /events are open")
        async with feed(rig, BOB) as response:
            assert response.status_code == 200
        await stack.aclose()
        async with asyncio.timeout(20):
            while True:
                async with feed(rig, ALICE) as response:
                    if response.status_code == 200:
                        break


async def test_without_keys_another_token_gives_no_more_streams_of_events(rig: Rig) -> None:
    async with AsyncExitStack() as stack:
        streams = [stack.enter_async_context(feed(rig, f"t{i}")) for i in range(2 * MOST_FEEDS)]
        codes = [(await each).status_code for each in streams]
    assert codes.count(200) <= MOST_FEEDS
    assert codes.count(429) >= MOST_FEEDS


async def test_streams_of_equal_rights_share_an_encoded_state(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def counted(*given: Any) -> dict[str, Any]:
        made.append(given)
        return page_state(*given)

    page_state = page._state
    monkeypatch.setattr(page, "_state", counted)
    monkeypatch.setattr(page, "_SHARED_S", 1000.0)
    found = await asyncio.gather(*[events(rig, 4) for _ in range(8)])
    assert [len(each) for each in found] == [4] * 8
    # Each stream's first state is made for that stream. The streams share later states.
    assert len(made) == 8


async def test_states_of_tenants_that_have_left_are_not_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller without a key may name another tenant each time that it connects."""
    monkeypatch.setattr(page, "_SHARED_S", 0.0)
    feeds = page._Feeds(rig.gateway.router, rig.gateway.generation.metrics)
    for number in range(100):
        feeds._event(Identity(f"tenant-{number}", is_operator=False), 0.0)
    assert len(feeds._made) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_events_have_the_processes_and_the_sums_of_all_requests(
    rig: Rig, stream: bool
) -> None:
    [before] = await events(rig, 1)
    accepted = TokenSource.ACCEPTED
    recovered = TokenSource.RECOVERED
    steps = [
        drafted([5, 6, 7, 8], accepted, accepted, accepted, TokenSource.BONUS),
        drafted([9], recovered),
    ]
    whole = TokenChunk(
        [5, 6, 7, 8, 9],
        [s for step in steps for s in step.sources],
        "ngram-1",
        FinishReason.LENGTH,
        STATS,
        0,
        6,
    )
    rig.script.answer = lambda _: (
        [*steps, last([], FinishReason.LENGTH, STATS)] if stream else [whole]
    )
    await rig.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    _, after = await events(rig, 2)
    assert after["readiness"]["status"] == "ready"
    assert after["models"] == ["models/target"]
    [verifier] = after["readiness"]["verifiers"]
    assert verifier["round_trip_seconds"] > 0
    assert after["seconds"] > before["seconds"]
    sums = after["activity"]
    base = before["activity"]
    assert {name: count - base["tokens"][name] for name, count in sums["tokens"].items()} == {
        "plain": 0,
        "accepted": 3,
        "recovered": 1,
        "bonus": 1,
        "accepted_side": 0,
    }
    assert sums["draft_tokens"] - base["draft_tokens"] == 6
    pairs = zip_longest(sums["accepted_counts"], base["accepted_counts"], fillvalue=0)
    assert [now - was for now, was in pairs][:4] == [1, 0, 0, 1]


async def test_events_count_steps_and_tokens_by_the_shape_of_the_draft(rig: Rig) -> None:
    [before] = await events(rig, 1)
    side = TokenSource.ACCEPTED_SIDE
    chain = drafted([5, 6], TokenSource.ACCEPTED, TokenSource.RECOVERED)
    tree = drafted([7, 8, 9], side, side, TokenSource.BONUS)
    tree.side_draft_token_count = 4
    rig.script.answer = lambda _: [chain, tree, last([], FinishReason.LENGTH, STATS)]
    await rig.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    _, after = await events(rig, 2)
    sums = after["activity"]
    base = before["activity"]
    assert sums["tokens"]["accepted_side"] - base["tokens"]["accepted_side"] == 2
    names = ("chain_steps", "chain_tokens", "tree_steps", "tree_tokens", "side_draft_tokens")
    assert [sums[name] - base[name] for name in names] == [1, 2, 1, 3, 4]


async def test_the_page_has_a_policy_that_allows_no_other_host(
    rig: Rig,
) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/web/main.js", "text/javascript"),
        ("/web/vendor/uPlot.iife.js", "text/javascript"),
    ):
        answer = await rig.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert (await rig.http.get("/web/../config.py")).status_code == 404
    assert (await rig.http.get("/web/%2e%2e/config.py")).status_code == 404


async def test_an_answer_says_why_nothing_was_drafted(rig: Rig) -> None:
    reason = next(iter(PauseReason))
    pause = SpeculationPause(reason, 7, 0.0015, None)
    stats = SpeculationStats(forward_count=9, paused=pause)
    rig.script.answer = lambda _: [plain([5]), last([3], FinishReason.STOP, stats)]
    body = {"prompt": "x", "speculation": {"always_draft": True}}
    expected = {
        "reason": reason.name.lower(),
        "steps": 7,
        "forward_seconds": 0.0015,
        "draft_seconds": None,
    }
    whole = (await rig.http.post("/v1/completions", json=body)).json()
    assert whole["speculation"] == {"paused": expected}
    assert (await chunks(rig, body))[-1]["speculation"] == {"paused": expected}
    assert rig.script.requests[-1].speculation.always_draft
