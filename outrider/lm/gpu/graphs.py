"""Runs whole forwards as CUDA graphs, each captured for a padded batch size (a bucket).

One call launches the hundreds of kernels of a decoding step. A graph repeats its kernels at the
same addresses with the same numbers. So a forward's inputs lie in arrays with fixed addresses, all
graphs share one block table, and the logits go to a fixed array too.
"""

from __future__ import annotations

import logging
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch

from outrider.lm.layout import (
    KernelArguments,
    SequenceSlice,
    StaticLayout,
    ancestors_by_token,
    logits_indices,
    slot_mapping,
)
from outrider.sampling.tensors import on

log = logging.getLogger(__name__)

Replay = Callable[[], object]

# Bucket sizes: sequences, and mean tokens a sequence. Padding adds at most half to 16 sequences or
# more, and to a mean of 2 or more.
_LARGE_BATCHES = tuple(
    size for power in range(4, 12) for size in (3 * 2 ** (power - 1), 2 ** (power + 1))
)
_BATCHES = (1, 2, 4, 8, 16, *_LARGE_BATCHES)
_MEANS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest forward to capture: sequences, tokens of one sequence, tokens in all."""

    sequences: int
    tokens_each: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Tokens a page, most pages a sequence, and the number of a page that no sequence uses."""

    page_size: int
    pages_each: int
    spare_page: int


class BlockTable:
    """Page numbers of up to `most` sequences, shared by all buckets.

    `write` is the last copy of a step's inputs, so its event follows all of them.
    """

    def __init__(self, most: int, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self._pinned = device.type == "cuda"
        self._host_BP, self.pages_BP = self.host_and_device(most, shape.pages_each)
        self._numbers = self._host_BP.numpy()
        self._copied = torch.Event(device) if self._pinned else None

    def host_and_device(self, *size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Create an int32 array of zeros on the host, pinned for a GPU, and one on the device."""
        host = torch.zeros(size, dtype=torch.int32, pin_memory=self._pinned)
        return host, torch.zeros_like(host, device=self.device)

    def wait(self) -> None:
        """Wait until the last step's copies have read the host arrays."""
        if self._copied is not None:
            self._copied.synchronize()

    def write(self, slices: Sequence[SequenceSlice], batch: int) -> None:
        """Write the pages of a batch; rows of padding get the spare page."""
        for row, part in zip(self._numbers, slices, strict=False):
            used = part.pages[: -(-part.end // self.shape.page_size)]
            row[: len(used)] = used
        self._numbers[len(slices) : batch, 0] = self.shape.spare_page
        self.pages_BP[:batch].copy_(self._host_BP[:batch], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Inputs:
    """Inputs of one bucket's forwards at fixed addresses: `batch` sequences, `rows` tokens in all.

    Padding tokens write to the spare page. Each is a one-token sequence while batch slots remain;
    further padding rows hold arbitrary values. Nothing reads padding.
    """

    def __init__(self, batch: int, rows: int, max_seqlen_q: int, table: BlockTable) -> None:
        self.batch = batch
        self.rows = rows
        self._table = table
        # First the 64-bit words, because their addresses must be multiples of 8.
        sizes = {
            "ancestors": 2 * rows,
            **dict.fromkeys(("token_ids", "positions", "slots", "slot_mapping"), rows),
            "cu_seqlens_q": batch + 1,
            **dict.fromkeys(("seq_lens", "tree_starts"), batch),
        }
        self._host, self._device = table.host_and_device(sum(sizes.values()))
        self._numbers = dict(
            zip(sizes, [t.numpy() for t in torch.split(self._host, [*sizes.values()])], strict=True)
        )
        self._words = self._numbers["ancestors"].view(np.uint64)
        device = dict(zip(sizes, torch.split(self._device, [*sizes.values()]), strict=True))
        self.token_ids = device["token_ids"]
        self.positions = device["positions"]
        self._device_slot_mapping = device["slot_mapping"]
        self._kernel = KernelArguments(
            device["cu_seqlens_q"], max_seqlen_q, device["seq_lens"], table.pages_BP[:batch],
            device["slots"], self.positions, device["tree_starts"],
            # A tree is two tokens at least: graphs for single tokens need no code for them.
            device["ancestors"].view(torch.int64), has_trees=max_seqlen_q > 1,
        )  # fmt: skip

    def layout(self) -> StaticLayout:
        """Return the layout for the layers.

        Call it within the capture, because it converts the slot mapping to int64.
        """
        return StaticLayout(self._device_slot_mapping.long(), self._kernel)

    def write(self, slices: Sequence[SequenceSlice]) -> None:
        """Write a batch and the padding behind it."""
        self._table.wait()
        shape = self._table.shape
        padding = self.rows - sum(len(part.token_ids) for part in slices)
        spare_slot = shape.spare_page * shape.page_size
        self._by_token("token_ids", (token for part in slices for token in part.token_ids))
        self._by_token("positions", (at for part in slices for at in part.positions))
        self._by_token("slots", (slot for part in slices for slot in part.slots))
        self._by_token("slot_mapping", slot_mapping(slices, shape.page_size), spare_slot)
        unused = self.batch - len(slices)
        singles = min(padding, unused)
        lengths = [len(part.token_ids) for part in slices]
        lengths += [1] * singles + [0] * (unused - singles)
        self._numbers["cu_seqlens_q"][:] = [0, *accumulate(lengths)]
        self._numbers["seq_lens"][:] = [part.end for part in slices] + [1] * unused
        self._numbers["tree_starts"][:] = [part.tree_start for part in slices] + [1] * unused
        if any(part.parents for part in slices):
            words = ancestors_by_token(slices)
            self._words[: len(words)] = words
        self._device.copy_(self._host, non_blocking=True)
        self._table.write(slices, self.batch)

    def _by_token(self, name: str, numbers: Iterable[int], padding: int = 0) -> None:
        """Write a number for each token, and the padding behind them."""
        written = [*numbers]
        self._numbers[name][:] = written + [padding] * (self.rows - len(written))


class Graphs:
    """Captures and replays forwards of decoding batches. Not thread-safe: use one thread."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor, StaticLayout], torch.Tensor],
        shape: CacheShape,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """Hold the graphs of `forward`, which `capture` makes.

        `forward` takes token ids [T], positions [T] and a layout, and returns logits [T, V]. It
        must not read their values on the host.
        """
        self._forward = forward
        self._shape = shape
        self._vocab_size = vocab_size
        self._device = device
        self._capture = _CudaCapture()
        self._bounds = Bounds(0, 0, 0)
        self._logits_RV = torch.empty(0)
        self._graphs: dict[tuple[int, int], tuple[Inputs, Replay]] = {}

    def capture(self, bounds: Bounds) -> None:
        """Capture a graph for each bucket within `bounds`.

        Stops when memory runs out. A model that cannot be captured gets no graphs.
        """
        started = time.monotonic()
        buckets = [
            (batch, mean)
            for batch in _up_to(bounds.sequences, _BATCHES)
            for mean in _means(batch, bounds)
        ]
        # Largest first, so that smaller graphs can reuse the memory of larger ones.
        buckets.sort(key=lambda bucket: bucket[0] * bucket[1], reverse=True)
        try:
            table = BlockTable(bounds.sequences, self._shape, self._device)
            self._logits_RV = torch.empty(bounds.tokens, self._vocab_size, device=self._device)
            for batch, mean in buckets:
                rows = min(batch * mean, bounds.tokens)
                inputs = Inputs(batch, rows, 1 if mean == 1 else bounds.tokens_each, table)
                self._graphs[batch, mean] = self._captured(inputs)
        except RuntimeError as cause:
            # A model that cannot be captured fails at its first graph.
            count = len(self._graphs)
            log.warning("captured only %d of %d CUDA graphs: %s", count, len(buckets), cause)
        self._bounds = bounds
        log.info("captured %d CUDA graphs in %.1f s", len(self._graphs), time.monotonic() - started)

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Replay the graph of the batch's bucket; return None if there is none.

        Returns float32 logits [R, V] for `logits_indices(slices)`, valid until the next call.
        """
        found = self._graphs.get(self._bucket([len(part.token_ids) for part in slices]))
        if found is None:
            return None
        inputs, replay = found
        inputs.write(slices)
        replay()
        rows = logits_indices(slices)
        if rows == list(range(len(rows))):
            return self._logits_RV[: len(rows)]
        return self._logits_RV[on(self._device, rows, torch.long)]

    def _bucket(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Return the smallest batch size that fits, then the smallest mean; (0, 0) if none fits."""
        bounds = self._bounds
        fits = len(lengths) <= bounds.sequences and max(lengths) <= bounds.tokens_each
        if not fits or sum(lengths) > bounds.tokens:
            return 0, 0
        batch = _at_least(len(lengths), _up_to(bounds.sequences, _BATCHES))
        # Graphs with a mean of 1 have a kernel grid for one token a sequence. Any other batch needs
        # the larger grid of a mean of at least 2.
        mean = 1 if max(lengths) == 1 else max(2, -(-sum(lengths) // batch))
        return batch, _at_least(mean, _means(batch, bounds))

    def _captured(self, inputs: Inputs) -> tuple[Inputs, Replay]:
        inputs.write([])

        def run() -> object:
            logits = self._forward(inputs.token_ids, inputs.positions, inputs.layout())
            return self._logits_RV[: inputs.rows].copy_(logits)

        return inputs, self._capture(run)


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes below `most`, then `most`."""
    return [*(size for size in sizes if size < most), most]


def _means(batch: int, bounds: Bounds) -> list[int]:
    """Return the means to capture, up to the first that reaches `bounds.tokens` in all."""
    means = _up_to(bounds.tokens_each, _MEANS)
    enough = sum(batch * mean < bounds.tokens for mean in means)
    return means[: enough + 1]


def _at_least(least: int, sizes: Sequence[int]) -> int:
    """Return the first of the ascending sizes that is no less than `least`."""
    return sizes[bisect_left(sizes, least)]


class _CudaCapture:
    """Captures graphs that share one memory pool, because only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # torch has no types for it.
        self._stream = cast(Any, torch.cuda.Stream)()

    def __call__(self, run: Callable[[], object]) -> Replay:
        """Capture `run`; raises RuntimeError if it waits for the device."""
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            # The first run creates what later ones reuse, such as cuBLAS's workspace. That must
            # not happen during a capture.
            run()
            _run_without_waits(run)
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local errors, because other threads may use the device meanwhile.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with capture:
                run()
        finally:
            # A failed capture does not restore the stream.
            torch.cuda.set_stream(before)
        return graph.replay


def _run_without_waits(run: Callable[[], object]) -> None:
    """Call `run`; raise RuntimeError if it waits for the device.

    The error comes before any capture has begun, so nothing has to be undone.
    """
    with warnings.catch_warnings():
        # Torch warns that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
