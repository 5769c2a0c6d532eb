"""Attention over the paged cache on a GPU: a Triton kernel for decoding, verification and prefill.

The softmax takes one pass over the keys (FlashAttention-2, Dao, arXiv 2307.08691). The rows of a
tile are a slice's tokens times the query heads that share a key/value head, so each key is read
once for all of them. The keys are split into parts, and a second kernel joins the parts
(Flash-Decoding, Dao et al. 2023). Parts and tiles begin at fixed slots, so that a row adds its keys
in the same order in almost every batch. `outrider.lm.gpu.tiles` names the exceptions, and chooses
the sizes of tiles and grid.

A slot is a token's place among its sequence's keys. Tokens of a tree come after all committed
tokens, so their slots are not their positions. Tiles of keys that end before the tree are computed
as for a chain. Tiles begin at multiples of their length, wherever the tree begins. So a tree's
first path, which has the slots of a chain, gets exactly the result of that chain.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.lm.gpu import tiles
from outrider.lm.layout import KernelArguments
from outrider.lm.softmax import Softmax

# Kernels read only constants of Triton's own type.
_PART = tl.constexpr(tiles.PART)
_PARTS = tl.constexpr(tiles.PARTS)
_STEPS = tl.constexpr(tiles.STEPS)
_WHOLE = tl.constexpr(tiles.WHOLE)
# The number of parts that are joined at once.
_JOINED = tl.constexpr(8)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _scores(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors
    q, k, scale, softcap, CAPPED: tl.constexpr, EXACT: tl.constexpr
):
    """Return the scores [rows, keys]."""
    scores = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32") * scale
    if CAPPED:
        # tanh by way of exp, because Triton has no tanh.
        scores = softcap * (1 - 2 / (1 + tl.exp(2 * scores / softcap)))
    return scores


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _first_seen(  # type: ignore[no-untyped-def]  # position: a tensor
    position, window, CHUNKED: tl.constexpr
):
    """Return the first position that a token sees, maybe negative; see `Softmax.first_seen`."""
    return position // window * window if CHUNKED else position - window + 1


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _is_seen(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors
    at, slot, position, window, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr
):
    """Return which keys in the slots `at` each row sees, as if no token belonged to a tree.

    `_tile_scores` then hides the keys of a tree that are not ancestors. An ancestor's slot is never
    before its position, so no ancestor within the window is missing.
    """
    seen = at[None, :] <= slot[:, None]
    if WINDOWED:
        seen = seen & (at[None, :] >= _first_seen(position, window, CHUNKED)[:, None])
    return seen


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _tile_scores(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors and numbers
    q, k, start, at, slot, position, tree_tile, tree_start, words, scale, window, softcap,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, TREES: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Return a tile's scores [rows, keys] for the slots `at` from `start` on; -inf where unseen."""
    scores = _scores(q, k, scale, softcap, CAPPED, EXACT)
    seen = _is_seen(at, slot, position, window, WINDOWED, CHUNKED)
    scores = tl.where(seen, scores, float("-inf"))
    # The constant condition comes first: it decides whether the code is compiled.
    if TREES:  # noqa: SIM102
        if start >= tree_tile:
            seen = _is_text_or_ancestor(at, tree_start, words)
            scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _visible_ancestors(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors
    words, hidden
):
    """Return each row's ancestor bitmask without the lowest `hidden` of its set bits.

    The row's window leaves out these ancestors: ancestors come before their descendants, so the
    lowest bits are the farthest.
    """
    # Nothing is cleared where the windows begin before the tree.
    for cleared in range(tl.max(hidden, 0)):
        words = tl.where(hidden > cleared, words & (words - 1), words)
    return words


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _ancestors(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and tensors
    ancestors, positions, at, slot, real, tree_start, window,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, TREES: tl.constexpr,
):  # fmt: skip
    """Return each row's position, and if there are trees, a bitmask of the ancestors that it sees.

    `at` is each row's token in the batch. Without trees or without a window, the slot stands for
    the position.
    """
    position = slot
    words = slot
    if TREES:
        words = tl.load(ancestors + at, mask=real & (slot >= tree_start), other=0)
        if WINDOWED:
            position = tl.load(positions + at, mask=real, other=0)
            hidden = _first_seen(position, window, CHUNKED) - tree_start
            words = _visible_ancestors(words, tl.where(real, hidden, 0))
    return position, words


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _fold(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors
    scores, v, maximum, total, weighted, EXACT: tl.constexpr
):
    """Add a tile of keys to each row's maximum score, total weight and weighted sum of values."""
    highest = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has seen no key yet has a maximum of -inf; -inf - -inf would be NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(scores - base[:, None])
    kept = tl.exp(maximum - base)
    product = tl.dot(weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
    return highest, total * kept + tl.sum(weights, 1), weighted * kept[:, None] + product


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _load(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and tensors
    rows, at, lanes, real, SIZE: tl.constexpr
):
    """Load heads of `SIZE` numbers, padded with zeros; the arguments broadcast to a tile."""
    return tl.load(rows + at * SIZE + lanes, mask=real & (lanes < SIZE), other=0.0)


@triton.jit
def _sequence(cu_seqlens_q, seq_lens, tree_starts, number):  # type: ignore[no-untyped-def]  # pointers
    """Return a sequence's first token in the batch, token count, slots before, and tree start."""
    first = tl.load(cu_seqlens_q + number)
    count = tl.load(cu_seqlens_q + number + 1) - first
    return first, count, tl.load(seq_lens + number) - count, tl.load(tree_starts + number)


@triton.jit
def _is_text_or_ancestor(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors
    at, tree_start, words
):
    """Return which keys in the slots `at` come before the tree or are a row's ancestors.

    The result is [rows, keys]. It is arbitrary for keys after the tree, which no row sees.
    """
    # Shifts by less than 0 or more than 63 are undefined.
    bit = ((at - tree_start) & 63).to(tl.int64)
    return (at < tree_start)[None, :] | ((words[:, None] >> bit[None, :]) & 1 != 0)


@triton.jit
def _part_begin(part):  # type: ignore[no-untyped-def]  # the argument is a Triton number
    """Return the first slot of a part."""
    later = tl.maximum(part - _PARTS, 0)
    base = tl.full((), _PARTS * _PART, tl.int32) << (later // _STEPS)
    return tl.where(part < _PARTS, part * _PART, base + later % _STEPS * (base // _STEPS))


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _part_of(slot, DOUBLINGS: tl.constexpr):  # type: ignore[no-untyped-def]  # slot: a tensor
    """Return the part of each slot, as `tiles.part_of` does."""
    part = slot // _PART
    for doubling in tl.static_range(DOUBLINGS):
        base = _PARTS * _PART * 2**doubling
        later = _PARTS + _STEPS * doubling + (slot - base) // (base // _STEPS)
        part = tl.where(slot >= base, later, part)
    return part


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _tile_of(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and numbers
    cu_seqlens_q, sequence_count, tile, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    """Return the sequence of a tile of rows, and the tile's number within the sequence.

    Sequence i has the tiles from cu_seqlens_q[i] * GROUP // ROWS + i on. This gives each sequence
    enough tile numbers for all its rows, and at most one number too many.
    """
    low = 0
    high = sequence_count
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(cu_seqlens_q + middle) * GROUP // ROWS + middle
        low = tl.where(begin <= tile, middle, low)
        high = tl.where(begin <= tile, high, middle)
    return low, tile - (tl.load(cu_seqlens_q + low) * GROUP // ROWS + low)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _key_range(  # type: ignore[no-untyped-def]  # the arguments are Triton numbers
    before, count, first_row, tree_start, window, GROUP: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Return the first and the end slot of the keys that a tile of rows sees.

    The first slot is rounded down to the start of a tile of keys. The sequence's `count` tokens
    have the slots from `before` on.
    """
    last_token = tl.minimum((first_row + ROWS - 1) // GROUP, count - 1)
    begin = tl.full((), 0, tl.int32)
    if WINDOWED:
        # All positions of a tree are `tree_start` or later, in any order.
        first_position = tl.minimum(before + first_row // GROUP, tree_start)
        begin = tl.maximum(_first_seen(first_position, window, CHUNKED), 0) // KEYS * KEYS
    return begin, before + last_token + 1


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _attend_keys(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors and numbers
    q, keys, values, pages, begin, end, head, slot, position, tree_start, words,
    scale, window, softcap, sink,
    KV_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_LANES: tl.constexpr, VALUE_LANES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr, TREES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend for a tile of rows over the keys in the slots from `begin` to `end`, see `_fold`.

    `sink` is each row's first score, whose weight goes to no key; -inf without one.
    The pages of a tile of keys are read one tile ahead. So no address depends on a load in the same
    turn of the loop, and Triton loads several tiles of keys and values ahead of their use.
    """
    key_lanes = tl.arange(0, KEY_LANES)
    value_lanes = tl.arange(0, VALUE_LANES)
    maximum = sink
    total = tl.where(sink == float("-inf"), 0.0, 1.0)
    weighted = tl.zeros([ROWS, VALUE_LANES], tl.float32)
    # Tiles from here on may overlap the tree.
    tree_tile = tl.where(tree_start < end, tl.maximum(begin, tree_start // KEYS * KEYS), end)
    at = begin + tl.arange(0, KEYS)
    page = tl.load(pages + at // PAGE_SIZE, mask=at < end, other=0)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        key_at = (page.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE) * KV_HEADS + head
        next_at = at + KEYS
        page = tl.load(pages + next_at // PAGE_SIZE, mask=next_at < end, other=0)
        k = _load(keys, key_at[None, :], key_lanes[:, None], (at < end)[None, :], KEY_SIZE)
        scores = _tile_scores(
            q, k, start, at, slot, position, tree_tile, tree_start, words, scale, window, softcap,
            WINDOWED, CHUNKED, CAPPED, TREES, EXACT,
        )  # fmt: skip
        v = _load(values, key_at[:, None], value_lanes[None, :], (at < end)[:, None], VALUE_SIZE)
        maximum, total, weighted = _fold(scores, v, maximum, total, weighted, EXACT)
    # A row that sees no key has a total of 0; its maximum stays -inf.
    total = tl.where(total == 0, 1.0, total)
    return weighted / total[:, None], maximum + tl.log(total)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _store(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and tensors
    out, row_at, result, real, SIZE: tl.constexpr, LANES: tl.constexpr
):
    """Store rows of results."""
    lanes = tl.arange(0, LANES)
    out_at = row_at[:, None] * SIZE + lanes[None, :]
    mask = real[:, None] & (lanes < SIZE)[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=mask)


# Arguments that vary from step to step must not cause a new compilation.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=["width", "token_count", "sequence_count"],
    do_not_specialize_on_alignment=[
        "cu_seqlens_q",
        "seq_lens",
        "block_table",
        "positions",
        "tree_starts",
        "ancestors",
    ],
)
def _attend(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and numbers
    query, keys, values, out, parts, log_totals, sinks, cu_seqlens_q, seq_lens, block_table,
    positions, tree_starts, ancestors, width, token_count, sequence_count,
    scale, window, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_LANES: tl.constexpr, VALUE_LANES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, DOUBLINGS: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    TREES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend for one tile of rows of one key/value head, over some parts of the keys.

    The programs of a tile share the parts that the tile sees: program p takes number p of these
    parts and every n-th part after it, where n is the second size of the grid.

    Without SPLIT all keys are one part, and results go to `out`. With SPLIT, the result of a part,
    normalised by itself, goes to `parts` [parts, T, heads, value size], and the logarithm of its
    divisor to `log_totals` [parts, T, heads]; `_join` adds the sinks. A long slice is not split:
    its results go to `out`, and each of its rows has infinity as its last logarithm, which tells
    `_join` that there are no parts.
    """
    head = tl.program_id(0) % KV_HEADS
    sequence, tile = _tile_of(
        cu_seqlens_q, sequence_count, tl.program_id(0) // KV_HEADS, GROUP, ROWS
    )
    first_row = tile * ROWS
    first, count, before, tree_start = _sequence(cu_seqlens_q, seq_lens, tree_starts, sequence)
    if first_row >= count * GROUP:
        return
    rows = first_row + tl.arange(0, ROWS)
    token = rows // GROUP
    real = token < count
    slot = before + token
    row_begin, row_end = _key_range(
        before, count, first_row, tree_start, window, GROUP, ROWS, KEYS, WINDOWED, CHUNKED
    )
    split = (count <= _WHOLE) & SPLIT
    first_part = tl.program_id(1)
    end_part = 1
    if split:
        first_part += _part_of(row_begin, DOUBLINGS)
        end_part = _part_of(row_end - 1, DOUBLINGS) + 1
    if first_part >= end_part:
        return
    row_at = (first + token).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + rows % GROUP
    part_rows = token_count.to(tl.int64) * (KV_HEADS * GROUP)
    key_lanes = tl.arange(0, KEY_LANES)
    q = _load(query, row_at[:, None], key_lanes[None, :], real[:, None], KEY_SIZE)
    position, words = _ancestors(
        ancestors, positions, first + token, slot, real, tree_start, window, WINDOWED, CHUNKED,
        TREES,
    )  # fmt: skip
    sink = tl.full([ROWS], float("-inf"), tl.float32)
    if SINKS:
        of_head = tl.load(sinks + head * GROUP + rows % GROUP).to(tl.float32)
        sink = tl.where(split, sink, of_head)
    for part in range(first_part, end_part, tl.num_programs(1)):
        begin = row_begin
        end = row_end
        if split:
            begin = tl.maximum(begin, _part_begin(part))
            end = tl.minimum(end, _part_begin(part + 1))
        result, log_total = _attend_keys(
            q, keys, values, block_table + sequence * width, begin, end, head, slot, position,
            tree_start, words, scale, window, softcap, sink, KV_HEADS, KEY_SIZE, VALUE_SIZE,
            KEY_LANES, VALUE_LANES, PAGE_SIZE, ROWS, KEYS, WINDOWED, CHUNKED, CAPPED, TREES, EXACT,
        )  # fmt: skip
        if split:
            part_at = row_at + part * part_rows
            _store(parts, part_at, result, real, VALUE_SIZE, VALUE_LANES)
            tl.store(log_totals + part_at, log_total, mask=real)
        else:
            _store(out, row_at, result, real, VALUE_SIZE, VALUE_LANES)
            if SPLIT:
                last_at = row_at + _part_of(slot, DOUBLINGS) * part_rows
                tl.store(log_totals + last_at, float("inf"), mask=real)


# Arguments that vary from step to step must not cause a new compilation.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=["row_count"], do_not_specialize_on_alignment=["slots", "positions"]
)
def _join(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and numbers
    parts,
    log_totals,
    out,
    sinks,
    slots,
    positions,
    row_count,
    window,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the parts that one row sees into `out` [T, heads, value size], several parts at once.

    The parts are joined from the last to the first. In the last part a row sees at least its own
    key, so the maximum is finite from then on. A row of a tree may see no key of an earlier part.
    """
    row = tl.program_id(0).to(tl.int64)
    last = _part_of(tl.load(slots + row // HEADS), DOUBLINGS)
    # The row of a long slice has no parts, see `_attend`.
    if tl.load(log_totals + last * row_count.to(tl.int64) + row) == float("inf"):
        return
    first = 0
    if WINDOWED:
        position = tl.load(positions + row // HEADS)
        first = _part_of(tl.maximum(_first_seen(position, window, CHUNKED), 0), DOUBLINGS)
    lanes = tl.arange(0, LANES)
    maximum = tl.full((), float("-inf"), tl.float32)
    if SINKS:
        maximum = tl.load(sinks + row % HEADS).to(tl.float32)
    total = tl.where(maximum == float("-inf"), 0.0, 1.0)
    weighted = tl.zeros([LANES], tl.float32)
    for before in range(0, last + 1 - first, _JOINED):
        part = last - before - tl.arange(0, _JOINED)
        at = part * row_count.to(tl.int64) + row
        log_total = tl.load(log_totals + at, mask=part >= first, other=float("-inf"))
        values = _load(parts, at[:, None], lanes[None, :], (part >= first)[:, None], SIZE)
        highest = tl.maximum(maximum, tl.max(log_total, 0))
        kept = tl.exp(maximum - highest)
        weights = tl.exp(log_total - highest)
        total = total * kept + tl.sum(weights, 0)
        weighted = weighted * kept + tl.sum(weights[:, None] * values, 0)
        maximum = highest
    result = weighted / total
    tl.store(out + row * SIZE + lanes, result.to(out.dtype.element_ty), mask=lanes < SIZE)


def paged_attention(
    query_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: KernelArguments,
    softmax: Softmax,
    *,
    max_seq_len: int,
) -> torch.Tensor:
    """Attend for a packed batch, see `outrider.lm.attention.PagedKernel`.

    The grid depends only on the shapes: a captured launch serves any lengths of sequences.
    """
    query_THD = query_THD.contiguous()
    tokens, query_heads, size = query_THD.shape
    _, page_size, kv_heads, value_size = values.shape
    heads = tiles.Heads(query_heads // kv_heads, kv_heads, size, value_size, query_THD.dtype)
    card = tiles.card_of(query_THD.device)
    sequences = len(batch.seq_lens)
    shape = tiles.tiles(tokens, sequences, heads, card)
    split = tiles.part_count(max_seq_len) > 1
    width = batch.block_table.shape[1]
    part_count = tiles.part_count(min(max_seq_len, width * page_size)) if split else 1
    out = query_THD.new_empty(tokens, query_heads, value_size)
    parts, log_totals = out, out
    window, sinks = softmax.window or 0, out if softmax.sinks is None else softmax.sinks
    how = {
        "WINDOWED": softmax.window is not None,
        "CHUNKED": softmax.chunked,
        "SINKS": softmax.sinks is not None,
    }
    if split:
        log_totals = out.new_empty(part_count, tokens, query_heads, dtype=torch.float32)
        parts = out.new_empty(*log_totals.shape, value_size, dtype=torch.float32)
    doublings = tiles.doubling_count(max_seq_len)
    _attend[tiles.grid(tokens, sequences, part_count, shape.rows, heads, card)](
        query_THD, keys, values, out, parts, log_totals, sinks, batch.cu_seqlens_q, batch.seq_lens,
        batch.block_table, batch.positions, batch.tree_starts, batch.ancestors,
        width, tokens, sequences, softmax.scale, window, softmax.softcap or 0.0,
        GROUP=heads.group, KV_HEADS=kv_heads, KEY_SIZE=size, VALUE_SIZE=value_size,
        KEY_LANES=heads.key_lanes, VALUE_LANES=heads.value_lanes, PAGE_SIZE=page_size,
        ROWS=shape.rows, KEYS=shape.keys, SPLIT=split, DOUBLINGS=doublings,
        CAPPED=softmax.softcap is not None, TREES=batch.has_trees,
        EXACT=query_THD.dtype is torch.float32, num_stages=shape.stages, **how,
    )  # fmt: skip
    if split:
        _join[(tokens * query_heads,)](
            parts, log_totals, out, sinks, batch.slots, batch.positions, tokens * query_heads,
            window, HEADS=query_heads, SIZE=value_size, LANES=heads.value_lanes,
            # A program joins the parts of one row, so one warp suffices. More warps would wait for
            # each other at barriers, and fewer programs would fit a multiprocessor.
            DOUBLINGS=doublings, num_warps=1, **how,
        )  # fmt: skip
    return out
