"""Moves tokens within the cache: one kernel for the keys and values of all layers.

After a step with trees, the accepted tokens must follow one another in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import triton
import triton.language as tl

from outrider.protocol.token_tree import MAX_TREE_TOKENS
from outrider.sampling.tensors import on

# The number of moves that are read before the first of them is written; a tree has no more moves.
_MOVES = MAX_TREE_TOKENS
# The number of a slot's 64-bit words that one program moves.
_LANES = 32
_WORD_BYTES = 8


# Arguments that vary from step to step must not cause a new compilation.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=["count"], do_not_specialize_on_alignment=["moves"]
)
def _move(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and numbers
    addresses, widths, moves, count, MOVES: tl.constexpr, LANES: tl.constexpr
):
    """Move some 64-bit words of every moved slot of one array, the same words in each slot.

    No other program touches these words, so programs may run in any order. Within a program, the
    barriers order the threads: a chunk's sources are read before its targets are written, and then
    the next chunk's sources are read.
    """
    array = tl.program_id(0)
    base = tl.load(addresses + array).to(tl.pointer_type(tl.int64))
    width = tl.load(widths + array)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    for first in range(0, count, MOVES):
        move = first + tl.arange(0, MOVES)
        source = tl.load(moves + move, mask=move < count, other=0)
        target = tl.load(moves + count + move, mask=move < count, other=0)
        real = (move < count)[:, None] & (lanes < width)[None, :]
        words = tl.load(base + source[:, None] * width + lanes[None, :], mask=real, other=0)
        tl.debug_barrier()
        tl.store(base + target[:, None] * width + lanes[None, :], words, mask=real)
        tl.debug_barrier()


class TokenMover:
    """Moves tokens in arrays [slots, heads, size] whose heads and sizes may differ."""

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        """Note the addresses of the arrays, which must outlive this object."""
        device = arrays[0].device
        widths = [_slot_bytes(array) // _WORD_BYTES for array in arrays]
        self._addresses = on(device, [array.data_ptr() for array in arrays], torch.int64)
        self._widths = on(device, widths, torch.int32)
        self._grid = len(arrays), triton.cdiv(max(widths), _LANES)

    @classmethod
    def of(cls, arrays: Sequence[torch.Tensor]) -> Self | None:
        """Return a mover of these arrays; None if an array's slot is no whole number of words."""
        if any(_slot_bytes(array) % _WORD_BYTES for array in arrays):
            return None
        return cls(arrays)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots, at least one, on the current stream.

        Each source is read before any move overwrites it, if no move's target is the source of a
        move in a later chunk. This holds when each sequence's moves go towards its start in
        ascending order, because no other sequence writes its slots: let s_i and t_i be source and
        target of its move i. For i < j, t_i <= s_i < s_j, so t_i is not s_j.
        """
        moves = on(self._addresses.device, [sources, targets], torch.int64)
        _move[self._grid](
            self._addresses, self._widths, moves, len(sources), MOVES=_MOVES, LANES=_LANES
        )


def _slot_bytes(array: torch.Tensor) -> int:
    return array[0].numel() * array.itemsize
