"""Greedy output in float32 equals transformers' `generate`, token for token, with any drafter."""

import asyncio
from functools import cached_property

import pytest

from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from tests.smollm2_texts import Reference as Texts
from tests.smollm2_texts import answers, tokens_of
from tests.stack import TARGET, Client, Stack, prompt_texts

TOKENS = 64
GREEDY = SamplingParams(temperature=0.0)
CONFIGURATIONS = {
    "no drafter": SpeculationOptions(enabled=False),
    "ngram": SpeculationOptions(drafter_id="ngram-1", always_draft=True),
    "model": SpeculationOptions(drafter_id="model-1", always_draft=True),
    "all at once": SpeculationOptions(always_draft=True),
}


class Reference(Texts):
    """The bundled target in transformers, and the prompts of the benchmark."""

    def __init__(self) -> None:
        super().__init__(TARGET, length=TOKENS)

    @cached_property
    def prompts(self) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(prompt_texts())]

    def generate(self, index: int) -> list[int]:
        """Return the new tokens that `generate` writes after a prompt."""
        return self.written(index)

    @property
    def _ends(self) -> set[int]:
        return self.ends


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def request(prompt: list[int], options: SpeculationOptions) -> TokenRequest:
    return TokenRequest(prompt, TOKENS, GREEDY, speculation=options)


def test_the_reference_accepts_exactly_the_texts_of_generate(reference: Reference) -> None:
    for index in (0, 24):
        text = tuple(reference.generate(index))
        reference.logprobs(index, text)
        for wrong in (text[:-1], (*text[:5], text[5] ^ 1, *text[6:]), (*text, 5)):
            with pytest.raises(AssertionError, match=f"{index}"):
                reference.logprobs(index, wrong)


async def test_greedy_texts_equal_generate_with_eight_requests_at_once(
    stack: Stack, reference: Reference
) -> None:
    indices = range(0, 40, 2)
    asked = [request(reference.prompts[i], CONFIGURATIONS["all at once"]) for i in indices]
    async with Client(stack.address) as client:
        found = await answers(client, asked)
    for index, chunks in zip(indices, found, strict=True):
        reference.logprobs(index, tuple(tokens_of(chunks)))


async def test_greedy_texts_equal_generate_with_all_drafters_in_one_batch(
    stack: Stack, reference: Reference
) -> None:
    options = list(CONFIGURATIONS.values())
    async with Client(stack.address) as client:
        requests = [request(reference.prompts[index], options[index % 4]) for index in range(16)]
        texts = await asyncio.gather(*(client.tokens(one) for one in requests))
    for index, tokens in enumerate(texts):
        reference.logprobs(index, tuple(tokens))
