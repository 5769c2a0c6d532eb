"""OpenAI's own client gets the answers that OpenAI's API would give."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from gateway.text.prompts import Prompts
from outrider.protocol.messages import FinishReason, SpeculationStats, TokenChunk, TokenSource
from tests.gateway.gateway_rig import Rig, own_rig
from tests.gateway.scripted_verifier import last, plain
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "def add(a, b):\n    return a + b  # 😀"
MESSAGES: Any = [{"role": "user", "content": "Write add."}]


async def test_a_completion_continues_the_prompt(rig: Rig) -> None:
    ids = rig.says(TEXT)
    answer = await rig.client.completions.create(
        model="models/target", prompt="x = 1", max_tokens=64
    )
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (TEXT, "stop", 0)
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    prompt_count = len(rig.prompts.tokenizer.encode("x = 1").ids)
    assert answer.usage.prompt_tokens == prompt_count
    assert answer.usage.completion_tokens == len(ids) + 1
    assert answer.usage.total_tokens == prompt_count + len(ids) + 1


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
async def test_a_stream_joins_to_the_whole_answer(rig: Rig, chunk: int) -> None:
    rig.says(TEXT, chunk)
    texts = []
    reasons = []
    async for part in await rig.client.completions.create(
        model="models/target", prompt="x", max_tokens=64, stream=True
    ):
        texts.append(part.choices[0].text)
        reasons.append(part.choices[0].finish_reason)
    assert "".join(texts) == TEXT
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


async def test_a_chat_is_rendered_by_the_template_and_answered(rig: Rig) -> None:
    rig.says(TEXT)
    answer = await rig.client.chat.completions.create(model="models/target", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert (
        rig.prompts.decode(rig.script.requests[0].prompt)
        == "<|user|>Write add.<|end|><|assistant|>"
    )


async def test_a_chat_stream_has_the_role_first_and_the_usage_last(rig: Rig) -> None:
    ids = rig.says(TEXT, 3, reason=FinishReason.LENGTH)
    stream = await rig.client.chat.completions.create(
        model="models/target",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = [part async for part in stream]
    first, *middle, closing, usage = parts
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(part.choices[0].delta.content or "" for part in middle) == TEXT
    assert (closing.choices[0].finish_reason, closing.choices[0].delta.content) == ("length", None)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(ids)
    assert all(part.usage is None for part in parts[:-1])
    assert len({part.id for part in parts}) == 1


async def test_the_events_of_a_stream_are_openais(rig: Rig) -> None:
    rig.says("naïve")
    response = await rig.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert {event["object"] for event in events} == {"text_completion"}
    assert all(
        event.keys() == {"id", "object", "created", "model", "system_fingerprint", "choices"}
        for event in events
    )
    assert events[-1]["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    ]
    assert response.text.isascii()


async def test_defaults_are_openais(rig: Rig) -> None:
    await rig.client.completions.create(model="models/target", prompt="x")
    await rig.client.chat.completions.create(model="models/target", messages=MESSAGES)
    completion, chat = rig.script.requests
    assert completion.max_tokens == 16
    assert chat.max_tokens == 2048 - len(chat.prompt)
    assert completion.sampling.temperature == 1.0
    assert completion.sampling.top_p == 1.0
    assert completion.sampling.seed is None
    assert completion.speculation.enabled


async def test_a_prompt_may_be_text_or_ids_alone_or_in_a_list(rig: Rig) -> None:
    ids = rig.prompts.tokenizer.encode("if x").ids
    for prompt in ("if x", ["if x"], ids, [ids]):
        answer = await rig.client.completions.create(model="models/target", prompt=prompt)
        assert [choice.text for choice in answer.choices] == ["if x"]


async def test_choices_are_numbered_by_prompt_and_a_prompt_counts_once(rig: Rig) -> None:
    prompts = ["if", "while x", "for"]
    answer = await rig.client.completions.create(model="models/target", prompt=prompts, n=2, seed=5)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (i, prompts[i // 2]) for i in range(6)
    ]
    lengths = [len(rig.prompts.tokenizer.encode(prompt).ids) for prompt in prompts]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(lengths)
    assert answer.usage.completion_tokens == 2 * sum(length + 1 for length in lengths)
    seeds = sorted(request.sampling.seed or 0 for request in rig.script.requests)
    assert seeds == [5] * 3 + [6] * 3


async def test_a_stop_string_ends_the_text_and_the_sequence(rig: Rig) -> None:
    ids = rig.says("one two three four five six", 1, pause_s=0.05)
    answer = await rig.client.completions.create(
        model="models/target", prompt="x", stop=["three", "six"]
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two ", "stop")
    used = next(n for n in range(len(ids)) if "three" in rig.prompts.tokenizer.decode(ids[:n]))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == used
    await until(lambda: rig.script.running == 0)
    assert rig.script.cancelled == 1


async def test_the_token_that_ends_a_sequence_counts_but_has_no_text(rig: Rig) -> None:
    [word] = rig.prompts.tokenizer.encode("if").ids
    rig.script.answer = lambda _: [plain([word]), last([word], FinishReason.STOP)]
    answer = await rig.client.completions.create(
        model="models/target", prompt="x", extra_body={"stop_token_ids": [word]}
    )
    assert answer.choices[0].text == "if"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


STATS = SpeculationStats(5, 4, 12, 6, [1, 1, 1, 1], 3)


async def test_usage_and_metrics_have_the_statistics_of_the_speculation(rig: Rig) -> None:
    rig.script.answer = lambda _: [last([5], FinishReason.LENGTH, STATS, cached=1)]
    extra = {"speculation": {"metrics": True}}
    answer = await rig.client.completions.create(
        model="models/target", prompt="x", extra_body=extra
    )
    stream = await rig.client.completions.create(
        model="models/target", prompt="x", stream=True, extra_body=extra
    )
    *others, streamed = [part.model_extra.get("metrics") async for part in stream]
    assert others == [None] * len(others)
    assert streamed == answer.model_extra["metrics"]
    details = answer.usage.completion_tokens_details if answer.usage else None
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 6)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.model_extra["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 6 / 4,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 1, 1],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 12,
        "num_spec_tokens": 3,
    }


async def test_a_gateway_can_put_the_statistics_into_every_answer(prompts: Prompts) -> None:
    async with own_rig(prompts, speculation_metrics=True) as rig:
        rig.script.answer = lambda _: [last([5], FinishReason.LENGTH, STATS)]
        whole = await rig.http.post("/v1/completions", json={"prompt": "x"})
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        streamed = await rig.http.post("/v1/chat/completions", json=chat)
    assert whole.json()["metrics"]["speculative_decoding"]["num_draft_tokens"] == 12
    assert '"num_draft_tokens":12' in streamed.text


async def test_a_sequence_ended_by_a_stop_string_still_has_its_statistics(rig: Rig) -> None:
    ids = rig.prompts.tokenizer.encode("a b stop").ids
    sources = [TokenSource.ACCEPTED] * (len(ids) - 1) + [TokenSource.RECOVERED]
    step = TokenChunk(ids, sources, "d", draft_token_count=len(ids) + 2, cached_token_count=1)
    rig.script.answer = lambda _: [step, 60.0]
    answer = await rig.client.completions.create(
        model="models/target",
        prompt="x",
        stop="stop",
        extra_body={"speculation": {"metrics": True}},
    )
    metrics = answer.model_extra["metrics"]["speculative_decoding"]
    assert metrics["num_accepted_draft_tokens"] == len(ids) - 1
    assert metrics["num_draft_tokens"] == len(ids) + 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_an_answer_has_its_id_in_the_header_and_at_the_verifier(rig: Rig) -> None:
    for stream in (False, True):
        response = await rig.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert response.headers["x-request-id"] == rig.script.requests[-1].request_id
        assert response.headers["x-request-id"] in response.text


async def test_tokenize_and_detokenize_undo_each_other(rig: Rig) -> None:
    answer = (
        await rig.http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})
    ).json()
    ids = rig.prompts.tokenizer.encode(TEXT).ids
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 2048)
    assert len(answer["token_strs"]) == len(ids)
    assert (await rig.http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": TEXT}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_says_that_max_tokens_cut_its_grammar_off(rig: Rig, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 4, "stream": stream}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}
    for reason, extra, noted in (
        (FinishReason.LENGTH, {"response_format": schema}, True),
        (FinishReason.STOP, {"response_format": schema}, False),
        (FinishReason.LENGTH, {}, False),
    ):
        rig.says("[1", reason=reason)
        raw = await rig.client.post("/completions", body={**body, **extra}, cast_to=httpx.Response)
        assert ('"grammar_incomplete":true' in raw.text.replace(" ", "")) == noted
