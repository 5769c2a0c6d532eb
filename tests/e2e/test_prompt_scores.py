"""A prompt's log probabilities, over HTTP and gRPC, are those of transformers' forward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio
import torch
from stack import ROOT, TARGET, Stack, running
from transformers import AutoModelForCausalLM

from gateway.config import GatewaySettings
from gateway.metrics import Metrics
from gateway.server import Gateway
from gateway.server import running as gateway_running
from outrider.process import rpc
from outrider.tokenizer import load_tokenizer
from outrider.v1 import common_pb2, generation_pb2_grpc
from outrider.v1.generation_pb2 import GenerateTextRequest, TokenPrompt

TOKENIZER = load_tokenizer(TARGET)
# Several chunks of 64 tokens, with characters that take several tokens.
TEXT = "# naïve 日本語 😀\n" + (ROOT / "outrider/errors.py").read_text()[:900]
IDS: list[int] = TOKENIZER.encode(TEXT).ids
TOP = 3


# Starts a stack of its own; tests/gateway covers the same with a scripted verifier.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    made = Stack("--max-batch-tokens", "64")
    made.add_drafter("ngram-1", "ngram")
    with running(made):
        yield made


@pytest_asyncio.fixture
async def gateway(stack: Stack) -> AsyncIterator[Gateway]:
    settings = GatewaySettings(
        verifier=[stack.address], tokenizer=TARGET, http_port=0, grpc_listen="127.0.0.1:0"
    )
    async with gateway_running(settings, Metrics()) as made:
        async with asyncio.timeout(10):
            # The router has no event for its polls of the verifier.
            while not made.router.ready:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield made


@pytest_asyncio.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.http_url}/v1", api_key="any", max_retries=0
    ) as made:
        yield made


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)


def rescored(target: Any, ids: list[int]) -> torch.Tensor:
    """Log probabilities [T - 1, V] of the token after each but the last."""
    with torch.inference_mode():
        logits: torch.Tensor = target(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1)


def check(target: Any, scores: Any, ids: list[int]) -> None:
    """`scores` holds OpenAI's logprobs of the tokens `ids`; the first token has none."""
    expected = rescored(target, ids)
    own = expected.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
    assert scores.tokens == [TOKENIZER.decode([token], skip_special_tokens=False) for token in ids]
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[1:] == pytest.approx(own.tolist(), abs=1e-4)
    assert scores.top_logprobs[0] is None
    best = [max(top.values()) for top in scores.top_logprobs[1:]]
    assert best == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)


async def test_the_openai_client_reads_log_probabilities_of_an_echo(
    client: openai.AsyncOpenAI, target: Any
) -> None:
    settings: Any = {
        "model": TARGET,
        "max_tokens": 6,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    plain = await client.completions.create(prompt=TEXT, **settings)
    again = await client.completions.create(prompt=TEXT, **settings)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens or 0
    assert cached > len(IDS) // 2, "the prefix cache should have the prompt by now"
    generated = TOKENIZER.encode(plain.choices[0].text).ids
    for prompt in (TEXT, IDS):
        scored = await client.completions.create(
            prompt=prompt, echo=True, logprobs=TOP, n=2, **settings
        )
        for choice in scored.choices:
            check(target, choice.logprobs, [*IDS, *generated])
            assert choice.text == TEXT + plain.choices[0].text
        only = await client.completions.create(
            prompt=prompt, echo=True, logprobs=TOP, **settings | {"max_tokens": 0}
        )
        check(target, only.choices[0].logprobs, IDS)


async def test_a_streamed_echo_has_the_same_log_probabilities(
    client: openai.AsyncOpenAI, target: Any
) -> None:
    settings: Any = {
        "model": TARGET,
        "max_tokens": 2,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = await client.completions.create(prompt=TEXT, echo=True, logprobs=TOP, **settings)
    scores: dict[str, list[Any]] = {}
    async for chunk in await client.completions.create(
        prompt=TEXT, echo=True, logprobs=TOP, stream=True, **settings
    ):
        if chunk.choices[0].logprobs is not None:
            for name, values in chunk.choices[0].logprobs.model_dump().items():
                scores.setdefault(name, []).extend(values)
    assert whole.choices[0].logprobs is not None
    expected = whole.choices[0].logprobs.model_dump()
    assert (scores["tokens"], scores["text_offset"]) == (
        expected["tokens"],
        expected["text_offset"],
    )
    assert scores["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=1e-4)


def lm_eval_score(answer: Any, context_length: int) -> tuple[float, bool]:
    """Read an answer as lm-evaluation-harness does, for `max_tokens: 1, logprobs: 1, echo: true`.

    Returns the sum of the log probabilities of the continuation, without the context and the last
    token, and whether the continuation is greedy.
    """
    logprobs = answer.choices[0].logprobs
    own = logprobs.token_logprobs[context_length:-1]
    top = logprobs.top_logprobs[context_length:-1]
    is_greedy = all(value == max(likely.values()) for value, likely in zip(own, top, strict=True))
    return sum(own), is_greedy


async def test_lm_eval_harness_gets_its_scores_even_before_a_stop_token(
    client: openai.AsyncOpenAI, target: Any
) -> None:
    settings: Any = {
        "model": TARGET,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
    }
    continued = await client.completions.create(
        model=TARGET, prompt=TEXT, max_tokens=4, temperature=0
    )
    greedy = TOKENIZER.encode(continued.choices[0].text).ids
    for continuation, is_greedy in ((greedy, True), ([*greedy[:-1], 7], False)):
        ids = [*IDS, *continuation]
        own = rescored(target, ids)[len(IDS) - 1 :]
        score = own.gather(-1, torch.tensor(continuation).unsqueeze(-1)).sum().item()
        next_token = int(target(torch.tensor([ids])).logits[0, -1].argmax())
        # In the second case the next token ends the text.
        for stop in ({}, {"stop_token_ids": [next_token]}):
            answer = await client.completions.create(prompt=[ids], extra_body=stop, **settings)
            expected = (pytest.approx(score, abs=1e-3), is_greedy)
            assert lm_eval_score(answer, len(IDS)) == expected


async def test_vllms_prompt_logprobs_name_each_token_with_its_rank(
    client: openai.AsyncOpenAI, target: Any
) -> None:
    extra = {"prompt_logprobs": TOP}
    chat = await client.chat.completions.create(
        model=TARGET, messages=[{"role": "user", "content": TEXT}], max_tokens=1, extra_body=extra
    )
    first, *scores = (chat.model_extra or {})["prompt_logprobs"]
    ids = TOKENIZER.encode(f"<|user|>{TEXT}<|end|><|assistant|>").ids
    expected = rescored(target, ids)
    assert first is None
    assert len(scores) == len(expected)
    for token, row, entry in zip(ids[1:], expected, scores, strict=True):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(row[token].item(), abs=1e-4)
        rank = 1 + int((row > row[token]).sum())
        ties = int(((row - row[token]).abs() < 1e-4).sum()) - 1
        assert abs(own["rank"] - rank) <= ties
        assert own["decoded_token"] == TOKENIZER.decode([token], skip_special_tokens=False)
        assert len(entry) in (TOP, TOP + 1)


async def test_grpc_has_the_same_prompt_log_probabilities(gateway: Gateway, target: Any) -> None:
    settings: Any = {
        "max_tokens": 0,
        "prompt_logprob_count": TOP,
        "sampling": common_pb2.SamplingParams(temperature=0),
    }
    expected = rescored(target, IDS).gather(-1, torch.tensor(IDS[1:]).unsqueeze(-1)).squeeze(-1)
    async with rpc.dial(gateway.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for source in ({"prompt": TEXT}, {"tokens": TokenPrompt(token_ids=IDS)}):
            call = stub.GenerateText(GenerateTextRequest(**source, **settings))
            responses = [response async for response in call]
            found = [logprob for response in responses for logprob in response.prompt_logprobs]
            scores = [logprob.logprob for logprob in found]
            assert scores == pytest.approx(expected.tolist(), abs=1e-4)
            assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
