"""Whole forwards as CUDA graphs: one call launches the hundreds of kernels of a decoding step, for its batch padded to a bucket.

A graph repeats its kernels at the same addresses with the same numbers. So all that a forward is told of its batch lies in
arrays that keep their places, the block table in one that all graphs share, and its logits go to another.
"""

from __future__ import annotations

import logging
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch

from outrider.lm.layout import KernelArguments, SequenceSlice, StaticLayout, slots, wanted_rows
from outrider.sampling.tensors import on

log = logging.getLogger(__name__)

Replay = Callable[[], object]

# Sequences, and tokens of each on average, that batches are padded to: at most by half from 16 and from 2 on.
_BATCHES = (
    1,
    2,
    4,
    8,
    16,
    *(size for power in range(4, 12) for size in (3 * 2 ** (power - 1), 2 ** (power + 1))),
)
_MEANS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest forward that graphs are made for: sequences, tokens of one of them, tokens in all."""

    sequences: int
    tokens_each: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Tokens of a page, pages that a sequence has at most, and one page that nobody's keys are in."""

    page_size: int
    pages_each: int
    spare_page: int


class Table:
    """Page numbers of up to `most` sequences, for all buckets; its event follows all that a step copies, other inputs included."""

    def __init__(self, most: int, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self._pinned = device.type == "cuda"
        self._host_BP, self.pages_BP = self.pair(most, shape.pages_each)
        self._numbers = self._host_BP.numpy()
        self._copied = torch.Event(device) if self._pinned else None

    def pair(self, *size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """An int32 array on the host and its like on the device."""
        host = torch.zeros(size, dtype=torch.int32, pin_memory=self._pinned)
        return host, torch.zeros_like(host, device=self.device)

    def wait(self) -> None:
        """Until the host's arrays may be written: the last copies may be under way yet."""
        if self._copied is not None:
            self._copied.synchronize()

    def write(self, slices: Sequence[SequenceSlice], batch: int) -> None:
        """Put the pages of a batch in place; rows that pad it have the spare page."""
        for row, part in zip(self._numbers, slices, strict=False):
            used = part.pages[: -(-part.end // self.shape.page_size)]
            row[: len(used)] = used
        self._numbers[len(slices) : batch, 0] = self.shape.spare_page
        self.pages_BP[:batch].copy_(self._host_BP[:batch], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Inputs:
    """What the forwards of one bucket are told: `batch` sequences with `rows` tokens in all, at fixed addresses.

    Tokens that pad go to the spare page, and each is a sequence of its own as long as there are sequences to spare; rows of
    those beyond are left as they come, and like all padding are read by nobody.
    """

    def __init__(self, batch: int, rows: int, longest: int, table: Table) -> None:
        self.batch, self.rows = batch, rows
        self._table = table
        sizes = [rows, rows, rows, batch + 1, batch]
        self._host, self._device = table.pair(sum(sizes))
        parts = [part.numpy() for part in torch.split(self._host, sizes)]
        self._ids, self._positions, self._slots, self._ends, self._key_counts = parts
        self.token_ids, self.positions, self._device_slots, ends, key_counts = torch.split(
            self._device, sizes
        )
        self._kernel = KernelArguments(
            ends, longest, key_counts, table.pages_BP[:batch], self.positions
        )

    def layout(self) -> StaticLayout:
        """For the layers; to be called within the capture, since slots are wanted as int64."""
        return StaticLayout(self._device_slots.long(), self._kernel)

    def write(self, slices: Sequence[SequenceSlice]) -> None:
        """Put a batch in place, and padding behind it."""
        self._table.wait()
        shape = self._table.shape
        count, pad = len(slices), self.rows - sum(len(part.token_ids) for part in slices)
        self._ids[:] = [*(token for part in slices for token in part.token_ids), *[0] * pad]
        self._positions[:] = [
            *(position for part in slices for position in range(part.start, part.end)),
            *[0] * pad,
        ]
        self._slots[:] = [
            *slots(slices, shape.page_size),
            *[shape.spare_page * shape.page_size] * pad,
        ]
        alone = min(pad, self.batch - count)
        lengths = [
            *(len(part.token_ids) for part in slices),
            *[1] * alone,
            *[0] * (self.batch - count - alone),
        ]
        self._ends[:] = [0, *accumulate(lengths)]
        self._key_counts[:] = [*(part.end for part in slices), *[1] * (self.batch - count)]
        self._device.copy_(self._host, non_blocking=True)
        self._table.write(slices, self.batch)


class Graphs:
    """Forwards of decoding batches as graphs. Not thread-safe; captures and replays belong on one thread."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor, StaticLayout], torch.Tensor],
        shape: CacheShape,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`forward` takes token ids and positions [T] and a layout, and returns logits [T, V]; it must not look at their values."""
        self._forward = forward
        self._shape = shape
        self._vocab_size = vocab_size
        self._device = device
        self._capture = _CudaCapture()
        self._bounds = Bounds(0, 0, 0)
        self._logits_RV = torch.empty(0)
        self._graphs: dict[tuple[int, int], tuple[Inputs, Replay]] = {}

    def prepare(self, bounds: Bounds) -> None:
        """Capture a graph for each bucket within the bounds; as many as fit the memory, and none of a model that cannot be."""
        started = time.monotonic()
        buckets = [
            (batch, mean)
            for batch in _up_to(bounds.sequences, _BATCHES)
            for mean in _means(batch, bounds)
        ]
        # Largest first, so that the smaller ones find memory enough in what these have left.
        buckets.sort(key=lambda bucket: bucket[0] * bucket[1], reverse=True)
        try:
            table = Table(bounds.sequences, self._shape, self._device)
            self._logits_RV = torch.empty(bounds.tokens, self._vocab_size, device=self._device)
            for batch, mean in buckets:
                rows = min(batch * mean, bounds.tokens)
                inputs = Inputs(batch, rows, 1 if mean == 1 else bounds.tokens_each, table)
                self._graphs[batch, mean] = self._captured(inputs)
        except RuntimeError as cause:
            # What keeps a model from being captured does so at once.
            log.warning(
                "%d of %d CUDA graphs could be captured: %s", len(self._graphs), len(buckets), cause
            )
        self._bounds = bounds
        log.info("%d CUDA graphs captured in %.1f s", len(self._graphs), time.monotonic() - started)

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Float32 logits of the wanted rows, valid until the next call; None for a batch that no graph is for."""
        found = self._graphs.get(self._bucket([len(part.token_ids) for part in slices]))
        if found is None:
            return None
        inputs, replay = found
        inputs.write(slices)
        replay()
        rows = wanted_rows(slices)
        if rows == list(range(len(rows))):
            return self._logits_RV[: len(rows)]
        return self._logits_RV[on(self._device, rows, torch.long)]

    def _bucket(self, lengths: Sequence[int]) -> tuple[int, int]:
        """The least batch that holds them, and then the least mean; (0, 0) where there is none."""
        bounds = self._bounds
        if (
            len(lengths) > bounds.sequences
            or max(lengths) > bounds.tokens_each
            or sum(lengths) > bounds.tokens
        ):
            return 0, 0
        batch = _at_least(len(lengths), _up_to(bounds.sequences, _BATCHES))
        # One token each is a mean of one; for anything else there must be room in the kernel's grid.
        mean = 1 if max(lengths) == 1 else max(2, -(-sum(lengths) // batch))
        return batch, _at_least(mean, _means(batch, bounds))

    def _captured(self, inputs: Inputs) -> tuple[Inputs, Replay]:
        inputs.write([])

        def run() -> object:
            return self._logits_RV[: inputs.rows].copy_(
                self._forward(inputs.token_ids, inputs.positions, inputs.layout())
            )

        return inputs, self._capture(run)


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """Those below `most`, and itself."""
    return [*(size for size in sizes if size < most), most]


def _means(batch: int, bounds: Bounds) -> list[int]:
    """Mean tokens of a batch's sequences, up to the first with which there are as many in all as there may be."""
    means = _up_to(bounds.tokens_each, _MEANS)
    enough = sum(batch * mean < bounds.tokens for mean in means)
    return means[: enough + 1]


def _at_least(least: int, sizes: Sequence[int]) -> int:
    return sizes[bisect_left(sizes, least)]


class _CudaCapture:
    """Graphs that share their memory, since one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # torch has no types for it.
        self._stream = cast(Any, torch.cuda.Stream)()

    def __call__(self, run: Callable[[], object]) -> Replay:
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            run()  # what is made at a first use, as cuBLAS' workspace, must not be made while a graph is captured
            _run_without_waits(run)
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                run()
        finally:
            torch.cuda.set_stream(before)  # which a capture that fails does not see to
        return graph.replay


def _run_without_waits(run: Callable[[], object]) -> None:
    """A wait for the device raises RuntimeError here, where nothing has begun that would have to be undone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
