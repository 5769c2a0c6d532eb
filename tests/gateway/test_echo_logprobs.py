"""A prompt's log probabilities: with an echo as OpenAI has them, as vLLM's `prompt_logprobs`, and over gRPC."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from gateway_rig import Rig
from scripted_verifier import Step

from outrider.messages import (
    FinishReason,
    SpeculationStats,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    TokenSource,
)
from outrider.process import rpc
from outrider.v1.generation_pb2 import GenerateTextRequest, TokenPrompt

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT: Any = [{"role": "user", "content": "hi"}]
END = 3
CONTEXT_LENGTH = 2048


def made_up(token: int) -> TokenLogprob:
    """A log probability by which the token can be told, and more alternatives than anyone asked for here."""
    return TokenLogprob(-token / 100, (token + 1, token), (-0.001, -token / 100), 2)


def scoring(ids: list[int], part: int = 3) -> Any:
    """A verifier that scores a prompt in parts when asked, then says these tokens, the last part of the prompt with the first."""

    def answer(request: TokenRequest) -> list[Step]:
        scored = (
            [made_up(token) for token in request.prompt[1:]]
            if request.prompt_logprobs is not None
            else []
        )
        parts = [scored[at : at + part] for at in range(0, len(scored), part)] or [[]]
        steps: list[Step] = [TokenChunk([], [], prompt_logprobs=found) for found in parts[:-1]]
        said = [*ids, END][: request.max_tokens]
        told = [made_up(token) for token in said] if request.top_logprobs is not None else []
        reason = FinishReason.STOP if END in said else FinishReason.LENGTH
        stats, sources = SpeculationStats(forward_count=1), [TokenSource.PLAIN] * len(said)
        return [
            *steps,
            TokenChunk(said, sources, "", reason, stats, logprobs=told, prompt_logprobs=parts[-1]),
        ]

    return answer


async def ask(rig: Rig, stream: bool, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    """The text of each choice, and its log probabilities; a stream's chunks put together."""
    if not stream:
        whole = await rig.client.completions.create(model="models/target", **body)
        return [
            (choice.text, choice.logprobs.model_dump() if choice.logprobs else {})
            for choice in whole.choices
        ]
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    async for chunk in await rig.client.completions.create(
        model="models/target", stream=True, **body
    ):
        for choice in chunk.choices:
            text, told = found.setdefault(choice.index, ("", {}))
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                told.setdefault(name, []).extend(values)
            found[choice.index] = text + choice.text, told
    return [found[index] for index in sorted(found)]


PROMPTS = ["once upon a time", "naïve 日本語 😀!", "<|user|>hi<|end|><|assistant|>"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "token ids"])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_an_echo_lists_the_prompts_tokens_before_the_generated_ones(
    rig: Rig, prompt: str, as_ids: bool, stream: bool
) -> None:
    ids, said = (
        rig.prompts.tokenizer.encode(prompt).ids,
        rig.prompts.tokenizer.encode(" and ü on").ids,
    )
    rig.script.answer = scoring(said)
    [(text, told)] = await ask(
        rig, stream, prompt=ids if as_ids else prompt, echo=True, logprobs=2, max_tokens=99
    )
    echo = rig.prompts.tokenizer.decode(ids, skip_special_tokens=True) if as_ids else prompt
    assert text == echo + " and ü on"
    assert rig.script.requests[-1].prompt_logprobs == 2
    every = [*ids, *said, END]
    assert told["tokens"] == [rig.prompts.decode([token]) for token in every]
    assert told["token_logprobs"] == [None, *(pytest.approx(-token / 100) for token in every[1:])]
    assert told["top_logprobs"][0] is None
    for token, name, top in zip(
        every[1:], told["tokens"][1:], told["top_logprobs"][1:], strict=True
    ):
        assert top[name] == pytest.approx(
            -0.001 if rig.prompts.decode([token + 1]) == name else -token / 100
        )
    # Tokens that are whole characters are found in the text where they are said to begin.
    for name, at in zip(told["tokens"], told["text_offset"], strict=True):
        if "\ufffd" not in name and not (name.startswith("<|") and (as_ids or at == len(text))):
            assert text[at : at + len(name)] == name
    assert told["text_offset"] == sorted(told["text_offset"])
    assert told["text_offset"][len(ids)] == len(echo)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_with_no_tokens_to_generate_only_the_prompt_is_scored(
    rig: Rig, stream: bool
) -> None:
    rig.script.answer = scoring([50])
    for prompt in ("x", "once upon a time", [7] * CONTEXT_LENGTH):
        [(text, told)] = await ask(rig, stream, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        ids = prompt if isinstance(prompt, list) else rig.prompts.tokenizer.encode(prompt).ids
        assert text == (prompt if isinstance(prompt, str) else rig.prompts.decode(prompt))
        assert len(told["tokens"]) == len(ids)
        assert (rig.script.requests[-1].max_tokens, rig.script.requests[-1].prompt_logprobs) == (
            0,
            0,
        )


async def test_an_echo_alone_needs_no_log_probabilities(rig: Rig) -> None:
    rig.script.answer = scoring([50])
    answer = await rig.client.completions.create(
        model="models/target", prompt="x = 1", echo=True, max_tokens=0
    )
    [choice] = answer.choices
    assert (choice.text, choice.logprobs, choice.finish_reason) == ("x = 1", None, "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_each_choice_repeats_its_prompt_and_scores_it(
    rig: Rig, stream: bool, max_tokens: int
) -> None:
    said = [50, 51][:max_tokens]
    rig.script.answer = scoring(said)
    prompts = ["once upon a time", "x"]
    found = await ask(
        rig, stream, prompt=prompts, echo=True, logprobs=1, n=3, max_tokens=max_tokens, seed=-1
    )
    told = iter(found)
    for prompt in prompts:
        ids = [*rig.prompts.tokenizer.encode(prompt).ids, *said]
        for text, logprobs in (next(told) for _ in range(3)):
            assert text == prompt + rig.prompts.decode(said)
            assert logprobs["tokens"] == [rig.prompts.decode([token]) for token in ids]
            assert logprobs["token_logprobs"] == [
                None,
                *(pytest.approx(-token / 100) for token in ids[1:]),
            ]
    assert len(found) == len(rig.script.requests) == 6


async def test_choices_that_echo_a_prompt_count_its_tokens_once(rig: Rig) -> None:
    rig.script.answer = scoring([50])
    answer = await rig.client.completions.create(
        model="models/target", prompt="x = 1", echo=True, max_tokens=0, n=3
    )
    assert [(choice.text, choice.logprobs) for choice in answer.choices] == [("x = 1", None)] * 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(rig.prompts.tokenizer.encode("x = 1").ids)


async def test_of_several_tokens_with_one_text_the_likeliest_is_listed(rig: Rig) -> None:
    first, second = rig.prompts.tokenizer.encode("😀").ids[:2]
    assert rig.prompts.decode([first]) == rig.prompts.decode([second])
    likely = TokenLogprob(-5.0, (first, 50), (-0.1, -2.0), 3)
    rig.script.answer = lambda request: [
        TokenChunk(
            [],
            [],
            finish_reason=FinishReason.LENGTH,
            stats=SpeculationStats(),
            prompt_logprobs=[likely],
        )
    ]
    [(_, told)] = await ask(
        rig, False, prompt=[second, second], echo=True, logprobs=2, max_tokens=0
    )
    assert told["token_logprobs"] == [None, -5.0]
    assert list(told["top_logprobs"][1].values()) == [pytest.approx(-0.1), -2.0]


async def test_vllms_prompt_logprobs_have_its_shape_in_both_endpoints(rig: Rig) -> None:
    rig.script.answer = scoring([50])
    extra = {"prompt_logprobs": 2}
    completion = await rig.client.completions.create(
        model="models/target", prompt=[60, 70, 80], n=2, extra_body=extra
    )
    chat = await rig.client.chat.completions.create(
        model="models/target", messages=CHAT, n=2, extra_body=extra
    )
    assert [choice.logprobs for choice in completion.choices] == [None, None]
    for choice in completion.choices:
        assert (choice.model_extra or {})["prompt_logprobs"] == [
            None,
            *(
                {
                    str(token): {
                        "logprob": pytest.approx(-token / 100),
                        "rank": 2,
                        "decoded_token": rig.prompts.decode([token]),
                    },
                    str(token + 1): {
                        "logprob": pytest.approx(-0.001),
                        "rank": 1,
                        "decoded_token": rig.prompts.decode([token + 1]),
                    },
                }
                for token in (70, 80)
            ),
        ]
    prompt = rig.script.requests[-1].prompt
    told = (chat.model_extra or {})["prompt_logprobs"]
    assert (told[0], [next(iter(entry)) for entry in told[1:]]) == (
        None,
        [str(token) for token in prompt[1:]],
    )
    assert "prompt_logprobs" not in (chat.choices[0].model_extra or {})


async def test_a_conversation_can_be_scored_without_an_answer(rig: Rig) -> None:
    rig.script.answer = scoring([50])
    answer = await rig.client.chat.completions.create(
        model="models/target", messages=CHAT, max_tokens=0, extra_body={"prompt_logprobs": 0}
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "length")
    assert len((answer.model_extra or {})["prompt_logprobs"]) == len(rig.script.requests[-1].prompt)


async def test_the_log_probability_of_an_impossible_token_is_finite(rig: Rig) -> None:
    never = TokenLogprob(-math.inf, (50,), (0.0,), 4096)
    rig.script.answer = lambda request: [
        TokenChunk(
            [],
            [],
            finish_reason=FinishReason.LENGTH,
            stats=SpeculationStats(),
            prompt_logprobs=[never],
        )
    ]
    [(_, told)] = await ask(rig, False, prompt=[60, 70], echo=True, logprobs=1, max_tokens=0)
    assert told["token_logprobs"] == [None, -9999.0]


async def test_a_prompts_parts_are_not_taken_for_the_first_token(rig: Rig) -> None:
    async def first_tokens() -> float:
        lines = (await rig.http.get("/metrics")).text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("outrider:time_to_first_token_seconds_count")
        )

    rig.script.answer = scoring([50])
    before = await first_tokens()
    await ask(rig, False, prompt=list(range(40, 60)), echo=True, logprobs=0, max_tokens=0)
    assert await first_tokens() == before
    await ask(rig, False, prompt=list(range(40, 60)), echo=True, logprobs=0, max_tokens=2)
    assert await first_tokens() == before + 1


async def test_grpc_streams_a_prompts_log_probabilities_before_its_first_token(rig: Rig) -> None:
    rig.script.answer = scoring([50])
    prompt = TokenPrompt(token_ids=range(40, 50))
    for max_tokens, tokens in ((0, []), (1, [50])):
        request = GenerateTextRequest(tokens=prompt, max_tokens=max_tokens, prompt_logprob_count=2)
        responses = [response async for response in rig.generation.GenerateText(request)]
        assert [len(response.prompt_logprobs) for response in responses] == [3, 3, 3]
        told = [logprob for response in responses for logprob in response.prompt_logprobs]
        assert [logprob.logprob for logprob in told] == [
            pytest.approx(-token / 100) for token in range(41, 50)
        ]
        assert all((logprob.rank, len(logprob.top_token_ids)) == (2, 2) for logprob in told)
        assert [token for response in responses for token in response.token_ids] == tokens


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"prompt_logprob_count": 21}, "prompt_logprob_count", r"must be in \[0, 20\], not 21"),
        ({"prompt_logprob_count": 0, "max_tokens": -1}, "max_tokens", "must be at least 0, not -1"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1, not 0"),
    ],
)
async def test_grpc_names_the_field_and_the_limit(
    rig: Rig, settings: dict[str, int], field: str, message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        [_ async for _ in rig.generation.GenerateText(GenerateTextRequest(prompt="x", **settings))]
    assert rpc.error_of(caught.value).field == field
