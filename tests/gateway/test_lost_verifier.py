"""A verifier that falls silent or sends impossible values affects no other verifier's requests."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from gateway.text.prompts import Prompts
from gateway.upstream import replica, routing
from outrider.protocol.messages import (
    FinishReason,
    SpeculationStats,
    TokenChunk,
    TokenLogprob,
    TokenSource,
)
from outrider.protocol.model_info import DrafterInfo, Placement, Stage
from tests.gateway.gateway_rig import Rig, echo
from tests.gateway.mortal_verifiers import TEXT, Site, running_site, text_of
from tests.gateway.scripted_verifier import last
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def site(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """Yield a gateway that reaches the first of its two verifiers through a link."""
    monkeypatch.setattr(replica, "_POLL_TIMEOUT_S", 0.5)
    async with running_site(prompts, through_link=True) as made:
        yield made


async def test_waiting_sequences_leave_a_verifier_when_its_poll_fails(site: Site) -> None:
    """The connection stays open, as when a machine dies, so the call does not end by itself."""
    site.writes(site.first, 0)
    asked = site.ask(stream=True)
    await until(lambda: site.first.script.running == 1)
    site.link.vanish()
    assert text_of(await asked) == TEXT
    assert len(site.second.script.requests) == 1


async def test_a_sequence_with_a_chunk_leaves_a_verifier_that_is_silent_for_long(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier's event loop may hang: gRPC still answers pings, so the call does not end."""
    monkeypatch.setattr(routing, "_SILENT_S", 0.5)
    asked = await site.begin(3, stream=True)
    site.first.script.unreachable = True
    assert text_of(await asked) == TEXT
    [continued] = site.second.script.requests
    assert continued.committed == site.ids[:3]


async def test_a_sequence_with_a_chunk_stays_when_the_poll_fails(site: Site) -> None:
    asked = await site.pauses(0.5, stream=True)
    site.first.script.unreachable = True
    await site.known_lost(0)
    assert text_of(await asked) == TEXT
    assert site.second.script.requests == []


async def test_without_another_verifier_waiting_sequences_stay(site: Site) -> None:
    """No other verifier would serve the requests, and the silent verifier may only be slow."""
    site.second.script.info = replace(site.second.script.info, stage=Stage.DRAINING)
    await site.known_lost(1)
    site.first.script.answer = lambda request: [0.5, *echo(request)]
    asked = site.ask()
    await until(lambda: site.first.script.running == 1)
    site.first.script.unreachable = True
    await site.known_lost(0)
    assert (await asked).status_code == 200


async def test_a_half_open_connection_is_replaced_as_soon_as_a_poll_fails(site: Site) -> None:
    await site.only_first()
    replicas = site.gateway.router.replicas
    channel = replicas[0]._channel
    site.link.vanish()
    # gRPC itself would close the connection only after 12 s.
    await until(lambda: replicas[0]._channel is not channel)
    await until(lambda: replicas[0].problem is None)
    assert (await site.ask()).status_code == 200


def of_no_number() -> DrafterInfo:
    """Return a drafter whose acceptance rate is no number."""
    placement = Placement("local", "h", "cpu", (), None, "")
    return DrafterInfo("a", "ngram", placement, True, 0, math.nan, None, None)


IMPOSSIBLE: list[dict[str, Any]] = [
    {"vocab_size": 0},
    {"context_length": -1},
    {"max_draft_tokens": 2**31 - 1},
    {"drafters": (of_no_number(),)},
]


async def test_a_verifier_with_impossible_numbers_is_polled_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.upstream.routing")
    honest = site.first.script.info
    replicas = site.gateway.router.replicas
    for changes in IMPOSSIBLE:
        site.first.script.info = replace(honest, **changes)
        await site.known_lost(0)
        state = (await site.http.get("/readyz")).json()
        assert (state["status"], "cannot be read" in state["detail"]) == ("degraded", True)
        assert (await site.ask()).status_code == 200
        site.first.script.info = honest
        await until(lambda: replicas[0].problem is None)
    assert len(site.second.script.requests) == len(IMPOSSIBLE)
    # The gateway logs a change, not each poll.
    logged = [record.getMessage() for record in caplog.records]
    assert len([line for line in logged if "cannot be read" in line]) == len(IMPOSSIBLE)


def _logprob(token: int) -> TokenLogprob:
    return TokenLogprob(-0.5, (token,), (-0.5,), 1)


def _ended(stats: SpeculationStats) -> TokenChunk:
    return TokenChunk([], [], finish_reason=FinishReason.LENGTH, stats=stats)


PLAIN = TokenSource.PLAIN
WRONG_CHUNKS: dict[str, TokenChunk] = {
    "a token that there is not": TokenChunk([4096], [PLAIN]),
    "the largest token": TokenChunk([5, 2**32 - 1], [PLAIN, PLAIN]),
    "more tokens than asked for": TokenChunk([5] * 2000, [PLAIN] * 2000),
    "no sources": TokenChunk([5], []),
    "too few log probabilities": TokenChunk([5, 6], [PLAIN, PLAIN], logprobs=[_logprob(5)]),
    "an alternative that there is not": TokenChunk([5], [PLAIN], logprobs=[_logprob(2**31)]),
    "an alternative in the prompt that there is not": TokenChunk(
        [5], [PLAIN], prompt_logprobs=[_logprob(4096)]
    ),
    "a log probability that is no number": TokenChunk(
        [5], [PLAIN], logprobs=[TokenLogprob(math.nan, (5,), (-0.5,), 1)]
    ),
    "an alternative's infinite log probability": TokenChunk(
        [5], [PLAIN], logprobs=[TokenLogprob(-0.5, (5,), (math.inf,), 1)]
    ),
    "an alternative without a log probability": TokenChunk(
        [5], [PLAIN], logprobs=[TokenLogprob(-0.5, (5, 6), (-0.5,), 1)]
    ),
    "fewer cached tokens than none": TokenChunk([5], [PLAIN], cached_token_count=-1),
    "fewer draft tokens than none": TokenChunk([5], [PLAIN], draft_token_count=-1),
    "fewer accepted tokens than none": _ended(SpeculationStats(accepted_token_count=-1)),
    "fewer drafts of a length than none": _ended(SpeculationStats(histogram=[1, -1])),
    "more draft tokens than any verifier has": _ended(SpeculationStats(max_draft_tokens=2**31 - 1)),
}


@pytest.mark.parametrize("lie", WRONG_CHUNKS)
async def test_an_impossible_chunk_is_an_error(
    rig: Rig, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig.script.answer = lambda _: [WRONG_CHUNKS[lie], last([], FinishReason.LENGTH)]
    response = await rig.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    assert response.json()["error"]["message"].startswith("the verifier sent ")
    assert "verifier 127.0.0.1:" in caplog.text
    await until(lambda: rig.script.running == 0)
    assert not rig.gateway.router.replicas[0].sequences
    rig.script.answer = echo
    assert (await rig.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
