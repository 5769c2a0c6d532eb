"""Guided decoding with real processes: valid output with any drafter."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import grpc
import jsonschema
import pytest

from outrider.grammar.kinds import FreeThought, Grammar, GrammarKind
from outrider.process.network import rpc_errors
from outrider.protocol.messages import (
    FinishReason,
    SamplingParams,
    SpeculationOptions,
    TokenRequest,
)
from outrider.tokenizer import load_tokenizer
from outrider_bench.prompts import GRAMMARS, KINDS
from tests.shared.json_schemas import schemas
from tests.stack import TARGET, Client, Stack

TOKENIZER = load_tokenizer(TARGET)
PROMPT = TOKENIZER.encode("<|user|>Give an example as JSON.<|end|><|assistant|>").ids
DRAFTERS = {
    "none": SpeculationOptions(enabled=False),
    "ngram": SpeculationOptions(drafter_id="ngram-1", always_draft=True),
    "model": SpeculationOptions(drafter_id="model-1", always_draft=True),
    "grammar": SpeculationOptions(drafter_id="grammar-1", always_draft=True),
    "all": SpeculationOptions(always_draft=True),
}


def guided(
    value: Any, options: SpeculationOptions, seed: int = 0, temperature: float = 0.7
) -> TokenRequest:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))
    sampling = SamplingParams(temperature, seed=seed)
    return TokenRequest(
        PROMPT, 1500, sampling, speculation=options, grammar=grammar, min_chunk_tokens=1500
    )


async def check(stack: Stack, values: list[Any], options: SpeculationOptions) -> int:
    """Check that every answer is complete and valid; return the number of accepted draft tokens."""
    # If a busy machine compiled more than two grammars at once, some would be refused after 5 s in
    # the queue.
    places = asyncio.Semaphore(2)

    async def one(client: Client, i: int, value: Any) -> int:
        async with places:
            chunks = await client.generate(guided(value, options, i))
        text = TOKENIZER.decode([token for chunk in chunks for token in chunk.token_ids])
        assert chunks[-1].finish_reason is FinishReason.STOP, (value, text)
        jsonschema.validate(json.loads(text), value, format_checker=jsonschema.FormatChecker())
        assert chunks[-1].stats is not None
        return chunks[-1].stats.accepted_token_count

    async with Client(stack.address) as client:
        return sum(await asyncio.gather(*(one(client, i, value) for i, value in enumerate(values))))


# Here each sequence has drafts of every drafter at once.
async def test_a_dozen_schemas_give_valid_json_with_all_drafters(stack: Stack) -> None:
    assert await check(stack, schemas(12, seed=3), DRAFTERS["all"]) > 0


@pytest.mark.parametrize(
    ("kind", "temperature"), [("schema", 1.0), ("tools", 0.0), ("thought", 1.0)]
)
async def test_the_grammars_drafter_leaves_the_text_as_it_is_and_saves_forwards(
    stack: Stack, kind: str, temperature: float
) -> None:
    """Three kinds of texts, with seeds: JSON by a schema, calls of tools, JSON after a thought."""
    of_prompts = "schema" if kind == "thought" else kind
    found = GRAMMARS[of_prompts]
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(found.get("json")))
    if "structural_tag" in found:
        grammar = Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(found["structural_tag"]))
    if kind == "thought":
        # The first space of a text ends its thought.
        grammar = replace(grammar, thought=FreeThought("", " "))
    forwards = dict.fromkeys(("none", "grammar", "all"), 0)
    async with Client(stack.address) as client:
        for i, (_, prompt) in enumerate(KINDS[of_prompts][:2]):
            texts = set()
            for name in forwards:
                chunks = await client.generate(
                    TokenRequest(
                        TOKENIZER.encode(prompt).ids,
                        60,
                        SamplingParams(temperature, seed=i),
                        speculation=DRAFTERS[name],
                        grammar=grammar,
                    )
                )
                texts.add(tuple(token for chunk in chunks for token in chunk.token_ids))
                stats = chunks[-1].stats
                assert stats is not None
                forwards[name] += stats.forward_count
            assert len(texts) == 1
            text = TOKENIZER.decode(list(texts.pop()))
            assert kind != "thought" or text.partition(" ")[2].startswith("{")
    assert forwards["grammar"] < 0.9 * forwards["none"]
    assert forwards["all"] < 0.9 * forwards["none"]


async def test_a_grammar_whose_tokens_are_banned_is_an_error_of_that_request(
    stack: Stack,
) -> None:
    request = guided({"const": 7}, DRAFTERS["none"])
    banned = tuple(i for i in range(TOKENIZER.get_vocab_size()) if "7" in TOKENIZER.decode([i]))
    sampling = SamplingParams(banned_token_ids=banned)
    contradiction = TokenRequest(PROMPT, 20, sampling, grammar=request.grammar)
    async with Client(stack.address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.tokens(contradiction)
        assert rpc_errors.error_of(refused.value).field == "banned_token_ids"
        assert TOKENIZER.decode(await client.tokens(request)) == "7"
