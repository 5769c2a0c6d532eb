"""The C attention over paged caches equals plain attention over the same keys, in every build."""

import random

import pytest
import torch

from outrider.lm.cpu.attention import PagedAttention, PagedBatch
from outrider.lm.softmax import Softmax
from tests.lm.builds import BUILDS, use_build

PAGE_COUNT = 64
SCALE = 0.2
# Sinks below, among and far above the scores of the keys.
_SINKS = torch.tensor([-torch.inf, -30.0, -1.0, 0.0, 1.0, 2.0, 5.0, 100.0])
PLAIN = Softmax(SCALE)
WAYS = [
    PLAIN,
    *(Softmax(SCALE, window, chunked=chunked) for window in (1, 19) for chunked in (False, True)),
    *(Softmax(SCALE, window, sinks=_SINKS) for window in (None, 19)),
]


class Case:
    """Slices of some sequences whose earlier keys and values are scattered over a cache."""

    def __init__(
        self,
        dtype: torch.dtype,
        starts: list[int],
        lengths: list[int],
        *,
        heads: int = 8,
        kv_heads: int = 2,
        size: int = 64,
        page_size: int = 16,
    ) -> None:
        torch.manual_seed(0)
        self.starts = starts
        self.lengths = lengths
        self.group = heads // kv_heads
        free = random.Random(0).sample(range(PAGE_COUNT), PAGE_COUNT)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        self.pages = [[free.pop() for _ in range(-(-end // page_size))] for end in ends]
        self.keys, self.values = (
            torch.randn(PAGE_COUNT, page_size, kv_heads, size).to(dtype) for _ in range(2)
        )
        tokens = sum(lengths)
        # Models pass queries, keys and values as [1, heads, T, size], with the heads of a token
        # adjacent in memory.
        self.query = torch.randn(1, tokens, heads, size).to(dtype).transpose(1, 2)
        self.key, self.value = (
            torch.randn(1, tokens, kv_heads, size).to(dtype).transpose(1, 2) for _ in range(2)
        )
        self.slot_mapping = [
            pages[position // page_size] * page_size + position % page_size
            for pages, start, end in zip(self.pages, starts, ends, strict=True)
            for position in range(start, end)
        ]
        self.first_rows = [sum(lengths[:i]) for i in range(len(lengths))]

    def attend(self, softmax: Softmax = PLAIN) -> torch.Tensor:
        batch = PagedBatch(
            self.slot_mapping, self.first_rows, self.lengths, self.starts, self.pages
        )
        layer = PagedAttention(self.keys, self.values)
        return layer.attend(batch, self.query, self.key, self.value, softmax)

    def expected(self, softmax: Softmax = PLAIN) -> torch.Tensor:
        """Attend in float32, sequence by sequence. Call `attend` first: it fills the cache."""
        out = []
        for row, length, start, pages in zip(
            self.first_rows, self.lengths, self.starts, self.pages, strict=True
        ):
            end = start + length
            key, value = (
                cache[pages].flatten(0, 1)[:end].float().transpose(0, 1)
                for cache in (self.keys, self.values)
            )
            key = key.repeat_interleave(self.group, 0)
            value = value.repeat_interleave(self.group, 0)
            own, at = torch.arange(start, end)[:, None], torch.arange(end)
            window = softmax.window or end
            near = own // window == at // window if softmax.chunked else own - at < window
            seen = (own >= at) & near
            query = self.query[0, :, row : row + length].float()
            scores = (query @ key.transpose(1, 2) * SCALE).masked_fill(~seen, -torch.inf)
            if softmax.sinks is not None:
                sinks = softmax.sinks[:, None, None].expand(-1, length, 1)
                scores = torch.cat([scores, sinks], -1)
            out.append((scores.softmax(-1)[..., :end] @ value).transpose(0, 1))
        return torch.cat(out)


@pytest.fixture(params=BUILDS, autouse=True)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_build(request.param, monkeypatch)


SHAPES = {
    "decoding": ([0, 1, 15, 16, 17, 100], [1] * 6, {}),
    "more rows than one query block": ([7, 90], [32, 20], {}),
    "one head for all": ([30, 31], [2, 3], {"kv_heads": 1}),
    "as many key heads as query heads": ([30, 31], [2, 3], {"kv_heads": 8}),
    "small heads": ([30, 31], [2, 3], {"size": 16}),
    "large heads": ([30, 31], [2, 3], {"size": 256}),
    "pages smaller than a block": ([50, 11], [2, 7], {"page_size": 5}),
    "pages larger than a block": ([50, 11, 129], [2, 7, 1], {"page_size": 128}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
def test_its_output_equals_plain_attention(
    shape: str, dtype: torch.dtype, tolerance: float
) -> None:
    starts, lengths, options = SHAPES[shape]
    case = Case(dtype, starts, lengths, **options)
    for softmax in WAYS:
        out = case.attend(softmax)
        assert out.dtype == dtype
        expected = case.expected(softmax)
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def test_it_stores_keys_and_values_of_tokens_outside_the_slices() -> None:
    case = Case(torch.bfloat16, [20, 40], [3, 2])
    layer = PagedAttention(case.keys, case.values)
    batch = PagedBatch(case.slot_mapping, [], [], [], [])
    layer.attend(batch, case.query, case.key, case.value, PLAIN)
    for cache, new in ((case.keys, case.key), (case.values, case.value)):
        torch.testing.assert_close(
            cache.flatten(0, 1)[case.slot_mapping], new[0].transpose(0, 1), atol=0, rtol=0
        )


def test_earlier_content_of_a_page_is_ignored_even_if_it_is_nan() -> None:
    case = Case(torch.float32, [20], [3])
    case.keys.flatten(0, 1)[case.pages[0][-1] * 16 + 23 % 16 :][: 16 - 23 % 16] = torch.nan
    case.values.copy_(torch.where(case.keys.isnan(), torch.nan, case.values))
    assert case.keys.isnan().any()
    torch.testing.assert_close(case.attend(), case.expected(), atol=2e-6, rtol=2e-6)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    case = Case(torch.float32, [100], [2])
    case.query *= 1000
    torch.testing.assert_close(case.attend(), case.expected(), atol=1e-4, rtol=1e-4)


def test_a_nan_query_gives_nan_and_leaves_other_rows_finite() -> None:
    case = Case(torch.bfloat16, [20, 30], [1, 1])
    case.query[:, :, 1] = torch.nan
    out = case.attend()
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
