"""A prompt's log probabilities, from the target to OpenAI's client and over gRPC, are those of a forward of transformers."""

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
# Several chunks of 64 tokens, and characters of several tokens among them.
TEXT = "# naïve 日本語 😀\n" + (ROOT / "outrider/errors.py").read_text()[:900]
IDS: list[int] = TOKENIZER.encode(TEXT).ids
TOP = 3


# A stack of its own, for what tests/gateway has with a verifier that is scripted.
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
            while not made.router.ready:  # noqa: ASYNC110  # a poll of the verifier has no event to wait for
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
    """Log probabilities [T - 1, V] of the token behind each but the last."""
    with torch.inference_mode():
        logits: torch.Tensor = target(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1)


def check(target: Any, told: Any, ids: list[int]) -> None:
    """`told` is OpenAI's logprobs of the tokens `ids`, the first of which has none."""
    expected = rescored(target, ids)
    own = expected.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
    assert told.tokens == [TOKENIZER.decode([token], skip_special_tokens=False) for token in ids]
    assert told.token_logprobs[0] is None
    assert told.token_logprobs[1:] == pytest.approx(own.tolist(), abs=1e-4)
    assert told.top_logprobs[0] is None
    best = [max(top.values()) for top in told.top_logprobs[1:]]
    assert best == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)


async def test_the_openai_client_reads_an_echos_log_probabilities(
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
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > len(IDS) // 2, (
        "the prefix cache should have the prompt by now"
    )
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


async def test_a_streamed_echo_tells_the_same(client: openai.AsyncOpenAI, target: Any) -> None:
    settings: Any = {
        "model": TARGET,
        "max_tokens": 2,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = await client.completions.create(prompt=TEXT, echo=True, logprobs=TOP, **settings)
    told: dict[str, list[Any]] = {}
    async for chunk in await client.completions.create(
        prompt=TEXT, echo=True, logprobs=TOP, stream=True, **settings
    ):
        if chunk.choices[0].logprobs is not None:
            for name, values in chunk.choices[0].logprobs.model_dump().items():
                told.setdefault(name, []).extend(values)
    assert whole.choices[0].logprobs is not None
    expected = whole.choices[0].logprobs.model_dump()
    assert (told["tokens"], told["text_offset"]) == (expected["tokens"], expected["text_offset"])
    assert told["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=1e-4)


def lm_eval_score(answer: Any, context_length: int) -> tuple[float, bool]:
    """How lm-evaluation-harness reads the answer to `max_tokens: 1, logprobs: 1, echo: true`: all but the context and the end."""
    logprobs = answer.choices[0].logprobs
    own, top = logprobs.token_logprobs[context_length:-1], logprobs.top_logprobs[context_length:-1]
    return sum(own), all(
        value == max(likely.values()) for value, likely in zip(own, top, strict=True)
    )


async def test_lm_eval_harness_gets_its_scores_even_if_the_text_would_end(
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
        own = rescored(target, ids)[len(IDS) - 1 :].gather(
            -1, torch.tensor(continuation).unsqueeze(-1)
        )
        # Whatever comes next ends the text.
        for stop in (
            {},
            {"stop_token_ids": [int(target(torch.tensor([ids])).logits[0, -1].argmax())]},
        ):
            answer = await client.completions.create(prompt=[ids], extra_body=stop, **settings)
            assert lm_eval_score(answer, len(IDS)) == (
                pytest.approx(own.sum().item(), abs=1e-3),
                is_greedy,
            )


async def test_vllms_prompt_logprobs_name_each_token_with_its_rank(
    client: openai.AsyncOpenAI, target: Any
) -> None:
    extra = {"prompt_logprobs": TOP}
    chat = await client.chat.completions.create(
        model=TARGET, messages=[{"role": "user", "content": TEXT}], max_tokens=1, extra_body=extra
    )
    first, *told = (chat.model_extra or {})["prompt_logprobs"]
    ids = TOKENIZER.encode(f"<|user|>{TEXT}<|end|><|assistant|>").ids
    expected = rescored(target, ids)
    assert first is None
    assert len(told) == len(expected)
    for token, row, entry in zip(ids[1:], expected, told, strict=True):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(row[token].item(), abs=1e-4)
        assert (
            abs(own["rank"] - 1 - int((row > row[token]).sum()))
            <= int(((row - row[token]).abs() < 1e-4).sum()) - 1
        )
        assert own["decoded_token"] == TOKENIZER.decode([token], skip_special_tokens=False)
        assert len(entry) in (TOP, TOP + 1)


async def test_grpc_tells_the_same(gateway: Gateway, target: Any) -> None:
    settings: Any = {
        "max_tokens": 0,
        "prompt_logprob_count": TOP,
        "sampling": common_pb2.SamplingParams(temperature=0),
    }
    expected = rescored(target, IDS).gather(-1, torch.tensor(IDS[1:]).unsqueeze(-1)).squeeze(-1)
    async with rpc.dial(gateway.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for source in ({"prompt": TEXT}, {"tokens": TokenPrompt(token_ids=IDS)}):
            responses = [
                r async for r in stub.GenerateText(GenerateTextRequest(**source, **settings))
            ]
            told = [
                logprob.logprob for response in responses for logprob in response.prompt_logprobs
            ]
            assert told == pytest.approx(expected.tolist(), abs=1e-4)
            assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
