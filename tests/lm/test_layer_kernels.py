"""A layer's kernels compute what `transformers` computes, and a row's bits depend on no other row.

Runs on a GPU, or by Triton's interpreter on a CPU. The interpreter truncates to bfloat16 without
rounding, so the test uses float16.
"""

from __future__ import annotations

import pytest
import torch

from outrider.lm.gpu import layer_kernels
from outrider.lm.gpu.layer_kernels import Norm
from tests.lm import reference_layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float16, torch.float32]
ROWS = 3


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Fail if numbers differ by more than the rounding of a sum.

    In float16 nearly all numbers are equal, because both computations round at the same places.
    """
    step = torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=2 * step, atol=2 * step)
    if wanted.dtype is torch.float16:
        assert (found == wanted).float().mean() > 0.98


def norm_of(size: int, dtype: torch.dtype, seed: int = 1) -> Norm:
    return Norm(draw(size, dtype=dtype, seed=seed), 1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [48, 1100])
@pytest.mark.parametrize("adds", [True, False])
def test_a_norm_adds_and_scales_as_transformers_does(
    size: int, dtype: torch.dtype, *, adds: bool
) -> None:
    stream = draw(ROWS, size, dtype=dtype)
    delta = draw(ROWS, size, dtype=dtype, seed=2) if adds else None
    norm = norm_of(size, dtype)
    found, total = layer_kernels.add_norm(stream, delta, norm)
    wanted, sum_of_both = reference_layers.add_norm(stream, delta, norm)
    torch.testing.assert_close(total, sum_of_both, rtol=0, atol=0)
    close(found, wanted)


def heads_of(
    query_heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return joined projections, and cosines and sines whose halves differ."""
    heads = draw(ROWS, (query_heads + 2 * kv_heads) * size, dtype=dtype)
    return heads, (draw(ROWS, size, dtype=dtype, seed=3), draw(ROWS, size, dtype=dtype, seed=4))


SLOTS = [8, 1, 6]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("query_heads", "kv_heads", "size"), [(4, 2, 16), (3, 1, 40)])
def test_heads_are_normed_turned_and_stored_as_by_transformers(
    query_heads: int, kv_heads: int, size: int, dtype: torch.dtype, *, normed: bool
) -> None:
    heads, rotary = heads_of(query_heads, kv_heads, size, dtype)
    norms = (norm_of(size, dtype), norm_of(size, dtype, 5)) if normed else None
    slots = torch.tensor(SLOTS, device=DEVICE)
    found, wanted = (
        [torch.full((9, kv_heads, size), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
        for _ in range(2)
    )
    query = layer_kernels.rotate_and_store(heads, rotary, slots, found[0], found[1], norms)
    expected = reference_layers.rotate_and_store(heads, rotary, slots, wanted[0], wanted[1], norms)
    close(query, expected)
    close(found[0], wanted[0])
    # Values are copied, and nothing is written to the other slots.
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [48, 1100])
def test_a_gated_product_is_that_of_transformers(size: int, dtype: torch.dtype) -> None:
    gate_up = 3 * draw(ROWS, 2 * size, dtype=dtype)
    close(layer_kernels.silu_product(gate_up), reference_layers.silu_product(gate_up))


# The exponential is infinite here, and numpy warns of it.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_numbers_too_large_for_an_exponential_are_products_too() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=DEVICE)
    assert layer_kernels.silu_product(gate_up).tolist() == [[0.0, 200.0]]


def test_a_row_alone_has_the_bits_that_it_has_among_others() -> None:
    dtype = torch.float16
    stream, delta = draw(ROWS, 70, dtype=dtype), draw(ROWS, 70, dtype=dtype, seed=2)
    gate_up = draw(ROWS, 96, dtype=dtype)
    heads, rotary = heads_of(4, 2, 16, dtype)
    norms = norm_of(16, dtype), norm_of(16, dtype, 5)
    slots = torch.tensor(SLOTS, device=DEVICE)

    def compute(rows: slice) -> list[torch.Tensor]:
        cache = [torch.zeros(9, 2, 16, dtype=dtype, device=DEVICE) for _ in range(2)]
        of_rows = rotary[0][rows], rotary[1][rows]
        query = layer_kernels.rotate_and_store(
            heads[rows], of_rows, slots[rows], cache[0], cache[1], norms
        )
        return [
            *layer_kernels.add_norm(stream[rows], delta[rows], norm_of(70, dtype)),
            layer_kernels.silu_product(gate_up[rows]),
            query,
            *(array[slots[rows]] for array in cache),
        ]

    together = compute(slice(0, ROWS))
    for row in range(ROWS):
        for alone, among in zip(compute(slice(row, row + 1)), together, strict=True):
            torch.testing.assert_close(alone[0], among[row], rtol=0, atol=0)
