"""Describes a packed batch as index tensors, built on the host once per forward for all layers.

The code builds lists rather than arrays, because lists are quicker for the few tokens of a typical
batch, and this work takes time between two forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from outrider.lm.cpu.attention import PagedBatch
from outrider.lm.pages import KVSequence
from outrider.lm.softmax import Softmax
from outrider.protocol.token_tree import ancestor_words, depths
from outrider.sampling.tensors import Staging

# Slices of up to `SHORT_SLICE` tokens (decoding, verification) share one padded attention call.
# Longer slices (prefill, large trees) get a call each.
SHORT_SLICE = 32


@dataclass(slots=True)
class SequenceSlice:
    """Tokens of one sequence that a forward computes: its next tokens, and after them maybe a tree.

    `start` is the position of the first token. `pages` hold the sequence's keys and values,
    including those of this slice. The forward returns logits for the last `logit_count` tokens.

    `parents` has the parents of the last `len(parents)` tokens, as in `protocol.token_tree`; row 0
    is the token before them. Token i is in the slot `start + i` of the sequence, and a token of the
    tree has the position after its parent's. A token of the tree attends to the tokens before the
    tree and to its ancestors. Without `parents`, each token follows the previous token, and slots
    and positions are the same.

    `kv` is the sequence that holds the pages, if the pages stay from step to step. The block table
    on a GPU then gets only the sequence's new pages.
    """

    token_ids: list[int]
    start: int
    pages: list[int]
    logit_count: int
    parents: list[int] = field(default_factory=list)
    kv: KVSequence | None = None

    @property
    def end(self) -> int:
        """The slot after the last token: the number of keys.

        The last token of a chain sees all keys.
        """
        return self.start + len(self.token_ids)

    @property
    def tree_start(self) -> int:
        """The slot of the tree's first token; `end` without a tree."""
        return self.end - len(self.parents)

    @property
    def slots(self) -> range:
        """The slot of each token among the sequence's keys."""
        return range(self.start, self.end)

    @property
    def positions(self) -> Sequence[int]:
        """The position of each token."""
        if not self.parents:
            return self.slots
        first = self.tree_start
        return [*range(self.start, first), *[first - 1 + d for d in depths(self.parents)]]


def logits_indices(slices: Sequence[SequenceSlice]) -> list[int]:
    """Return the numbers of the packed tokens for which logits are computed."""
    ends = accumulate(len(part.token_ids) for part in slices)
    return [
        row
        for part, end in zip(slices, ends, strict=True)
        for row in range(end - part.logit_count, end)
    ]


def slot_mapping(slices: Sequence[SequenceSlice], page_size: int) -> list[int]:
    """Return the slot in the flattened cache for each packed token."""
    return [
        part.pages[slot // page_size] * page_size + slot % page_size
        for part in slices
        for slot in part.slots
    ]


def ancestors_by_token(slices: Sequence[SequenceSlice]) -> list[int]:
    """Return each packed token's `ancestor_words` bitmask, unsigned; 0 for tokens outside trees."""
    words: list[int] = []
    for part in slices:
        words += [0] * (len(part.token_ids) - len(part.parents))
        words += ancestor_words(part.parents)
    return words


@cache
def _no_ancestors(device: torch.device) -> torch.Tensor:
    """Return the tensor that all batches without trees share as their `ancestors`."""
    return torch.zeros(1, dtype=torch.int64, device=device)


class AttentionGroup:
    """B slices that one attention call processes, padded to Q queries and P pages.

    `shape` is (B, Q). `padded`: some slice has fewer than Q tokens. `whole_batch`: no slice is
    padded and the group is the whole batch in its order. The call reads `key_count` keys: P whole
    pages, or exactly the slice's keys in a group of one. If the pages of a group of one are
    adjacent, `contiguous_slots` is their range in the flattened cache, and nothing is gathered. The
    index tensors are created on first use, because a single decoding sequence may need none.
    """

    def __init__(self, layout: BatchLayout, indices: Sequence[int]) -> None:
        """Group the slices of `layout` with these indices."""
        self._layout = layout
        self._slices = [layout.slices[i] for i in indices]
        self._first_rows = [layout.first_rows[i] for i in indices]
        longest = max(len(part.token_ids) for part in self._slices)
        self.shape = len(indices), longest
        self.padded = any(len(part.token_ids) < longest for part in self._slices)
        self.whole_batch = not self.padded and len(indices) == len(layout.slices)
        size = layout.page_size
        max_seq_len = max(part.end for part in self._slices)
        self.key_count = -(-max_seq_len // size) * size
        self.contiguous_slots = None
        if len(indices) == 1:
            self.key_count = max_seq_len
            self.contiguous_slots = _contiguous_slots(self._slices[0], size)
        self._masks: dict[tuple[int | None, bool, int], torch.Tensor | None] = {}

    @cached_property
    def rows_BQ(self) -> torch.Tensor:
        """The packed token numbers. The padding repeats each slice's last token."""
        first_rows = zip(self._first_rows, self._slices, strict=True)
        return self._padded(
            [range(first, first + len(part.token_ids)) for first, part in first_rows]
        )

    @cached_property
    def is_real_BQ(self) -> torch.Tensor:
        """True where `rows_BQ` is not padding."""
        return self._layout.tensor(
            [[i < len(part.token_ids) for i in range(self.shape[1])] for part in self._slices]
        )

    @cached_property
    def block_table_BP(self) -> torch.Tensor:
        """The page numbers, padded with page 0, which the mask hides."""
        return self._layout.block_table(self._slices)

    @cached_property
    def unwritten_BK(self) -> torch.Tensor | None:
        """True for the places after each slice's last token, [B, keys]; None if there are none."""
        ends = [part.end for part in self._slices]
        if min(ends) == self.key_count:
            return None
        ends_B1 = self._layout.tensor(ends)[:, None]
        return torch.arange(self.key_count, device=ends_B1.device) >= ends_B1

    def _padded(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return a row of numbers for each slice; the last number is repeated up to Q."""
        longest = self.shape[1]
        return self._layout.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows])

    def mask(self, softmax: Softmax, repeats: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the attention mask [B, 1, Q * repeats, keys]: 0 for visible keys, else -inf.

        Each query occurs `repeats` times in a row. None means that every query sees all
        keys. Masks are cached, because most layers ask for the same mask.
        """
        key = (softmax.window, softmax.chunked, repeats)
        if key not in self._masks:
            self._masks[key] = self._make_mask(softmax, repeats, dtype)
        return self._masks[key]

    def _make_mask(self, softmax: Softmax, repeats: int, dtype: torch.dtype) -> torch.Tensor | None:
        window = softmax.window
        if self.shape == (1, 1) and (window is None or self.key_count <= window):
            return None
        slots_BQ = self._padded([part.slots for part in self._slices])
        key_positions = torch.arange(self.key_count, device=slots_BQ.device)
        hidden_BQK = key_positions > slots_BQ[:, :, None]
        positions_BQ = slots_BQ
        if any(part.parents for part in self._slices):
            self._hide_branches(hidden_BQK)
            positions_BQ = self._padded([part.positions for part in self._slices])
            key_positions = self._key_positions(key_positions)
        if window is not None:
            hidden_BQK |= key_positions < softmax.first_seen(positions_BQ)[:, :, None]
        hidden = hidden_BQK.repeat_interleave(repeats, dim=1)[:, None]
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return zeros.masked_fill_(hidden, -torch.inf)

    def _hide_branches(self, hidden_BQK: torch.Tensor) -> None:
        """Hide from each query of a tree the tree's tokens that are not its ancestors."""
        for hidden_QK, part in zip(hidden_BQK, self._slices, strict=True):
            ancestors = _ancestor_matrix(part.parents).to(hidden_QK.device)
            queries = slice(part.tree_start - part.start, len(part.token_ids))
            hidden_QK[queries, part.tree_start : part.end] |= ~ancestors

    def _key_positions(self, slots_K: torch.Tensor) -> torch.Tensor:
        """Return the position of each key, [B, 1, keys]."""
        positions_BK = slots_K.repeat(self.shape[0], 1)
        for positions_K, part in zip(positions_BK, self._slices, strict=True):
            of_tree = part.positions[part.tree_start - part.start :]
            positions_K[part.tree_start : part.end] = self._layout.tensor(of_tree)
        return positions_BK[:, None]


def _ancestor_matrix(parents: Sequence[int]) -> torch.Tensor:
    """Return bool [N, N]: True if draft token j (column) is draft token i (row) or its ancestor."""
    words = torch.tensor(ancestor_words(parents), dtype=torch.uint64).view(torch.int64)
    return (words[:, None] >> torch.arange(len(parents)) & 1).bool()


def _contiguous_slots(part: SequenceSlice, page_size: int) -> slice | None:
    """Return the slots of the slice's keys, or None if its pages are not adjacent."""
    first = part.pages[0]
    count = -(-part.end // page_size)
    if part.pages[:count] != list(range(first, first + count)):
        return None
    return slice(first * page_size, first * page_size + part.end)


class BatchLayout:
    """The layout of T tokens of B slices, packed into one row.

    Each attention backend reads the properties that it needs.
    """

    def __init__(
        self, slices: Sequence[SequenceSlice], page_size: int, device: torch.device
    ) -> None:
        """Pack the slices, and send the tensors to `device`; a GPU gets all of them in one copy."""
        self.slices = slices
        self.page_size = page_size
        self._device = device
        self._row_ends = list(accumulate(len(part.token_ids) for part in slices))
        self.first_rows = [0, *self._row_ends[:-1]]
        numbers: dict[str, npt.NDArray[np.generic]] = {
            "token_ids": np.array([token for part in slices for token in part.token_ids], np.int64),
            "positions": np.array([at for part in slices for at in part.positions], np.int64),
            "logits_indices": np.array(logits_indices(slices), np.int64),
        }
        # On a CPU most forwards need no tensors of the GPU kernel.
        if device.type != "cpu":
            numbers |= self._kernel_numbers()
        self._sent = self._send(numbers)
        self.token_ids = self._sent["token_ids"]
        self.positions = self._sent["positions"]
        self.logits_indices = self._sent["logits_indices"]

    def _send(self, numbers: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, torch.Tensor]:
        """Copy arrays to the device."""
        staging = Staging(self._device)
        staged = {name: staging.add(array) for name, array in numbers.items()}
        staging.send()
        return {name: array.tensor for name, array in staged.items()}

    @cached_property
    def slot_mapping(self) -> torch.Tensor:
        """The slot of each token in the flattened cache, [T]."""
        sent = self._sent.get("slot_mapping")
        return self.tensor(slot_mapping(self.slices, self.page_size)) if sent is None else sent

    @cached_property
    def cpu_batch(self) -> PagedBatch:
        """The arguments of the C attention."""
        tree_starts: list[int] = []
        ancestors: list[int] = []
        if any(part.parents for part in self.slices):
            tree_starts = [part.tree_start for part in self.slices]
            ancestors = ancestors_by_token(self.slices)
        return PagedBatch(
            slot_mapping(self.slices, self.page_size),
            self.first_rows,
            [len(part.token_ids) for part in self.slices],
            [part.start for part in self.slices],
            [part.pages for part in self.slices],
            tree_starts,
            ancestors,
        )

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """The slices in groups, each for one call of the attention that gathers pages.

        All short slices are one group, which comes first. Each long slice is a group of its own.
        """
        short: list[int] = []
        long: list[int] = []
        for i, part in enumerate(self.slices):
            (short if len(part.token_ids) <= SHORT_SLICE else long).append(i)
        together = (short, *([i] for i in long))
        return [AttentionGroup(self, indices) for indices in together if indices]

    def block_table(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Return the page numbers [B, P] of the slices' keys, padded with page 0."""
        return self.tensor(self._pages(slices))

    def _pages(self, slices: Sequence[SequenceSlice]) -> list[list[int]]:
        rows = [part.pages[: -(-part.end // self.page_size)] for part in slices]
        widest = max(map(len, rows))
        return [row + [0] * (widest - len(row)) for row in rows]

    def _kernel_numbers(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arrays of `kernel`, and the slot mapping."""
        slices = self.slices
        numbers: dict[str, npt.NDArray[np.generic]] = {
            "slot_mapping": np.array(slot_mapping(slices, self.page_size), np.int64),
            "cu_seqlens_q": np.array([0, *self._row_ends], np.int32),
            "seq_lens": np.array([part.end for part in slices], np.int32),
            "block_table": np.array(self._pages(slices), np.int32),
            "kernel_positions": np.array([at for p in slices for at in p.positions], np.int32),
        }
        if any(part.parents for part in slices):
            numbers |= {
                "slots": np.array([slot for part in slices for slot in part.slots], np.int32),
                "tree_starts": np.array([part.tree_start for part in slices], np.int32),
                "ancestors": np.array(ancestors_by_token(slices), np.uint64).view(np.int64),
            }
        return numbers

    @cached_property
    def kernel(self) -> KernelArguments:
        """The arguments of the GPU kernel."""
        sent = self._sent
        if "seq_lens" not in sent:
            sent = self._send(self._kernel_numbers())
        positions, seq_lens = sent["kernel_positions"], sent["seq_lens"]
        return KernelArguments(
            cu_seqlens_q=sent["cu_seqlens_q"],
            seq_lens=seq_lens,
            block_table=sent["block_table"],
            slots=sent.get("slots", positions),
            positions=positions,
            tree_starts=sent.get("tree_starts", seq_lens),
            ancestors=sent["ancestors"] if "ancestors" in sent else _no_ancestors(self._device),
            has_trees="ancestors" in sent,
        )

    def tensor(self, numbers: Sequence[object]) -> torch.Tensor:
        """Return a tensor on the model's device: int64 for integer `numbers`, bool for booleans."""
        # torch would make an empty list float32.
        on_host = torch.tensor(numbers) if numbers else torch.empty(0, dtype=torch.int64)
        return on_host.to(self._device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """One batch of B slices with T tokens, in the form for `outrider.lm.gpu.triton_attention`.

    `cu_seqlens_q` [B + 1]: cumulative token counts of the slices, from 0 on. `seq_lens` [B]: the
    number of each sequence's keys, including the slice's own keys. `block_table` [B, P]: the pages
    of those keys. `slots` [T]: each token's place among the keys of its sequence. `positions` [T]:
    equal to `slots` except for a tree's tokens. `tree_starts` [B]: the slot of a slice's first tree
    token, or the slice's `seq_lens` if it has no tree. `ancestors` [T]: for each token of a tree a
    bitmask, in which bit j is set if draft token j is the token itself or its ancestor; the
    bitmasks of other tokens are not read. In a batch without trees, `ancestors` may have the shape
    [1]. `has_trees`: whether some slice may have a tree; if none may, the kernel reads no
    `ancestors`. `ancestors` is int64, the other tensors are int32.
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    tree_starts: torch.Tensor
    ancestors: torch.Tensor
    has_trees: bool


@dataclass(frozen=True, slots=True)
class StaticLayout:
    """A batch at fixed addresses, for layers that all use the GPU kernel.

    `slot_mapping` is as in `BatchLayout`.
    """

    slot_mapping: torch.Tensor
    kernel: KernelArguments

    @property
    def positions(self) -> torch.Tensor:
        """The position of each token, [T]."""
        return self.kernel.positions
