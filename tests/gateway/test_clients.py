"""Recorded requests of other people's clients, and what these clients read in the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.http.openai.conversation import MAX_TEMPLATE_CHARACTERS, MAX_TEMPLATE_VARIABLES
from outrider.protocol.messages import FinishReason, SpeculationStats, TokenChunk, TokenSource
from tests.gateway.gateway_rig import Rig, events_of
from tests.gateway.scripted_verifier import last, plain

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT: Any = [{"role": "user", "content": "hi"}]
# The requests of guidellm 0.8.
GUIDELLM: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x y", "max_tokens": 64, "stop": None, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": CHAT,
        "max_completion_tokens": 64,
        "stop": None,
        "ignore_eos": True,
    },
}
# The requests of `vllm bench serve` 0.32.
VLLM_BENCH: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "models/target",
        "prompt": "x y",
        "repetition_penalty": 1.0,
        "max_tokens": 64,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    },
    "/v1/chat/completions": {
        "model": "models/target",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x y"}]}],
        "max_completion_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    },
}


@pytest.mark.parametrize("path", GUIDELLM)
async def test_guidellm_reads_the_usage_of_each_chunk(rig: Rig, path: str) -> None:
    ids = rig.says("if x then y", chunk=2)
    options = {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    response = await rig.http.post(
        path, json={"model": "models/target", **options, **GUIDELLM[path]}
    )
    *chunks, whole = events_of(response)
    prompt = whole["usage"]["prompt_tokens"]
    assert all(
        set(chunk["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
        for chunk in chunks
    )
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {prompt}
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == whole["usage"]["completion_tokens"] == len(ids) + 1
    assert chunks[0]["usage"]["completion_tokens"] == (0 if "chat" in path else 2)
    assert all(
        chunk["usage"]["total_tokens"] == prompt + count
        for chunk, count in zip(chunks, counts, strict=True)
    )


def drafted(accepted: int, drafted_count: int) -> TokenChunk:
    """Return the chunk of a step that accepted `accepted` of its `drafted_count` draft tokens."""
    own = TokenSource.BONUS if accepted == drafted_count else TokenSource.RECOVERED
    sources = [TokenSource.ACCEPTED] * accepted + [own]
    return TokenChunk([5] * (accepted + 1), sources, "ngram-1", draft_token_count=drafted_count)


async def spec_decode(rig: Rig) -> dict[str, float]:
    """Return the counters, keyed by name and position, read as `vllm bench serve` reads them."""
    found: dict[str, float] = {}
    for line in (await rig.http.get("/metrics")).text.splitlines():
        if line.startswith("vllm:spec_decode"):
            series, value = line.split(None, 1)
            name, _, labels = series.partition("{")
            if name.endswith("_total"):
                position = labels.partition('position="')[2].partition('"')[0]
                found[name.removeprefix("vllm:spec_decode_") + position] = float(value)
    return found


@pytest.mark.parametrize("path", VLLM_BENCH)
async def test_vllm_bench_reads_the_acceptance_of_its_requests(rig: Rig, path: str) -> None:
    before = await spec_decode(rig)
    steps = [drafted(3, 4), plain([5]), drafted(0, 2), drafted(1, 1)]
    rig.script.answer = lambda _: [
        *steps,
        last([3], FinishReason.STOP, SpeculationStats(draft_count=3)),
    ]
    response = await rig.http.post(path, json=VLLM_BENCH[path])
    assert events_of(response)[-1]["usage"]["completion_tokens"] == 9
    after = await spec_decode(rig)
    assert {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if value != before.get(name, 0)
    } == {
        "num_drafts_total": 3,
        "num_draft_tokens_total": 7,
        "num_accepted_tokens_total": 4,
        "num_accepted_tokens_per_pos_total0": 2,
        "num_accepted_tokens_per_pos_total1": 1,
        "num_accepted_tokens_per_pos_total2": 1,
    }


async def test_a_whole_answer_counts_the_drafts_of_its_gathered_steps(rig: Rig) -> None:
    before = await spec_decode(rig)
    stats = SpeculationStats(
        forward_count=5,
        draft_count=3,
        draft_token_count=7,
        accepted_token_count=3,
        histogram=[1, 1, 1],
    )
    gathered = drafted(3, 7)
    rig.script.answer = lambda _: [plain([5]), gathered, last([3], FinishReason.STOP, stats)]
    await rig.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 30})
    after = await spec_decode(rig)
    changed = {name: value - before.get(name, 0) for name, value in after.items()}
    assert changed["num_drafts_total"] == 3
    assert changed["num_draft_tokens_total"] == 7
    assert changed["num_accepted_tokens_total"] == 3
    assert changed["num_accepted_tokens_per_pos_total0"] == 2
    assert changed["num_accepted_tokens_per_pos_total1"] == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b c " * 3000}]}),
        ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 4000}),
        ("/v1/completions", {"prompt": [5] * 2048}),
    ],
    ids=["messages", "limit", "prompt"],
)
async def test_litellm_and_langchain_recognise_a_context_overflow(
    rig: Rig, path: str, body: dict[str, Any]
) -> None:
    error = (await rig.http.post(path, json=body)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    # If litellm 1.106 finds this text in an error, it falls back to a larger model.
    assert error["message"].startswith("This model's maximum context length is 2048 tokens. ")
    # langchain-openai 1.7 looks for this code in the exception's text.
    assert "context_length_exceeded" in error["message"]


@pytest.mark.parametrize(
    "said",
    [
        {"content": "Hello!", "tool_calls": []},
        {"content": "", "tool_calls": None},
        {"content": None, "function_call": None, "audio": None},
    ],
)
async def test_a_history_of_answers_without_calls_is_accepted(
    rig: Rig, said: dict[str, Any]
) -> None:
    history = [*CHAT, {"role": "assistant", **said}, *CHAT]
    response = await rig.http.post("/v1/chat/completions", json={"messages": history})
    assert response.status_code == 200
    assert (said["content"] or "") in rig.prompts.decode(rig.script.requests[0].prompt)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"messages": []}, "must not set messages"),
        ({"add_generation_prompt": False}, "must not set add_generation_prompt"),
        ({"bos_token": "x"}, "must not set bos_token"),
        ({"a b": 1}, "identifiers of at most 64 characters"),
        ({"a" * 65: 1}, "identifiers of at most 64 characters"),
        ({f"a{i}": 1 for i in range(MAX_TEMPLATE_VARIABLES + 1)}, "at most 16 names"),
        ({"a": "x" * MAX_TEMPLATE_CHARACTERS}, "at most 4096 characters"),
        ({"a": "\ud800"}, "half of a surrogate pair"),
        ([1], "must be an object"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_the_variables_of_a_chat_template_are_bounded(
    rig: Rig, variables: Any, words: str
) -> None:
    body = json.dumps({"messages": CHAT, "chat_template_kwargs": variables})
    response = await rig.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "chat_template_kwargs")
    assert words in error["message"]


async def test_the_last_message_can_be_left_open(rig: Rig) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Sure: "}]
    for extra in (
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    ):
        response = await rig.http.post("/v1/chat/completions", json={"messages": messages, **extra})
        assert response.status_code == 200
        assert rig.prompts.decode(rig.script.requests[-1].prompt).endswith("<|assistant|>Sure: ")
        tokenized = await rig.http.post("/tokenize", json={"messages": messages, **extra})
        assert tokenized.json()["tokens"] == rig.script.requests[-1].prompt
    both = {"continue_final_message": True, "add_generation_prompt": True}
    error = (
        await rig.http.post("/v1/chat/completions", json={"messages": messages, **both})
    ).json()["error"]
    assert (error["param"], error["code"]) == ("add_generation_prompt", "invalid_value")
