"""What does not depend on the layer: a packed batch as a few index tensors, computed once a forward on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

# Slices up to this length (decoding and verification) share one padded attention call; longer ones (prefill) go one by one.
SHORT_SLICE = 32


@dataclass(slots=True)
class Slice:
    """Consecutive tokens of one sequence.

    `start` is the position of the first, `pages` hold the sequence's keys and values, these tokens' own included, and logits are
    wanted for the last `logit_count` of them.
    """

    token_ids: list[int]
    start: int
    pages: list[int]
    logit_count: int


@dataclass
class Group:
    """Slices that one attention call takes: B of them, padded to Q queries and P pages.

    `rows_BQ` [B, Q] are packed token numbers, padded with a slice's last token; `real_BQ` is None when nothing is padded, and
    `whole_batch` says that moreover the group is all of the batch, in its order. `key_count` keys are looked at: P pages of them,
    or, for a single slice whose pages lie side by side, just its own; then `run` is where they lie in the flattened cache, so
    that nothing need be gathered.
    `positions_BQ` [B, Q] go with them, `pages_BP` [B, P] are padded with page 0, which the mask hides.
    """

    rows_BQ: torch.Tensor
    real_BQ: torch.Tensor | None
    whole_batch: bool
    positions_BQ: torch.Tensor
    pages_BP: torch.Tensor
    key_count: int
    run: slice | None
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> torch.Tensor | None:
        """[B, 1, Q * repeats, keys], 0 where a query sees a key and -inf elsewhere, each query `repeats` times over.

        With a sliding window a query sees the last `window` positions, its own included. None when every query sees all keys.
        Kept, since most layers ask alike.
        """
        if self.run is not None and self.rows_BQ.shape[1] == 1 and (window is None or self.key_count <= window):
            return None
        key = (window, repeats)
        if key not in self._masks:
            queries = self.positions_BQ.repeat_interleave(repeats, dim=1)[:, None, :, None]
            keys = torch.arange(self.key_count, device=queries.device)
            hidden = keys > queries
            hidden = hidden if window is None else hidden | (keys <= queries - window)
            self._masks[key] = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return self._masks[key]


class BatchLayout:
    """T tokens of B slices in one row."""

    def __init__(self, slices: Sequence[Slice], page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._lengths_B = np.array([len(part.token_ids) for part in slices])
        self._ends_B = np.cumsum(self._lengths_B)
        self._starts_B = np.array([part.start for part in slices])
        ends = self._starts_B + self._lengths_B
        self._pages = [np.array(part.pages[: -(-end // page_size)]) for part, end in zip(slices, ends.tolist(), strict=True)]
        positions = np.concatenate([np.arange(start, end) for start, end in zip(self._starts_B, ends, strict=True)])
        self._positions_T = positions
        self.token_ids = self._tensor(np.array([token for part in slices for token in part.token_ids]))
        self.positions = self._tensor(positions)
        self.slots = self._tensor(self._slots(positions))
        counts = [part.logit_count for part in slices]
        self.logit_rows = self._tensor(
            np.concatenate([np.arange(end - count, end) for end, count in zip(self._ends_B, counts, strict=True)])
        )

    def _slots(self, positions: np.ndarray) -> np.ndarray:
        """Where in the flattened cache each token goes, [T]."""
        pages = np.concatenate(
            [
                page[positions[end - n : end] // self._page_size]
                for page, end, n in zip(self._pages, self._ends_B, self._lengths_B, strict=True)
            ]
        )
        slots: np.ndarray = pages * self._page_size + positions % self._page_size
        return slots

    @cached_property
    def groups(self) -> list[Group]:
        """How the gathering attention takes the batch: all short slices together, each long one alone."""
        short = [i for i, n in enumerate(self._lengths_B) if n <= SHORT_SLICE]
        alone = [[i] for i, n in enumerate(self._lengths_B) if n > SHORT_SLICE]
        return [self._group(indices) for indices in ([short] if short else []) + alone]

    def _group(self, indices: list[int]) -> Group:
        lengths = self._lengths_B[indices]
        steps = np.arange(lengths.max())
        real = steps < lengths[:, None]
        rows = (self._ends_B[indices] - lengths)[:, None] + np.minimum(steps, lengths[:, None] - 1)
        run = self._run(indices)
        return Group(
            rows_BQ=self._tensor(rows),
            real_BQ=None if real.all() else self._tensor(real),
            whole_batch=bool(real.all()) and len(indices) == len(self._pages),
            positions_BQ=self._tensor(self._positions_T[rows]),
            pages_BP=self._block_table(indices),
            key_count=run.stop - run.start if run is not None else max(self._pages[i].size for i in indices) * self._page_size,
            run=run,
        )

    def _run(self, indices: list[int]) -> slice | None:
        pages = self._pages[indices[0]]
        if len(indices) > 1 or (np.diff(pages) != 1).any():
            return None
        first = int(pages[0]) * self._page_size
        return slice(first, first + int(self._starts_B[indices[0]] + self._lengths_B[indices[0]]))

    def _block_table(self, indices: Sequence[int]) -> torch.Tensor:
        table = np.zeros((len(indices), max(self._pages[i].size for i in indices)), np.int64)
        for row, i in enumerate(indices):
            table[row, : self._pages[i].size] = self._pages[i]
        return self._tensor(table)

    @cached_property
    def varlen(self) -> VarlenArguments:
        """How the variable-length CUDA kernel takes the batch."""
        cumulative = np.concatenate([[0], self._ends_B]).astype(np.int32)
        lengths = (self._starts_B + self._lengths_B).astype(np.int32)
        return VarlenArguments(
            cu_seq_q=self._tensor(cumulative),
            max_q=int(self._lengths_B.max()),
            max_k=int(lengths.max()),
            seqused_k=self._tensor(lengths),
            block_table=self._block_table(range(len(self._pages))).int(),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class VarlenArguments:
    """Arguments of `torch.nn.attention.varlen.varlen_attn` that every layer shares: int32 [B + 1], ints, [B] and [B, P]."""

    cu_seq_q: torch.Tensor
    max_q: int
    max_k: int
    seqused_k: torch.Tensor
    block_table: torch.Tensor
