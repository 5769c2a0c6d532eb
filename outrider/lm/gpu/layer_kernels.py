"""The small operators of a layer that is built like Llama's, as three Triton kernels.

Each number is rounded where `transformers` rounds it. Each row has its own programs, which compute
in an order that depends only on the row's length. So a row's bits do not depend on the number of
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# The number of a row's elements that each thread of `_add_norm` should compute. More elements would
# not fit the thread's registers.
_NORM_NUMBERS = 16
_MOST_WARPS = 16
_WARP = 32
# The number of a token's heads that one warp rotates.
_HEADS = tl.constexpr(4)
# The number of a row's products that one program computes.
_PRODUCTS = tl.constexpr(1024)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm by the root mean square of a row (RMSNorm): weight [size], and epsilon."""

    weight: torch.Tensor
    epsilon: float


@triton.jit
def _rounded(x, like):  # type: ignore[no-untyped-def]  # x: a tensor; like: a Triton pointer
    """Return float32 numbers, rounded to the type of `like`."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _add_norm(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and numbers
    stream, delta, weight, total, out,
    SIZE: tl.constexpr, LANES: tl.constexpr, EPSILON: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Add a row of `delta` to the row of `stream`; write the sum to `total`, its norm to `out`.

    Without ADDS, `delta` and `total` are not used.
    """
    lanes = tl.arange(0, LANES)
    at = tl.program_id(0).to(tl.int64) * SIZE + lanes
    real = lanes < SIZE
    x = tl.load(stream + at, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        x = _rounded(x + tl.load(delta + at, mask=real, other=0.0).to(tl.float32), out)
        tl.store(total + at, x.to(out.dtype.element_ty), mask=real)
    factor = tl.rsqrt(tl.sum(x * x, 0) / SIZE + EPSILON)
    scaled = _rounded(x * factor, out) * tl.load(weight + lanes, mask=real).to(tl.float32)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _half(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and tensors
    rows, at, lanes, real, SIZE: tl.constexpr
):
    """Load one half of each row's head as float32, padded with zeros."""
    mask = real & (lanes < SIZE // 2)[None, :]
    return tl.load(rows + at + lanes[None, :], mask=mask, other=0.0).to(tl.float32)


# Addresses that vary from step to step must not cause a new compilation.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize_on_alignment=["slots"]
)
def _rotate_and_store(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers
    heads, cos, sin, slots, query_weight, key_weight, query, keys, values,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
    EPSILON: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Rotate some queries and keys of one token, and store them and some of its values.

    Queries go to `query`, and keys and values go to the token's slot. A row of `heads` has the
    queries, the keys and the values of a token. With NORMS each query and key is normed first. The
    lanes hold half a head, because each rotation combines both halves of a head.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * _HEADS + tl.arange(0, _HEADS)[:, None]
    is_query = head < QUERY_HEADS
    is_key = (head >= QUERY_HEADS) & (head < QUERY_HEADS + KV_HEADS)
    is_value = (head >= QUERY_HEADS + KV_HEADS) & (head < QUERY_HEADS + 2 * KV_HEADS)
    lanes = tl.arange(0, LANES)
    half = SIZE // 2
    at = (token * (QUERY_HEADS + 2 * KV_HEADS) + head) * SIZE
    real = is_query | is_key | is_value
    low = _half(heads, at, lanes, real, SIZE)
    high = _half(heads, at + half, lanes, real, SIZE)
    low_out = low
    high_out = high
    if NORMS:
        total = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        factor = tl.rsqrt(total / SIZE + EPSILON)[:, None]
        low_weight = _norm_weight(query_weight, key_weight, is_query, lanes, SIZE)
        high_weight = _norm_weight(query_weight + half, key_weight + half, is_query, lanes, SIZE)
        low = _rounded(_rounded(low * factor, query) * low_weight, query)
        high = _rounded(_rounded(high * factor, query) * high_weight, query)
    rotary_at = tl.full([1, 1], 0, tl.int64) + token * SIZE
    low_cos = _half(cos, rotary_at, lanes, True, SIZE)
    high_cos = _half(cos, rotary_at + half, lanes, True, SIZE)
    low_sin = _half(sin, rotary_at, lanes, True, SIZE)
    high_sin = _half(sin, rotary_at + half, lanes, True, SIZE)
    rotated_low = _rounded(low * low_cos, query) - _rounded(high * low_sin, query)
    rotated_high = _rounded(high * high_cos, query) + _rounded(low * high_sin, query)
    low_out = tl.where(is_value, low_out, rotated_low).to(query.dtype.element_ty)
    high_out = tl.where(is_value, high_out, rotated_high).to(query.dtype.element_ty)
    lane = lanes[None, :]
    inside = lane < half
    query_at = (token * QUERY_HEADS + head) * SIZE + lane
    tl.store(query + query_at, low_out, mask=is_query & inside)
    tl.store(query + query_at + half, high_out, mask=is_query & inside)
    slot = tl.load(slots + token) * KV_HEADS
    key_at = (slot + head - QUERY_HEADS) * SIZE + lane
    tl.store(keys + key_at, low_out, mask=is_key & inside)
    tl.store(keys + key_at + half, high_out, mask=is_key & inside)
    value_at = key_at - KV_HEADS * SIZE
    tl.store(values + value_at, low_out, mask=is_value & inside)
    tl.store(values + value_at + half, high_out, mask=is_value & inside)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _norm_weight(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and tensors
    query_weight, key_weight, is_query, lanes, SIZE: tl.constexpr
):
    """Return half of the weight of each row's norm, [heads, lanes]."""
    of_queries = tl.load(query_weight + lanes, mask=lanes < SIZE // 2, other=0.0)
    of_keys = tl.load(key_weight + lanes, mask=lanes < SIZE // 2, other=0.0)
    return tl.where(is_query, of_queries[None, :], of_keys[None, :]).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _silu_product(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers
    gate_up, out, SIZE: tl.constexpr
):
    """Compute some products of one row: SiLU of the first half times the second half."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _PRODUCTS + tl.arange(0, _PRODUCTS)
    real = columns < SIZE
    at = row * 2 * SIZE + columns
    gate = tl.load(gate_up + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + SIZE, mask=real, other=0.0).to(tl.float32)
    product = _rounded(gate / (1 + tl.exp(-gate)), out) * up
    tl.store(out + row * SIZE + columns, product.to(out.dtype.element_ty), mask=real)


def add_norm(
    stream: torch.Tensor, delta: torch.Tensor | None, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of `stream` + `delta`, and the sum itself; all are contiguous [T, size].

    Without `delta`, the second result is `stream` itself.
    """
    rows, size = stream.shape
    out = torch.empty_like(stream)
    total = stream if delta is None else torch.empty_like(stream)
    lanes = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        stream, stream if delta is None else delta, norm.weight, total, out,
        SIZE=size, LANES=lanes, EPSILON=norm.epsilon, ADDS=delta is not None,
        num_warps=norm_warps(lanes),
    )  # fmt: skip
    return out, total


def norm_warps(lanes: int) -> int:
    """Return the number of warps for the norm of a row of `lanes` numbers, a power of two."""
    return max(1, min(_MOST_WARPS, lanes // (_NORM_NUMBERS * _WARP)))


def rotate_and_store(
    heads: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[Norm, Norm] | None,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values to the cache; return the queries.

    `heads` [T, (H + 2 K) * D] are the joined projections. `rotary` are the cosines and the sines,
    each [T, D]. Keys and values go to the rows `slots` [T] (int64) of `keys` and `values`
    [slots, K, D]. `norms` are the norms of the queries and of the keys, with one epsilon. The
    queries are [T, H, D].
    """
    rows, width = heads.shape
    _, kv_heads, size = keys.shape
    query_heads = width // size - 2 * kv_heads
    query = heads.new_empty(rows, query_heads, size)
    of_queries, of_keys = norms or (Norm(query, 0.0), Norm(query, 0.0))
    grid = rows, triton.cdiv(query_heads + 2 * kv_heads, _HEADS.value)
    _rotate_and_store[grid](
        heads, *rotary, slots, of_queries.weight, of_keys.weight, query, keys, values,
        QUERY_HEADS=query_heads, KV_HEADS=kv_heads, SIZE=size,
        LANES=triton.next_power_of_2(size // 2), EPSILON=of_queries.epsilon,
        NORMS=norms is not None, num_warps=1,
    )  # fmt: skip
    return query


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """Return SiLU(gate) * up, [T, size], of joined projections [T, 2 * size]."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    grid = rows, triton.cdiv(width // 2, _PRODUCTS.value)
    _silu_product[grid](gate_up, out, SIZE=width // 2)
    return out
