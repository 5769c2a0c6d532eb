"""Cuts attention on a GPU into tiles, parts and programs, independently of sequence lengths.

The order in which a row adds its keys decides the last bits of its result. Tiles of keys begin at
fixed slots, and so do parts. So the order depends only on the number of query rows in a tile, and
on whether the slice is too long to be split (`WHOLE`). Tiles of 16 and of 32 rows use the same
instruction (mma.sync) and divide their keys alike among the warps. Tiles of 64 rows use wgmma on
Hopper (9.x), which divides the keys in another way. So attention gives the same bits in a plain and
a drafted step if in both steps a sequence has at most 32 rows on average: eight tokens if four
query heads share a key/value head. In float32 all tiles have 16 rows. Whole forwards promise less,
because cuBLAS chooses its products by the number of rows too. On an H200, other sizes of parts and
tiles made a single sequence faster and eight sequences slower (bench/results/2026-11-27-h200).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

PART = 512
"""The number of keys in each of the first `PARTS` parts."""
PARTS = 16
STEPS = 4
"""The number of parts in each doubling of the length after the first `PARTS` parts."""
WHOLE = 128
"""A slice of more than `WHOLE` tokens is not split: it has enough rows for many programs, and the
results of its parts would be written and read again for each row."""

# Query rows of a tile; tensor cores need at least 16.
_ROWS = (16, 32, 64)
# The size of a tile of keys in bytes.
_TILE_BYTES = 2**14
# The maximum number of tiles of keys and values in shared memory: one in use, the others being
# loaded.
_MOST_BUFFERS = 3
# The number of programs for each multiprocessor: several of them run on it at once, and all of them
# in a few turns.
_PROGRAMS = 8


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's shared memory for a program (bytes), multiprocessors and compute capability."""

    shared_bytes: int
    multiprocessors: int
    major: int


@cache
def card_of(device: torch.device) -> Card:
    """Return the properties of a GPU. On a CPU, Triton's interpreter gets an L4's properties."""
    if device.type != "cuda":
        return Card(99 * 1024, 58, 8)
    # torch's types leave out the shared memory that a program may opt into.
    found: Any = torch.cuda.get_device_properties(device)
    return Card(found.shared_memory_per_block_optin, found.multi_processor_count, found.major)


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads for each key/value head, key/value heads, and the sizes of keys and values."""

    group: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @property
    def key_lanes(self) -> int:
        """The power of two, at least 16, to which a key is padded."""
        return _padded(self.key_size)

    @property
    def value_lanes(self) -> int:
        """The power of two, at least 16, to which a value is padded."""
        return _padded(self.value_size)


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Tiles:
    """The query rows and keys in a tile, and Triton's number of stages for the loop over keys."""

    rows: int
    keys: int
    stages: int


def tiles(tokens: int, sequences: int, heads: Heads, card: Card) -> Tiles:
    """Return the tiles for a batch of `sequences` sequences with `tokens` tokens in all."""
    mean_rows = -(-tokens // sequences) * heads.group
    lanes = max(heads.key_lanes, heads.value_lanes)
    # In float32, which uses no tensor cores, and for heads of more than 128 lanes, more rows would
    # not fit the registers.
    sizes = _ROWS[:1] if heads.dtype is torch.float32 else _ROWS[:2] if lanes > 128 else _ROWS
    rows = next((rows for rows in sizes if mean_rows <= rows), sizes[-1])
    keys = max(16, min(64, _TILE_BYTES // (lanes * heads.dtype.itemsize)))
    return Tiles(rows, keys, _stages(rows, keys, heads, card))


def _stages(rows: int, keys: int, heads: Heads, card: Card) -> int:
    """Return the largest number of stages with which two programs can share a multiprocessor.

    Two buffers are worth more than a second program, because with a single buffer a tile's load
    begins only after the tile before it is computed.
    """
    buffer_bytes = keys * (heads.key_lanes + heads.value_lanes) * heads.dtype.itemsize
    # Groups of four warps (wgmma, tcgen05) need no shared memory for the weights of their rows. But
    # they read keys and values there while they compute, so with equal stages they need one buffer
    # more than other warps. Other warps exchange the weights in shared memory.
    warp_groups = rows == _ROWS[-1] and card.major in (9, 10)
    other_bytes = rows * (heads.key_lanes + (0 if warp_groups else keys + 8)) * heads.dtype.itemsize
    alone = (card.shared_bytes - other_bytes) // buffer_bytes
    shared = (card.shared_bytes // 2 - other_bytes) // buffer_bytes
    buffers = max(1, min(_MOST_BUFFERS, max(shared, min(alone, 2))))
    return buffers if warp_groups else buffers + 1


def grid(
    tokens: int, sequences: int, parts: int, rows: int, heads: Heads, card: Card
) -> tuple[int, int]:
    """Return the number of tiles of query rows, and the number of programs that share a tile.

    The first number includes the tiles of all key/value heads. Tiles are numbered over the batch,
    see `triton_attention._tile_of`; some are empty.
    """
    row_tiles = (tokens * heads.group // rows + sequences) * heads.kv_heads
    wanted = card.multiprocessors * _PROGRAMS
    return row_tiles, max(1, min(parts, wanted // row_tiles))


def part_of(slot: int) -> int:
    """Return the number of the part that a slot is in."""
    even = PART * PARTS
    if slot < even:
        return slot // PART
    doublings = doubling_count(slot + 1)
    begin = even << (doublings - 1)
    return PARTS + STEPS * (doublings - 1) + (slot - begin) // (begin // STEPS)


def doubling_count(keys: int) -> int:
    """Return how often the length of the first `PARTS` parts must double to hold all keys."""
    return ((keys - 1) // (PART * PARTS)).bit_length()


def part_count(keys: int) -> int:
    """Return the number of parts that `keys` keys are split into."""
    return part_of(keys - 1) + 1
