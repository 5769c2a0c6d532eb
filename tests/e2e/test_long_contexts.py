"""SmolLM2 with all 8,192 tokens of its context: texts, drafts, the prefix cache and the limit.

The first request reads a prompt of 8,100 tokens, for a minute or more. The next requests find
most of that prompt in the prefix cache.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from outrider.protocol.messages import (
    FinishReason,
    SamplingParams,
    SpeculationOptions,
    TokenChunk,
    TokenRequest,
)
from outrider.protocol.wire import requests as wire_requests
from tests.smollm2_texts import TIE, Reference, smollm2, tokens_of
from tests.stack import Client, Stack, running

pytestmark = pytest.mark.slow  # A prompt of 8,100 tokens in float32.

CONTEXT = 8192
PROMPT = 8100
ANSWER = 24
PAGE = 16
PLAIN = SpeculationOptions(enabled=False)
DRAFTED = SpeculationOptions(drafter_id="ngram", always_draft=True)
TIMEOUT_S = 900.0


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(smollm2())


@pytest.fixture(scope="module")
def stack(reference: Reference) -> Iterator[Stack]:
    stack = Stack(target=reference.file)
    stack.add_drafter("ngram", "ngram")
    with running(stack):
        yield stack


@pytest.fixture(scope="module")
def prompt(reference: Reference) -> list[int]:
    """Return the sources of some modules of Python, cut in the middle of a line."""
    sources = map(inspect.getsource, (textwrap, json, argparse))
    ids: list[int] = reference.tokenizer.encode("\n".join(sources)).ids
    return ids[:PROMPT]


async def ask(
    stack: Stack, prompt: list[int], options: SpeculationOptions, max_tokens: int = ANSWER
) -> list[TokenChunk]:
    """Return all chunks of a greedy answer of exactly `max_tokens` tokens."""
    sampling = SamplingParams(temperature=0.0)
    request = TokenRequest(prompt, max_tokens, sampling, speculation=options, ignore_eos=True)
    async with Client(stack.address) as client:
        proto = wire_requests.request_to_proto(request)
        call = client.stub.GenerateTokens(proto, timeout=TIMEOUT_S)
        chunks = [wire_requests.chunk_from_proto(response) async for response in call]
    assert len(tokens_of(chunks)) == max_tokens
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    return chunks


def cached(chunks: list[TokenChunk]) -> int:
    return max(chunk.cached_token_count for chunk in chunks)


def whole_pages(tokens: int) -> int:
    return tokens // PAGE * PAGE


def resident_bytes(stack: Stack) -> int:
    """Return the resident memory of the verifier's process."""
    status = Path(f"/proc/{stack.verifier.popen.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.timeout(1800)
async def test_the_cache_has_the_memory_that_the_start_says(
    stack: Stack, reference: Reference, prompt: list[int]
) -> None:
    said = re.search(
        r"the KV cache holds (\d+) tokens in ([\d.]+) GiB; a request has at most (\d+)\n",
        stack.verifier.output(),
    )
    assert said is not None
    held, gib, most = int(said[1]), float(said[2]), int(said[3])
    config = reference.model.config
    # Keys and values in float32.
    size = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    token_bytes = 2 * config.num_hidden_layers * size * 4
    assert most == CONTEXT <= held
    assert gib == pytest.approx(held * token_bytes / 2**30, rel=0.01)
    before = resident_bytes(stack)
    await ask(stack, prompt, PLAIN)
    # A page takes memory when it is first written. A chunk of 512 tokens takes further memory.
    assert resident_bytes(stack) - before < PROMPT * token_bytes + 150 * 2**20


@pytest.mark.timeout(1800)
async def test_an_answer_behind_8100_tokens_is_that_of_transformers(
    stack: Stack, reference: Reference, prompt: list[int]
) -> None:
    tokens = tokens_of(await ask(stack, prompt, PLAIN))
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        logits = reference.model(ids, logits_to_keep=ANSWER).logits[0]
    own = logits.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
    assert float((logits.amax(-1) - own).max()) < TIE


@pytest.mark.timeout(1800)
async def test_drafts_change_no_text_up_to_the_end_of_the_context(
    stack: Stack, prompt: list[int]
) -> None:
    """The drafts of the last steps reach the limit, and no token of the context is left out."""
    rest = CONTEXT - PROMPT
    plain = await ask(stack, prompt, PLAIN, rest)
    drafted = await ask(stack, prompt, DRAFTED, rest)
    assert tokens_of(drafted) == tokens_of(plain)
    assert cached(drafted) == whole_pages(PROMPT - 1)
    assert sum(chunk.draft_token_count for chunk in drafted) > rest / 2
    stats = drafted[-1].stats
    assert stats is not None
    assert stats.accepted_token_count > 0


@pytest.mark.timeout(1800)
async def test_a_second_turn_computes_only_the_last_page_again(
    stack: Stack, prompt: list[int]
) -> None:
    first = [*prompt, *tokens_of(await ask(stack, prompt, DRAFTED))]
    second = await ask(stack, [*first, *prompt[:30]], PLAIN, 2)
    # No forward has read the first turn's last token.
    assert cached(second) == whole_pages(len(first) - 1)


async def test_a_prompt_and_answer_beyond_the_context_are_refused(
    stack: Stack, prompt: list[int]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stack, prompt, PLAIN, CONTEXT - PROMPT + 1)
    assert caught.value.details() == (
        "max_tokens: the prompt has 8100 tokens and max_tokens asks for 93 more, but the model's "
        "context holds 8192"
    )
