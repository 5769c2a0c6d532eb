"""What does not depend on the layer: a packed batch as a few index tensors, computed once a forward on the host.

Lists rather than arrays: the usual batch is a few tokens, and this runs between any two forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from outrider.lm.cpu.attention import PagedBatch

# Slices up to this length (decoding and verification) share one padded attention call; longer ones (prefill) go one by one.
SHORT_SLICE = 32


@dataclass(slots=True)
class SequenceSlice:
    """Consecutive tokens of one sequence.

    `start` is the position of the first, `pages` hold the sequence's keys and values, these tokens' own included, and logits are
    wanted for the last `logit_count` of them.
    """

    token_ids: list[int]
    start: int
    pages: list[int]
    logit_count: int

    @property
    def end(self) -> int:
        """The position behind the last token, which is the number of keys that one sees."""
        return self.start + len(self.token_ids)


def wanted_rows(slices: Sequence[SequenceSlice]) -> list[int]:
    """The packed tokens that logits are wanted of."""
    ends = accumulate(len(part.token_ids) for part in slices)
    return [
        row
        for part, end in zip(slices, ends, strict=True)
        for row in range(end - part.logit_count, end)
    ]


def slots(slices: Sequence[SequenceSlice], page_size: int) -> list[int]:
    """Where in the flattened cache each packed token goes."""
    return [
        part.pages[position // page_size] * page_size + position % page_size
        for part in slices
        for position in range(part.start, part.end)
    ]


class Group:
    """Slices that one attention call takes: B of them, padded to Q queries and P pages.

    `shape` is (B, Q). `padded` says whether some slice is shorter than Q, `whole_batch` that none is and that the group is all of
    the batch, in its order. `key_count` keys are looked at: P pages of them, or, for a single slice, just its own. If its pages
    lie side by side, `run` is where they lie in the flattened cache, so that nothing need be gathered. The index tensors are
    made when a layer first asks, since a single decoding sequence needs none of them.
    """

    def __init__(self, layout: BatchLayout, indices: Sequence[int]) -> None:
        self._layout = layout
        self._slices = [layout.slices[i] for i in indices]
        self._first_rows = [layout.first_rows[i] for i in indices]
        longest = max(len(part.token_ids) for part in self._slices)
        self.shape = len(indices), longest
        self.padded = any(len(part.token_ids) < longest for part in self._slices)
        self.whole_batch = not self.padded and len(indices) == len(layout.slices)
        size = layout.page_size
        most_keys = max(part.end for part in self._slices)
        self.key_count = most_keys if len(indices) == 1 else -(-most_keys // size) * size
        self.run = _run(self._slices[0], size) if len(indices) == 1 else None
        self._masks: dict[tuple[int | None, int], torch.Tensor | None] = {}

    @cached_property
    def rows_BQ(self) -> torch.Tensor:
        """Packed token numbers, padded with each slice's last token."""
        return self._layout.tensor(self._padded(self._first_rows))

    @cached_property
    def real_BQ(self) -> torch.Tensor:
        """Which of `rows_BQ` are not padding."""
        return self._layout.tensor(
            [[i < len(part.token_ids) for i in range(self.shape[1])] for part in self._slices]
        )

    @cached_property
    def pages_BP(self) -> torch.Tensor:
        """Page numbers, padded with page 0, which the mask hides."""
        return self._layout.block_table(self._slices)

    def _padded(self, firsts: Sequence[int]) -> list[list[int]]:
        """For each slice the numbers from its first on, the last repeated up to Q."""
        lengths = [len(part.token_ids) for part in self._slices]
        return [
            [first + min(i, n - 1) for i in range(self.shape[1])]
            for first, n in zip(firsts, lengths, strict=True)
        ]

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> torch.Tensor | None:
        """[B, 1, Q * repeats, keys], 0 where a query sees a key and -inf elsewhere, each query `repeats` times over.

        With a sliding window a query sees the last `window` positions, its own included. None when every query sees all keys.
        Kept, since most layers ask alike.
        """
        key = (window, repeats)
        if key not in self._masks:
            self._masks[key] = self._make_mask(window, repeats, dtype)
        return self._masks[key]

    def _make_mask(
        self, window: int | None, repeats: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        if self.shape == (1, 1) and (window is None or self.key_count <= window):
            return None
        positions_BQ = self._layout.tensor(self._padded([part.start for part in self._slices]))
        queries = positions_BQ.repeat_interleave(repeats, dim=1)[:, None, :, None]
        keys = torch.arange(self.key_count, device=queries.device)
        hidden = keys > queries
        hidden = hidden if window is None else hidden | (keys <= queries - window)
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, -torch.inf
        )


def _run(part: SequenceSlice, page_size: int) -> slice | None:
    """Where in the flattened cache the slice's keys lie, if its pages lie side by side."""
    first, count = part.pages[0], -(-part.end // page_size)
    if part.pages[:count] != list(range(first, first + count)):
        return None
    return slice(first * page_size, first * page_size + part.end)


class BatchLayout:
    """T tokens of B slices in one row."""

    def __init__(
        self, slices: Sequence[SequenceSlice], page_size: int, device: torch.device
    ) -> None:
        self.slices = slices
        self.page_size = page_size
        self._device = device
        self._row_ends = list(accumulate(len(part.token_ids) for part in slices))
        self.first_rows = [0, *self._row_ends[:-1]]
        self.token_ids = self.tensor([token for part in slices for token in part.token_ids])
        self.positions = self.tensor(
            [position for part in slices for position in range(part.start, part.end)]
        )
        self.logit_rows = self.tensor(wanted_rows(slices))

    @cached_property
    def slots(self) -> torch.Tensor:
        """Where in the flattened cache each token goes, [T]."""
        return self.tensor(slots(self.slices, self.page_size))

    @cached_property
    def _short(self) -> list[int]:
        """The slices that one call can take together, by number."""
        return [i for i, part in enumerate(self.slices) if len(part.token_ids) <= SHORT_SLICE]

    @cached_property
    def paged(self) -> PagedBatch:
        """How the attention that reads pages on a CPU takes the batch: the short slices."""
        return self._paged(
            [self.slices[i] for i in self._short], [self.first_rows[i] for i in self._short]
        )

    @cached_property
    def paged_whole(self) -> PagedBatch:
        """The same of all slices, long ones too."""
        return self._paged(self.slices, self.first_rows)

    def _paged(self, slices: Sequence[SequenceSlice], rows: Sequence[int]) -> PagedBatch:
        lengths, starts = [len(part.token_ids) for part in slices], [part.start for part in slices]
        return PagedBatch(
            slots(self.slices, self.page_size),
            rows,
            lengths,
            starts,
            [part.pages for part in slices],
        )

    @cached_property
    def long_groups(self) -> list[Group]:
        """Each long slice alone."""
        return [
            Group(self, [i])
            for i, part in enumerate(self.slices)
            if len(part.token_ids) > SHORT_SLICE
        ]

    @cached_property
    def groups(self) -> list[Group]:
        """How the gathering attention takes the batch: all short slices together, each long one alone."""
        return ([Group(self, self._short)] if self._short else []) + self.long_groups

    def block_table(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Page numbers [B, P] of the slices' keys, padded with page 0."""
        rows = [part.pages[: -(-part.end // self.page_size)] for part in slices]
        widest = max(map(len, rows))
        return self.tensor([row + [0] * (widest - len(row)) for row in rows])

    @cached_property
    def kernel(self) -> KernelArguments:
        """How the kernel of a GPU takes the batch."""
        return KernelArguments(
            ends=self.tensor([0, *self._row_ends]).int(),
            longest=max(len(part.token_ids) for part in self.slices),
            key_counts=self.tensor([part.end for part in self.slices]).int(),
            block_table=self.block_table(self.slices).int(),
            positions=self.positions,
        )

    def tensor(self, numbers: Sequence[object]) -> torch.Tensor:
        """On the model's device; int64, or bool."""
        # An empty list would come out as float32.
        return (torch.tensor(numbers) if numbers else torch.empty(0, dtype=torch.int64)).to(
            self._device, non_blocking=True
        )


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """What `outrider.lm.gpu.triton_attention` is told of a batch of B slices with T tokens, once for all layers.

    int32 but for the positions: where the slices end among the tokens, 0 before them, [B + 1]; how many keys each has with its own,
    [B]; the pages they are in, [B, P]; positions [T]. `longest` is no less than any slice's number of tokens.
    """

    ends: torch.Tensor
    longest: int
    key_counts: torch.Tensor
    block_table: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class StaticLayout:
    """All that layers with that kernel need of a batch; `slots` as `BatchLayout.slots`."""

    slots: torch.Tensor
    kernel: KernelArguments
