"""A sequence whose verifier dies or leaves continues at another; no token is doubled or lost."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import grpc
import pytest

from gateway.text.prompts import Prompts
from gateway.upstream import routing
from outrider.errors import OutriderError, Reason
from outrider.process.network import rpc
from outrider.protocol.messages import (
    FinishReason,
    SpeculationStats,
    TokenChunk,
    TokenLogprob,
    TokenSource,
)
from outrider.protocol.model_info import Stage
from outrider.v1 import generation_pb2_grpc
from outrider.v1.generation_pb2 import GenerateTextRequest
from tests.gateway.gateway_rig import events_of
from tests.gateway.mortal_verifiers import (
    FOREVER,
    LOST,
    TEXT,
    Site,
    Verifier,
    running_site,
    text_of,
)
from tests.gateway.scripted_verifier import last, plain
from tests.waiting import until

END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # grpc-stubs lack it

pytestmark = pytest.mark.asyncio(loop_scope="session")


WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("until_token", [1, 20])
async def test_a_stream_goes_on_without_a_break_when_its_verifier_dies(
    site: Site, until_token: int
) -> None:
    undisturbed = await site.ask(logprobs=1, **WITH_USAGE)
    asked = await site.begin(until_token, logprobs=1, **WITH_USAGE)
    await site.first.kill()
    found, wanted = events_of(await asked), events_of(undisturbed)
    for event in (*found, *wanted):
        del event["id"], event["created"]
    assert found == wanted
    [began] = site.first.script.requests[1:]
    [goes_on] = site.second.script.requests
    assert goes_on == replace(began, committed=site.ids[:until_token])
    assert began.noise_seed is not None
    assert await site.counted("verifier_unavailable") == 1


async def test_a_stop_string_may_begin_at_one_verifier_and_end_at_another(site: Site) -> None:
    at = TEXT.index("[1, 2")
    before = site.prompts.tokenizer.encode(TEXT[: at + 3]).ids
    assert before == site.ids[: len(before)]
    asked = await site.begin(len(before), stream=True, stop="[1, 2")
    await site.first.kill()
    assert text_of(await asked) == TEXT[:at]


async def test_each_choice_goes_on_by_itself(site: Site) -> None:
    undisturbed = (await site.ask(n=3, seed=5)).json()
    for verifier in (site.first, site.second):
        verifier.script.requests.clear()
        site.writes(verifier, 4)
    asked = site.ask(n=3, seed=5)
    await site.sent(site.first, 4)
    site.writes(site.second)
    await site.first.kill()
    answer = (await asked).json()
    assert answer["choices"] == undisturbed["choices"]
    assert answer["usage"] == undisturbed["usage"]
    begun = [request.sampling.seed for request in site.first.script.requests]
    goes_on = site.second.script.requests
    assert [(r.sampling.seed, len(r.committed)) for r in goes_on] == [(seed, 4) for seed in begun]


@pytest.mark.parametrize("other", ["", "another"])
async def test_a_begun_answer_never_goes_on_at_a_verifier_of_another_fingerprint(
    prompts: Prompts, other: str
) -> None:
    async with running_site(prompts, resume_seconds=0.3) as site:
        first, second = site.first.script, site.second.script
        first.info = replace(first.info, model_fingerprint="one")
        second.info = replace(second.info, model_fingerprint=other)
        await until(lambda: len(site.gateway.router.differing.get("models/target", ())) == 2)
        problem = (await site.http.get("/readyz")).json()
        assert problem["status"] == "degraded"
        assert "verifiers of models/target have other weights" in problem["detail"]
        assert "outrider:differing_models 1.0" in (await site.http.get("/metrics")).text
        asked = await site.begin(3, stream=True)
        await site.first.kill()
        error = events_of(await asked)[-1]["error"]
        assert error["code"] == "model_changed"
        assert "other weights, dtype, version" in error["message"]
        assert second.requests == []
        # A request that has not started may go to the verifier with other weights.
        assert text_of(await site.ask(stream=True)) == TEXT
        assert [request.model_fingerprint for request in second.requests] == [other]


async def test_a_sequence_outlives_several_verifiers(site: Site) -> None:
    site.writes(site.first, 3)
    site.writes(site.second, 8)
    asked = site.ask(**WITH_USAGE)
    await site.sent(site.first, 3)
    await site.first.kill()
    await site.sent(site.second, 8)
    # No verifier is left, until the first one has restarted.
    await site.second.kill()
    site.writes(site.first)
    await site.first.start()
    response = await asked
    assert text_of(response) == TEXT
    assert events_of(response)[-1]["usage"]["completion_tokens"] == len(site.ids) + 1
    assert [len(r.committed) for r in site.first.script.requests] == [0, 8]
    assert await site.counted("verifier_unavailable") == 2


async def test_without_a_verifier_in_time_a_sequence_ends_with_an_error(prompts: Prompts) -> None:
    async with running_site(prompts, resume_seconds=0.3) as site:
        await site.only_first()
        asked = await site.begin(3, stream=True)
        await site.first.kill()
        error = events_of(await asked)[-1]["error"]
        assert error["code"] == "verifier_unavailable"
        assert [len(r.sequences) for r in site.gateway.router.replicas] == [0, 0]


async def test_an_error_that_is_not_the_verifiers_death_is_not_retried(site: Site) -> None:
    reason = Reason.LOGITS_NOT_FINITE
    site.writes(site.first, 3, OutriderError(reason, "no"))
    response = await site.ask(stream=True)
    assert events_of(response)[-1]["error"]["code"] == reason.name.lower()
    assert site.second.script.requests == []


async def test_a_client_that_leaves_while_its_sequence_waits_is_forgotten(site: Site) -> None:
    await site.only_first()
    asked = await site.begin(3)
    await site.first.kill()
    await site.known_lost(0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until(lambda: not any(r.sequences for r in site.gateway.router.replicas))
    site.writes(site.first)
    await site.first.start()
    await until(lambda: site.gateway.router.replicas[0].problem is None)
    assert (await site.ask()).json()["choices"][0]["text"] == TEXT
    assert len(site.first.script.requests) == 2


def scored(*tokens: int) -> TokenChunk:
    """Return a chunk with the log probabilities of some of the prompt's tokens."""
    return TokenChunk([], [], prompt_logprobs=[TokenLogprob(-float(t), (), (), 1) for t in tokens])


async def test_a_prompt_is_listed_once_though_it_is_scored_twice(site: Site) -> None:
    site.first.script.answer = lambda _: [scored(6, 7), FOREVER]
    site.second.script.answer = lambda _: [
        scored(6),
        scored(7, 8),
        plain([site.ids[0]]),
        last([], FinishReason.LENGTH),
    ]
    asked = site.ask(prompt=[5, 6, 7, 8], echo=True, logprobs=0, max_tokens=1)
    await until(
        lambda: any(
            s._scored == 2  # type: ignore[attr-defined]
            for s in site.gateway.router.replicas[0].sequences
        )
    )
    await site.first.kill()
    listed = (await asked).json()["choices"][0]["logprobs"]["token_logprobs"]
    assert listed[:4] == [None, -6.0, -7.0, -8.0]
    assert site.second.script.requests[0].prompt_logprobs == 0


async def test_a_scored_prompt_is_not_scored_again_behind_a_token(site: Site) -> None:
    site.first.script.answer = lambda request: [scored(6), site.chunk(request, 0), FOREVER]
    asked = site.ask(prompt=[5, 6], echo=True, logprobs=0)
    await site.sent(site.first, 1)
    await site.first.kill()
    listed = (await asked).json()["choices"][0]["logprobs"]["token_logprobs"]
    assert listed[:4] == [None, -6.0, 0.0, -0.25]
    assert site.second.script.requests[0].prompt_logprobs is None


def drafted(token_ids: list[int], accepted: int, draft_tokens: int) -> TokenChunk:
    sources = [TokenSource.ACCEPTED] * accepted
    sources += [TokenSource.RECOVERED] * (len(token_ids) - accepted)
    return TokenChunk(token_ids, sources, "ngram-1", draft_token_count=draft_tokens)


async def test_the_statistics_are_those_of_all_verifiers(site: Site) -> None:
    """Steps and cached tokens of the lost verifier count if they arrived."""
    begun = replace(drafted(site.ids[:2], 1, 3), cached_token_count=16)
    site.first.script.answer = lambda _: [begun, FOREVER]
    stats = SpeculationStats(2, 1, 4, 2, [0, 0, 1], 4)
    ending = replace(drafted(site.ids[2:5], 2, 4), cached_token_count=48)
    ending = replace(ending, finish_reason=FinishReason.LENGTH, stats=stats)
    site.second.script.answer = lambda _: [ending]
    body = {"speculation": {"metrics": True, "acceptance": "typical"}}
    asked = site.ask(max_tokens=5, **body)
    await site.sent(site.first, 2)
    await site.first.kill()
    answer = (await asked).json()
    found = answer["metrics"]["speculative_decoding"]
    assert found["num_draft_tokens"] == 7
    assert found["num_accepted_draft_tokens"] == 3
    assert found["acceptance_histogram"] == [0, 1, 1, 0, 0]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    # The lost verifier never told its acceptance rule, but the request names the rule.
    assert answer["speculation"] == {"rules": ["typical"], "lossless": False}


async def test_grpc_tells_how_often_a_request_went_on(site: Site) -> None:
    site.writes(site.first, 3)
    async with rpc.dial(site.gateway.grpc_address) as channel:
        call: Any = generation_pb2_grpc.GenerationServiceStub(channel).GenerateText(
            GenerateTextRequest(prompt="x")
        )
        responses = [await call.read() for _ in range(3)]
        await site.first.kill()
        while (response := await call.read()) is not END:
            responses.append(response)
    assert "".join(response.text for response in responses) == TEXT
    assert responses[-1].usage.resumed_count == 1
    assert responses[-1].usage.completion_token_count == len(site.ids) + 1


async def test_a_verifier_that_drains_hands_its_sequences_over(prompts: Prompts) -> None:
    # The gateway must believe the verifier at once, not only at the next poll.
    async with running_site(prompts, poll_s=60.0) as site:
        site.writes(site.first, 3)
        begun = site.ask(stream=True)
        await site.sent(site.first, 3)
        site.first.drain()
        assert text_of(await begun) == TEXT
        await until(lambda: site.first.script.running == 0)
        assert site.first.script.cancelled == 1
        assert await site.counted("draining") == 1


async def test_a_sequence_goes_on_when_a_draining_verifier_has_restarted(site: Site) -> None:
    await site.only_first()
    asked = await site.begin(3, stream=True)
    site.first.drain()
    await site.known_lost(0)
    site.first.script.hangs_up = True
    await until(lambda: site.first.script.running == 0)
    site.writes(site.first)
    site.first.script.info = replace(site.first.script.info, stage=Stage.READY)
    assert text_of(await asked) == TEXT


async def test_sequences_spread_over_the_verifiers_that_are_left(prompts: Prompts) -> None:
    third = Verifier(prompts)
    await third.start()
    try:
        async with running_site(prompts) as site:
            router = site.gateway.router
            router.replicas.append(routing.Replica(third.address))
            await router.replicas[2].refresh(prompts.fingerprint)
            site.writes(site.first, 2)
            left = [site.second.script, third.script]
            for script in left:
                script.answer = lambda _: [FOREVER]
            asked = [site.ask() for _ in range(12)]
            await until(lambda: site.first.script.running == 4)
            await site.first.kill()
            await until(lambda: [script.running for script in left] == [6, 6])
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
    finally:
        await third.kill()


async def test_gathered_steps_of_a_lost_verifier_count_one_by_one(site: Site) -> None:
    """Only the verifier's last chunk has statistics, and that chunk never comes."""
    steps = [TokenSource.ACCEPTED] * 3 + [TokenSource.RECOVERED]
    ids = (site.ids * 10)[:40]
    lost = TokenChunk(ids, steps * 10, "ngram-1", draft_token_count=40)
    site.first.script.play(lost, LOST)
    ending = TokenChunk(
        ids[:4],
        steps,
        "ngram-1",
        FinishReason.LENGTH,
        SpeculationStats(1, 1, 4, 3, [0, 0, 0, 1], 4),
        draft_token_count=4,
    )
    site.second.script.play(ending)
    answer = (await site.ask(max_tokens=44, speculation={"metrics": True})).json()
    found = answer["metrics"]["speculative_decoding"]
    assert found["mean_acceptance_length"] == 4
    assert found["acceptance_histogram"] == [0, 0, 0, 11, 0]
    assert (found["num_draft_tokens"], found["num_accepted_draft_tokens"]) == (44, 33)
    counters = (await site.http.get("/metrics")).text
    shown = dict(re.findall(r"^vllm:spec_decode_num_(\w+)_total\S* (\S+)$", counters, re.MULTILINE))
    assert float(shown["accepted_tokens"]) / float(shown["draft_tokens"]) == 0.75
