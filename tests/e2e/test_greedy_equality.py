"""Greedy output in float32 equals transformers' `generate`, token for token, with any drafter."""

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from tests.stack import TARGET, Client, Stack, prompt_texts

TOKENS = 64
TIE = 1e-4
GREEDY = SamplingParams(temperature=0.0)
CONFIGURATIONS = {
    "no drafter": SpeculationOptions(enabled=False),
    "ngram": SpeculationOptions(drafter_id="ngram-1", always_draft=True),
    "model": SpeculationOptions(drafter_id="model-1", always_draft=True),
    "all at once": SpeculationOptions(always_draft=True),
}


class Reference:
    """The prompts, and the texts that transformers' `generate` writes for them.

    Greedy `generate` writes a text if each token is the likeliest after the tokens before it. One
    forward over the text checks this.
    """

    def __init__(self) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            TARGET, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(TARGET).backend_tokenizer
        self.prompts = [encoding.ids for encoding in tokenizer.encode_batch(prompt_texts())]
        ends = self.model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._right: set[tuple[int, ...]] = set()

    def generate(self, index: int) -> list[int]:
        """Return the new tokens that `generate` writes after a prompt."""
        prompt = self.prompts[index]
        ids = torch.tensor([prompt])
        generate: Any = self.model.generate
        out = generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
        return out[0, len(prompt) :].tolist()

    def check(self, index: int, tokens: list[int]) -> None:
        """Assert that each token is the likeliest, or within `TIE` of it in logits.

        The text must have `TOKENS` tokens or end with the first end-of-text token.
        """
        prompt = self.prompts[index]
        if (index, *tokens) in self._right:
            return
        is_complete = len(tokens) == TOKENS or tokens[-1] in self._ends
        assert is_complete, f"prompt {index} ends after {len(tokens)} tokens: {tokens}"
        assert not self._ends & set(tokens[:-1]), f"prompt {index} goes on after its end: {tokens}"
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        own = logits.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
        wrong = (logits.amax(-1) - own > TIE).nonzero().flatten().tolist()
        if wrong:
            likeliest = logits[wrong[0]].argmax()
            raise AssertionError(
                f"prompt {index}: token {wrong[0]} is {tokens[wrong[0]]}, not {likeliest}"
            )
        self._right.add((index, *tokens))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def request(prompt: list[int], options: SpeculationOptions) -> TokenRequest:
    return TokenRequest(prompt, TOKENS, GREEDY, speculation=options)


def test_the_reference_accepts_exactly_the_texts_of_generate(reference: Reference) -> None:
    for index in (0, 24):
        text = reference.generate(index)
        reference.check(index, text)
        for wrong in (text[:-1], [*text[:5], text[5] ^ 1, *text[6:]], [*text, 5]):
            with pytest.raises(AssertionError, match=f"prompt {index}"):
                reference.check(index, wrong)


async def test_greedy_texts_equal_generate_with_eight_requests_at_once(
    stack: Stack, reference: Reference
) -> None:
    places = asyncio.Semaphore(8)

    async def one(client: Client, index: int) -> None:
        async with places:
            asked = request(reference.prompts[index], CONFIGURATIONS["all at once"])
            reference.check(index, await client.tokens(asked))

    async with Client(stack.address) as client:
        await asyncio.gather(*(one(client, index) for index in range(0, 40, 2)))


async def test_greedy_texts_equal_generate_with_all_drafters_in_one_batch(
    stack: Stack, reference: Reference
) -> None:
    options = list(CONFIGURATIONS.values())
    async with Client(stack.address) as client:
        requests = [request(reference.prompts[index], options[index % 4]) for index in range(16)]
        answers = await asyncio.gather(*(client.tokens(one) for one in requests))
    for index, tokens in enumerate(answers):
        reference.check(index, tokens)
