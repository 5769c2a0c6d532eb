"""The attention that reads pages on a CPU computes what plain attention over the same keys does, in every build."""

import random

import pytest
import torch
from builds import BUILDS, use_build

from outrider.lm.cpu.attention import PagedAttention, PagedBatch

PAGE_COUNT = 64
SCALE = 0.2


class Case:
    """Slices of some sequences, whose earlier keys and values lie scattered in a cache."""

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
        self.starts, self.lengths, self.group = starts, lengths, heads // kv_heads
        free = random.Random(0).sample(range(PAGE_COUNT), PAGE_COUNT)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        self.pages = [[free.pop() for _ in range(-(-end // page_size))] for end in ends]
        self.keys, self.values = (
            torch.randn(PAGE_COUNT, page_size, kv_heads, size).to(dtype) for _ in range(2)
        )
        tokens = sum(lengths)
        # As models hand them over: [1, heads, T, size], with the heads of a token side by side.
        self.query = torch.randn(1, tokens, heads, size).to(dtype).transpose(1, 2)
        self.key, self.value = (
            torch.randn(1, tokens, kv_heads, size).to(dtype).transpose(1, 2) for _ in range(2)
        )
        self.slots = [
            pages[position // page_size] * page_size + position % page_size
            for pages, start, end in zip(self.pages, starts, ends, strict=True)
            for position in range(start, end)
        ]
        self.rows = [sum(lengths[:i]) for i in range(len(lengths))]

    def attend(self, window: int | None = None) -> torch.Tensor:
        batch = PagedBatch(self.slots, self.rows, self.lengths, self.starts, self.pages)
        layer = PagedAttention(self.keys, self.values)
        return layer.attend(batch, self.query, self.key, self.value, SCALE, window)

    def expected(self, window: int | None = None) -> torch.Tensor:
        """In float32, sequence by sequence; looks at the cache, so `attend` has to come first."""
        out = []
        for row, length, start, pages in zip(
            self.rows, self.lengths, self.starts, self.pages, strict=True
        ):
            key, value = (
                cache[pages]
                .flatten(0, 1)[: start + length]
                .float()
                .transpose(0, 1)
                .repeat_interleave(self.group, 0)
                for cache in (self.keys, self.values)
            )
            distance = torch.arange(start, start + length)[:, None] - torch.arange(start + length)
            seen = (distance >= 0) & (distance < (window or start + length))
            scores = (
                self.query[0, :, row : row + length].float() @ key.transpose(1, 2) * SCALE
            ).masked_fill(~seen, -torch.inf)
            out.append((scores.softmax(-1) @ value).transpose(0, 1))
        return torch.cat(out)


@pytest.fixture(params=BUILDS, autouse=True)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_build(request.param, monkeypatch)


SHAPES = {
    "decoding": ([0, 1, 15, 16, 17, 100], [1] * 6, {}),
    "verification": ([3, 40, 100], [5, 1, 9], {}),
    "more rows than are done at once": ([7, 90], [32, 20], {}),
    "one head for all": ([30, 31], [2, 3], {"kv_heads": 1}),
    "as many key heads as query heads": ([30, 31], [2, 3], {"kv_heads": 8}),
    "small heads": ([30, 31], [2, 3], {"size": 16}),
    "large heads": ([30, 31], [2, 3], {"size": 256}),
    "pages smaller than a block": ([50, 11], [2, 7], {"page_size": 5}),
    "pages larger than a block": ([50, 11, 129], [2, 7, 1], {"page_size": 128}),
}


@pytest.mark.parametrize("window", [None, 1, 19])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
def test_it_is_attention(
    shape: str, dtype: torch.dtype, tolerance: float, window: int | None
) -> None:
    starts, lengths, options = SHAPES[shape]
    case = Case(dtype, starts, lengths, **options)
    out = case.attend(window)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), case.expected(window), atol=tolerance, rtol=tolerance)


def test_keys_and_values_of_all_tokens_are_stored_whether_they_are_attended_for_or_not() -> None:
    case = Case(torch.bfloat16, [20, 40], [3, 2])
    layer = PagedAttention(case.keys, case.values)
    layer.attend(
        PagedBatch(case.slots, [], [], [], []), case.query, case.key, case.value, SCALE, None
    )
    for cache, new in ((case.keys, case.key), (case.values, case.value)):
        torch.testing.assert_close(
            cache.flatten(0, 1)[case.slots], new[0].transpose(0, 1), atol=0, rtol=0
        )


def test_what_a_page_held_before_is_not_looked_at_even_if_it_is_no_number() -> None:
    case = Case(torch.float32, [20], [3])
    case.keys.flatten(0, 1)[case.pages[0][-1] * 16 + 23 % 16 :][: 16 - 23 % 16] = torch.nan
    case.values.copy_(torch.where(case.keys.isnan(), torch.nan, case.values))
    assert case.keys.isnan().any()
    torch.testing.assert_close(case.attend(), case.expected(), atol=2e-6, rtol=2e-6)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    case = Case(torch.float32, [100], [2])
    case.query *= 1000
    torch.testing.assert_close(case.attend(), case.expected(), atol=1e-4, rtol=1e-4)


def test_nothing_but_numbers_comes_of_nothing_but_numbers_and_not_a_number_is_not_hidden() -> None:
    case = Case(torch.bfloat16, [20, 30], [1, 1])
    case.query[:, :, 1] = torch.nan
    out = case.attend()
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_a_query_whose_last_dimension_is_not_contiguous_is_taken_too() -> None:
    case = Case(torch.float32, [20], [3])
    case.query = case.query.transpose(2, 3).contiguous().transpose(2, 3)
    assert case.query.stride(3) != 1
    torch.testing.assert_close(case.attend(), case.expected(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "key_size", "value_size", "taken"),
    [
        (torch.float32, 64, 64, True),
        (torch.bfloat16, 256, 256, True),
        (torch.float16, 64, 64, False),
        (torch.float32, 8, 8, False),
        (torch.float32, 272, 272, False),
        (torch.float32, 64, 32, False),
    ],
)
def test_layers_that_it_can_do_are_taken(
    dtype: torch.dtype, key_size: int, value_size: int, taken: bool
) -> None:
    keys, values = (torch.zeros(1, 16, 2, size, dtype=dtype) for size in (key_size, value_size))
    assert PagedAttention.takes(keys, values) == taken
