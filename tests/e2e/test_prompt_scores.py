"""Log probabilities of a prompt over HTTP equal those that transformers' forward gives."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import torch
from stack import ROOT, TARGET, GatewayProcess, Stack
from transformers import AutoModelForCausalLM

from outrider.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(TARGET)
# With characters that take several tokens.
TEXT = "# naïve 日本語 😀\n" + (ROOT / "outrider/errors.py").read_text()[:900]
IDS: list[int] = TOKENIZER.encode(TEXT).ids


def check(target: Any, scores: Any, ids: list[int]) -> None:
    """`scores` holds OpenAI's logprobs of the tokens `ids`; the first token has none."""
    with torch.inference_mode():
        expected = target(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    own = expected.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
    assert scores.tokens == [TOKENIZER.decode([token], skip_special_tokens=False) for token in ids]
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[1:] == pytest.approx(own.tolist(), abs=1e-4)
    assert scores.top_logprobs[0] is None
    best = [max(top.values()) for top in scores.top_logprobs[1:]]
    assert best == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)


async def ask(client: openai.AsyncOpenAI, target: Any) -> None:
    settings: Any = {"model": TARGET, "temperature": 0, "extra_body": {"ignore_eos": True}}
    plain = await client.completions.create(prompt=TEXT, max_tokens=6, **settings)
    again = await client.completions.create(prompt=TEXT, max_tokens=6, **settings)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens or 0
    assert cached > len(IDS) // 2, "the prefix cache should have the prompt by now"
    generated = TOKENIZER.encode(plain.choices[0].text).ids
    settings |= {"echo": True, "logprobs": 3}
    for prompt in (TEXT, IDS):
        scored = await client.completions.create(prompt=prompt, max_tokens=6, n=2, **settings)
        for choice in scored.choices:
            check(target, choice.logprobs, [*IDS, *generated])
            assert choice.text == TEXT + plain.choices[0].text
        only = await client.completions.create(prompt=prompt, max_tokens=0, **settings)
        check(target, only.choices[0].logprobs, IDS)


@pytest.mark.slow  # tests/losslessness and tests/gateway each cover a half of it.
async def test_the_openai_client_reads_log_probabilities_of_an_echo(stack: Stack) -> None:
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    gateway = GatewayProcess(stack.address)
    try:
        await asyncio.to_thread(gateway.wait_ready)
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any") as client:
            await ask(client, target)
    finally:
        await asyncio.to_thread(gateway.close)
