"""In float32 SmolLM2 writes the same texts as in transformers, with any drafter, in six languages.

OUTRIDER_SMOLLM2_TEXTS is the number of texts: bench/results/2026-11-29-smollm2-exact has 200.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.protocol.messages import (
    SamplingParams,
    SpeculationOptions,
    TokenChunk,
    TokenRequest,
)
from tests.smollm2_texts import TOKENS, Reference, answers, is_chat, smollm2, tokens_of
from tests.stack import ROOT, Client, Stack, running

pytestmark = pytest.mark.slow  # A model of 135 million parameters in float32.

GREEDY = SamplingParams(temperature=0.0)
PLAIN = SpeculationOptions(enabled=False)
HAS_SUFFIX = find_spec("arctic_inference") is not None
FAMILIES = {
    "ngram": "ngram",
    **({"suffix": "suffix"} if HAS_SUFFIX else {}),
    "grammar": "grammar",
    "draft model": "model",
    "another vocabulary": "model",
    "eagle3": "head",
    "mtp": "head",
}
WAYS = {
    "no drafter": PLAIN,
    **{name: SpeculationOptions(drafter_id=name, always_draft=True) for name in FAMILIES},
    "all at once": SpeculationOptions(always_draft=True),
}
FREE = {name: options for name, options in WAYS.items() if name != "grammar"}
"""The decoding modes for requests without a grammar."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"topic": {"type": "string", "maxLength": 20}, "ok": {"type": "boolean"}},
    "required": ["topic", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(smollm2())


@pytest.fixture(scope="module")
def stack(reference: Reference) -> Iterator[Stack]:
    """Yield the model with each of its drafters."""
    stack = Stack("--max-sequences", "8", target=reference.file)
    target = ["--target", reference.file]
    options = {
        "grammar": target,
        "draft model": ["--model", str(ROOT / "models/smollm2/draft")],
        "another vocabulary": ["--model", str(ROOT / "models/draft-2048"), *target],
        "eagle3": ["--head", str(ROOT / "models/smollm2/eagle3"), *target],
        "mtp": ["--head", str(ROOT / "models/smollm2/mtp"), *target],
    }
    for name, family in FAMILIES.items():
        stack.add_drafter(name, family, *options.get(name, []))
    with running(stack):
        yield stack


def forwards(found: list[list[TokenChunk]]) -> int:
    return sum(chunks[-1].stats.forward_count for chunks in found if chunks[-1].stats is not None)


def drafted(found: list[list[TokenChunk]]) -> int:
    return sum(chunk.draft_token_count for chunks in found for chunk in chunks)


async def answers_of_each_way(
    stack: Stack, requests: list[TokenRequest], ways: dict[str, SpeculationOptions]
) -> AsyncIterator[tuple[str, list[list[TokenChunk]]]]:
    """Yield the answers to the same requests in each decoding mode; plain answers come first."""
    for way, options in ways.items():
        async with Client(stack.address) as client:
            yield (
                way,
                await answers(client, [replace(each, speculation=options) for each in requests]),
            )


async def test_greedy_texts_and_log_probabilities_are_those_of_transformers(
    stack: Stack, reference: Reference
) -> None:
    requests = [
        TokenRequest(prompt, TOKENS, GREEDY, top_logprobs=0) for prompt in reference.prompts
    ]
    plain: list[list[int]] = []
    async for way, found in answers_of_each_way(stack, requests, FREE):
        errors = [reference.check(index, chunks) for index, chunks in enumerate(found)]
        texts = list(map(tokens_of, found))
        plain = plain or texts
        assert texts == plain, way
        assert (drafted(found) > 0) is (way != "no drafter"), way
        print(
            f"{way}: {len(texts)} texts of {sum(map(len, texts))} tokens, {drafted(found)} drafted,"
            f" {forwards(found)} forwards, log probabilities within {max(errors):.1e}"
        )


async def test_a_seed_gives_the_same_text_with_every_drafter(
    stack: Stack, reference: Reference
) -> None:
    requests = [
        TokenRequest(prompt, TOKENS, SamplingParams(0.8, seed=i))
        for i, prompt in enumerate(reference.prompts)
    ]
    plain: list[list[int]] = []
    async for way, found in answers_of_each_way(stack, requests, FREE):
        texts = list(map(tokens_of, found))
        plain = plain or texts
        assert texts == plain, way
        print(f"{way}: {len(texts)} texts, {drafted(found)} drafted, {forwards(found)} forwards")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_json_by_a_schema_is_the_same_with_every_drafter(
    stack: Stack, reference: Reference, temperature: float
) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    requests = [
        TokenRequest(prompt, 64, SamplingParams(temperature, seed=i), grammar=grammar)
        for i, prompt in enumerate(reference.prompts)
        if is_chat(i)
    ]
    plain: list[list[int]] = []
    async for way, found in answers_of_each_way(stack, requests, WAYS):
        texts = list(map(tokens_of, found))
        plain = plain or texts
        assert texts == plain, way
        if way in ("grammar", "all at once"):
            assert drafted(found) > len(texts)
        print(f"{way}: {len(texts)} texts, {drafted(found)} drafted, {forwards(found)} forwards")
    for tokens in plain:
        value = json.loads(reference.tokenizer.decode(tokens))
        assert set(value) == set(SCHEMA["required"])
