"""The runner's logits equal those of `transformers`.

The texts are cut, packed, rewound and shared in any way.
"""

import random
from typing import Any

import pytest
import torch

from outrider.lm.pages import KVSequence, PagePool
from outrider.lm.runner import ModelRunner, SequenceSlice
from tests.lm.tiny_models import CONFIGS, VOCAB_SIZE, build

PAGE_SIZE = 8
PAGE_COUNT = 60


class Text:
    """A text that a runner computes slice by slice."""

    def __init__(self, pool: PagePool, token_ids: list[int]) -> None:
        self.pool = pool
        self.token_ids = token_ids
        self.kv = KVSequence()

    def next_slice(self, count: int, logit_count: int | None = None) -> SequenceSlice:
        start = self.kv.num_computed_tokens
        tokens = self.token_ids[start : start + count]
        assert self.pool.reserve(self.kv, start + len(tokens))
        self.kv.num_computed_tokens += len(tokens)
        if logit_count is None:
            logit_count = len(tokens)
        return SequenceSlice(tokens, start, list(self.kv.pages), logit_count)


class Pair:
    """A model as `transformers` runs it, and as the runner does."""

    def __init__(self, name: str) -> None:
        self.reference = build(CONFIGS[name])
        self.runner = ModelRunner(build(CONFIGS[name]), page_size=PAGE_SIZE, page_count=PAGE_COUNT)
        self.pool = PagePool(PAGE_COUNT, PAGE_SIZE)

    def text(self, length: int, seed: int) -> Text:
        return Text(self.pool, random.Random(seed).choices(range(3, VOCAB_SIZE), k=length))

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            output = self.reference(torch.tensor([token_ids]), use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits

    def check(self, logits_RV: torch.Tensor, expected_RV: torch.Tensor) -> None:
        assert logits_RV.dtype == torch.float32
        torch.testing.assert_close(logits_RV, expected_RV, atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=CONFIGS)
def shared_pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    """Give the pair an empty pool with scattered pages, as after long use.

    Pages keep what earlier tests wrote to them, as they do in service.
    """
    shared_pair.pool = PagePool(PAGE_COUNT, PAGE_SIZE)
    random.Random(0).shuffle(shared_pair.pool._blank)
    return shared_pair


def test_the_models_logits_depend_on_their_context(pair: Pair) -> None:
    text = pair.text(40, seed=1).token_ids
    other = [*text[:-3], text[-3] - 1, *text[-2:]]
    assert (pair.expected(text)[-1] - pair.expected(other)[-1]).abs().max() > 1e-2


def test_prefill_decoding_and_verification_may_interleave(pair: Pair) -> None:
    draw = random.Random(7)
    texts = [pair.text(draw.randint(20, 80), seed=seed) for seed in range(6)]
    expected = [pair.expected(text.token_ids) for text in texts]

    def unread() -> list[int]:
        return [
            i for i, text in enumerate(texts) if text.kv.num_computed_tokens < len(text.token_ids)
        ]

    while remaining := unread():
        chosen = draw.sample(remaining, draw.randint(1, len(remaining)))
        starts = [texts[i].kv.num_computed_tokens for i in chosen]
        slices = [texts[i].next_slice(draw.choice([1, 1, 4, 5, 40])) for i in chosen]
        rows = [
            expected[i][start : start + len(s.token_ids)]
            for i, start, s in zip(chosen, starts, slices, strict=True)
        ]
        pair.check(pair.runner.forward(slices), torch.cat(rows))


def test_logits_come_only_for_the_requested_tokens_in_slice_order(pair: Pair) -> None:
    texts = [pair.text(30, seed=seed) for seed in range(3)]
    counts = (1, 0, 4)
    slices = [text.next_slice(30, count) for text, count in zip(texts, counts, strict=True)]
    logits = pair.runner.forward(slices)
    assert logits.shape == (5, pair.runner.vocab_size)
    first = pair.expected(texts[0].token_ids)[-1:]
    last = pair.expected(texts[2].token_ids)[-4:]
    pair.check(logits, torch.cat([first, last]))


def test_a_rewound_text_continues_as_if_its_end_had_never_been(pair: Pair) -> None:
    text = pair.text(50, seed=4)
    pair.runner.forward([text.next_slice(50, 0)])
    pair.pool.truncate(text.kv, 37)
    text.token_ids = text.token_ids[:37] + pair.text(20, seed=5).token_ids
    pair.check(pair.runner.forward([text.next_slice(20)]), pair.expected(text.token_ids)[37:])


def test_a_text_on_a_shared_prefix_continues_as_if_alone(pair: Pair) -> None:
    first = pair.text(50, seed=6)
    pair.runner.forward([first.next_slice(50, 0)])
    pair.pool.cache_pages(first.kv, first.token_ids, "tenant")
    second = Text(pair.pool, first.token_ids[:44] + pair.text(9, seed=8).token_ids)
    assert pair.pool.match_prefix(second.kv, second.token_ids, "tenant") == 40
    first.token_ids += pair.text(9, seed=9).token_ids
    logits = pair.runner.forward([second.next_slice(30), first.next_slice(30)])
    expected_second = pair.expected(second.token_ids)[40:]
    expected_first = pair.expected(first.token_ids)[50:]
    pair.check(logits, torch.cat([expected_second, expected_first]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_full_precision(dtype: torch.dtype) -> None:
    model: Any = build(CONFIGS["qwen3"])
    reference = build(CONFIGS["qwen3"])
    with torch.no_grad():
        for module in (model, reference):
            for parameter in module.parameters():
                parameter.copy_(parameter.to(dtype))
    runner = ModelRunner(model.to(dtype), page_size=PAGE_SIZE, page_count=PAGE_COUNT)
    text = random.Random(1).choices(range(VOCAB_SIZE), k=60)
    pages = list(range(PAGE_COUNT))
    runner.forward([SequenceSlice(text[:55], 0, pages, 0)])
    logits = runner.forward([SequenceSlice(text[55:], 55, pages, 5)])
    expected = reference(torch.tensor([text])).logits[0, 55:]
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
