"""Log probabilities of prompts: OpenAI's echo, vLLM's `prompt_logprobs`, and gRPC."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from outrider.protocol.messages import (
    FinishReason,
    SpeculationStats,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    TokenSource,
)
from outrider.v1.generation_pb2 import GenerateTextRequest, TokenPrompt
from tests.gateway.gateway_rig import Rig
from tests.gateway.scripted_verifier import Step, last

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT: Any = [{"role": "user", "content": "hi"}]
END = 3
CONTEXT_LENGTH = 2048


def made_up(token: int) -> TokenLogprob:
    """Return a log probability that identifies the token, and two alternatives."""
    return TokenLogprob(-token / 100, (token + 1, token), (-0.001, -token / 100), 2)


def scoring(ids: list[int], part: int = 3) -> Any:
    """Return a verifier's answer: the prompt's scores in parts of `part` tokens, then these ids.

    The last part of the scores comes with the ids.
    """

    def answer(request: TokenRequest) -> list[Step]:
        scored: list[TokenLogprob] = []
        if request.prompt_logprobs is not None:
            scored = [made_up(token) for token in request.prompt[1:]]
        parts = [scored[at : at + part] for at in range(0, len(scored), part)] or [[]]
        steps: list[Step] = [TokenChunk([], [], prompt_logprobs=found) for found in parts[:-1]]
        output = [*ids, END][: request.max_tokens]
        end = TokenChunk(
            output,
            [TokenSource.PLAIN] * len(output),
            finish_reason=FinishReason.STOP if END in output else FinishReason.LENGTH,
            stats=SpeculationStats(forward_count=1),
            prompt_logprobs=parts[-1],
        )
        if request.top_logprobs is not None:
            end.logprobs = [made_up(token) for token in output]
        return [*steps, end]

    return answer


def scored(logprob: TokenLogprob) -> TokenChunk:
    """Return the only chunk of an answer without tokens, to a prompt of two tokens."""
    return replace(last([], FinishReason.LENGTH), prompt_logprobs=[logprob])


def logprobs_of(choice: Any) -> dict[str, Any]:
    return choice.logprobs.model_dump() if choice.logprobs else {}


async def ask(rig: Rig, stream: bool, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the text and the log probabilities of each choice.

    The chunks of a stream are joined.
    """
    if not stream:
        whole = await rig.client.completions.create(model="models/target", **body)
        return [(choice.text, logprobs_of(choice)) for choice in whole.choices]
    texts: dict[int, str] = {}
    logprobs: dict[int, dict[str, Any]] = {}
    chunks = await rig.client.completions.create(model="models/target", stream=True, **body)
    async for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            of_choice = logprobs.setdefault(choice.index, {})
            for name, values in logprobs_of(choice).items():
                of_choice.setdefault(name, []).extend(values)
    return [(texts[index], logprobs[index]) for index in sorted(texts)]


PROMPTS = ["once upon a time", "naïve 日本語 😀!", "<|user|>hi<|end|><|assistant|>"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(("as_ids", "stream"), [(False, True), (True, False), (True, True)])
async def test_an_echo_lists_the_prompts_tokens_before_the_generated_ones(
    rig: Rig, prompt: str, as_ids: bool, stream: bool
) -> None:
    ids = rig.prompts.tokenizer.encode(prompt).ids
    output = rig.prompts.tokenizer.encode(" and ü on").ids
    rig.script.answer = scoring(output)
    given: Any = prompt
    echo = prompt
    if as_ids:
        given = ids
        echo = rig.prompts.tokenizer.decode(ids, skip_special_tokens=True)
    [(text, found)] = await ask(rig, stream, prompt=given, echo=True, logprobs=2, max_tokens=99)
    assert text == echo + " and ü on"
    assert rig.script.requests[-1].prompt_logprobs == 2
    every = [*ids, *output, END]
    assert found["tokens"] == [rig.prompts.decode([token]) for token in every]
    assert found["token_logprobs"] == [None, *(pytest.approx(-token / 100) for token in every[1:])]
    assert found["top_logprobs"][0] is None
    for token, name, top in zip(
        every[1:], found["tokens"][1:], found["top_logprobs"][1:], strict=True
    ):
        same_text = rig.prompts.decode([token + 1]) == name
        assert top[name] == pytest.approx(-0.001 if same_text else -token / 100)
    # Each token of whole characters, unless the text hides it, is in the text at its offset.
    for name, at in zip(found["tokens"], found["text_offset"], strict=True):
        if "\ufffd" not in name and not (name.startswith("<|") and (as_ids or at == len(text))):
            assert text[at : at + len(name)] == name
    assert found["text_offset"] == sorted(found["text_offset"])
    assert found["text_offset"][len(ids)] == len(echo)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_with_no_tokens_to_generate_only_the_prompt_is_scored(rig: Rig, stream: bool) -> None:
    rig.script.answer = scoring([50])
    for prompt in ("x", "once upon a time", [7] * CONTEXT_LENGTH):
        [(text, found)] = await ask(rig, stream, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        ids = prompt if isinstance(prompt, list) else rig.prompts.tokenizer.encode(prompt).ids
        assert text == (prompt if isinstance(prompt, str) else rig.prompts.decode(prompt))
        assert len(found["tokens"]) == len(ids)
        assert rig.script.requests[-1].max_tokens == 0
        assert rig.script.requests[-1].prompt_logprobs == 0


async def test_of_several_tokens_with_one_text_the_likeliest_is_listed(rig: Rig) -> None:
    first, second = rig.prompts.tokenizer.encode("😀").ids[:2]
    assert rig.prompts.decode([first]) == rig.prompts.decode([second])
    likely = TokenLogprob(-5.0, (first, 50), (-0.1, -2.0), 3)
    rig.script.answer = lambda _: [scored(likely)]
    [(_, found)] = await ask(
        rig, False, prompt=[second, second], echo=True, logprobs=2, max_tokens=0
    )
    assert found["token_logprobs"] == [None, -5.0]
    assert list(found["top_logprobs"][1].values()) == [pytest.approx(-0.1), -2.0]


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
    found = (chat.model_extra or {})["prompt_logprobs"]
    assert found[0] is None
    assert [next(iter(entry)) for entry in found[1:]] == [str(token) for token in prompt[1:]]
    assert "prompt_logprobs" not in (chat.choices[0].model_extra or {})


async def test_the_log_probability_of_an_impossible_token_is_finite(rig: Rig) -> None:
    never = TokenLogprob(-math.inf, (50,), (0.0,), 4096)
    rig.script.answer = lambda _: [scored(never)]
    [(_, found)] = await ask(rig, False, prompt=[60, 70], echo=True, logprobs=1, max_tokens=0)
    assert found["token_logprobs"] == [None, -9999.0]


async def test_grpc_streams_a_prompts_log_probabilities_before_its_first_token(rig: Rig) -> None:
    rig.script.answer = scoring([50])
    prompt = TokenPrompt(token_ids=range(40, 50))
    for max_tokens, tokens in ((0, []), (1, [50])):
        request = GenerateTextRequest(tokens=prompt, max_tokens=max_tokens, prompt_logprob_count=2)
        responses = [response async for response in rig.generation.GenerateText(request)]
        assert [len(response.prompt_logprobs) for response in responses] == [3, 3, 3]
        found = [logprob for response in responses for logprob in response.prompt_logprobs]
        assert [logprob.logprob for logprob in found] == [
            pytest.approx(-token / 100) for token in range(41, 50)
        ]
        assert all((logprob.rank, len(logprob.top_token_ids)) == (2, 2) for logprob in found)
        assert [token for response in responses for token in response.token_ids] == tokens
