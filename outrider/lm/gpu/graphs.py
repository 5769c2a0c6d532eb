"""Runs whole forwards as CUDA graphs, each captured for a padded batch size (a bucket).

One call launches a graph with the hundreds of kernels of a step. A graph repeats its kernels with
the same addresses and the same numbers as arguments. So a forward's inputs lie in arrays with fixed
addresses, all graphs share one block table, and the logits go to a fixed array too.
"""

from __future__ import annotations

import logging
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from outrider.lm.gpu.inputs import BlockTable, Bucket, CacheShape, Inputs
from outrider.lm.hidden_states import HiddenStates
from outrider.lm.layout import SequenceSlice, StaticLayout

log = logging.getLogger(__name__)

Replay = Callable[[], object]
CaptureGraph = Callable[[Callable[[], object]], Replay]
"""Captures what a function launches; raises RuntimeError if it waits for the device."""

# The sizes of decoding batches: numbers of sequences, and mean numbers of tokens per sequence.
# Padding adds at most half to the number of sequences if there are 16 or more, and at most half to
# the mean if it is 2 or more.
_LARGE_BATCHES = tuple(
    size for power in range(4, 12) for size in (3 * 2 ** (power - 1), 2 ** (power + 1))
)
_BATCHES = (1, 2, 4, 8, 16, *_LARGE_BATCHES)
_MEANS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# The numbers of tokens of batches with a prompt. Fewer than 128 tokens cost a large model as much
# time as 128.
_PROMPT_ROWS = tuple(2**power for power in range(7, 14))


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest forward to capture: sequences, tokens of one sequence, tokens in all.

    A batch in which a sequence has more than `tokens_each` tokens, as most prompts do, uses a graph
    that serves any number of sequences.
    """

    sequences: int
    tokens_each: int
    tokens: int


def buckets(bounds: Bounds) -> list[Bucket]:
    """Return the buckets to capture, those with the most tokens first.

    In this order, smaller graphs can reuse the memory of larger graphs.
    """
    decoding = [
        _decoding(batch, mean, bounds)
        for batch in _up_to(bounds.sequences, _BATCHES)
        for mean in _means(batch, bounds)
    ]
    mixed = [_mixed(rows, bounds) for rows in _up_to(bounds.tokens, _PROMPT_ROWS)]
    found = dict.fromkeys([*mixed, *decoding])
    return sorted(found, key=lambda bucket: bucket.rows, reverse=True)


def bucket_of(lengths: Sequence[int], bounds: Bounds) -> Bucket | None:
    """Return the bucket of a batch whose slices have these `lengths`; None if none fits.

    A decoding batch gets the smallest batch size that fits, and with this size the smallest mean
    that fits.
    """
    total = sum(lengths)
    if len(lengths) > bounds.sequences or total > bounds.tokens:
        return None
    if max(lengths) > bounds.tokens_each:
        return _mixed(_at_least(total, _up_to(bounds.tokens, _PROMPT_ROWS)), bounds)
    batch = _at_least(len(lengths), _up_to(bounds.sequences, _BATCHES))
    # Graphs with a mean of 1 are for one token per sequence. Any other batch needs a mean of at
    # least 2.
    mean = 1 if max(lengths) == 1 else max(2, -(-total // batch))
    return _decoding(batch, _at_least(mean, _means(batch, bounds)), bounds)


def _decoding(batch: int, mean: int, bounds: Bounds) -> Bucket:
    longest = 1 if mean == 1 else bounds.tokens_each
    return Bucket(batch, min(batch * mean, bounds.tokens), longest)


def _mixed(rows: int, bounds: Bounds) -> Bucket:
    return Bucket(min(bounds.sequences, rows), rows, rows)


class Graphs:
    """Captures and replays forwards. Not thread-safe: use one thread."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor, StaticLayout], torch.Tensor],
        shape: CacheShape,
        vocab_size: int,
        device: torch.device,
        states: HiddenStates | None = None,
    ) -> None:
        """Hold the graphs of `forward`; `capture` creates these graphs.

        `forward` takes token ids [T], positions [T] and a layout, and returns logits [T, V].
        `forward` must not read the values of these tensors on the host. The graphs keep the hidden
        states that `states` watches during the capture.
        """
        self._forward = forward
        self._shape = shape
        self._vocab_size = vocab_size
        self._device = device
        self._states = states
        self._kept: dict[int, torch.Tensor] = {}
        self._capture = new_capture()
        self._bounds = Bounds(0, 0, 0)
        self._logits_RV = torch.empty(0)
        self._graphs: dict[Bucket, tuple[Inputs, Replay]] = {}
        self.memory_bytes = 0
        """Device memory that the graphs took: free memory before their capture minus after it."""

    @property
    def count(self) -> int:
        """The number of captured graphs."""
        return len(self._graphs)

    @property
    def states(self) -> Collection[int]:
        """The numbers of the hidden states that the graphs keep."""
        return self._kept.keys()

    def kept(self, token_count: int) -> dict[int, torch.Tensor]:
        """Return the hidden states of the last forward, each [T, H], valid until the next call."""
        return {state: rows[:token_count] for state, rows in self._kept.items()}

    def capture(self, bounds: Bounds) -> None:
        """Capture a graph for each bucket within `bounds`.

        A bucket for which memory does not suffice gets no graph. A model that cannot be captured
        gets no graphs at all. Raises torch.AcceleratorError if the device failed.
        """
        started = time.monotonic()
        free_before = _free_bytes(self._device)
        wanted = buckets(bounds)
        try:
            table = BlockTable(bounds.sequences, self._shape, self._device)
            self._logits_RV = torch.empty(bounds.tokens, self._vocab_size, device=self._device)
            if self._states is not None:
                self._kept = {
                    state: self._states.empty(bounds.tokens) for state in self._states.watched
                }
            for bucket in wanted:
                self._capture_bucket(bucket, table)
        except torch.AcceleratorError:
            raise  # the device is lost for this process
        except RuntimeError as cause:
            # A model that cannot be captured fails at its first graph.
            log.warning("captured only %d of %d CUDA graphs: %s", self.count, len(wanted), cause)
        self._bounds = bounds
        self.memory_bytes = max(0, free_before - _free_bytes(self._device))
        log.info(
            "captured %d CUDA graphs in %.1f s; they take %.2f GiB",
            self.count,
            time.monotonic() - started,
            self.memory_bytes / 2**30,
        )

    def _capture_bucket(self, bucket: Bucket, table: BlockTable) -> None:
        """Capture a bucket's forward; log a warning instead if memory does not suffice."""
        try:
            inputs = Inputs(bucket, table)
            inputs.write([])

            def run() -> object:
                logits = self._forward(inputs.token_ids, inputs.positions, inputs.layout())
                if self._states is not None:
                    for state, rows in self._states.take().items():
                        self._kept[state][: bucket.rows].copy_(rows)
                return self._logits_RV[: bucket.rows].copy_(logits)

            self._graphs[bucket] = inputs, self._capture(run)
        except torch.OutOfMemoryError as cause:
            shape = f"{bucket.batch} sequences and {bucket.rows} tokens"
            log.warning("no CUDA graph for %s: %s", shape, cause)

    def largest_forward(self, bounds: Bounds) -> Callable[[], torch.Tensor]:
        """Return a function that runs the largest forward within `bounds` without a graph.

        The returned function runs the forward on padding, and returns the logits [`bounds.tokens`,
        V].
        """
        table = BlockTable(bounds.sequences, self._shape, self._device)
        inputs = Inputs(_mixed(bounds.tokens, bounds), table)
        inputs.write([])
        return lambda: self._forward(inputs.token_ids, inputs.positions, inputs.layout())

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Replay the graph of the batch's bucket; return None if there is none.

        Returns float32 logits [R, V] for `logits_indices(slices)`, valid until the next call.
        """
        bucket = bucket_of([len(part.token_ids) for part in slices], self._bounds)
        found = self._graphs.get(bucket) if bucket is not None else None
        if found is None:
            return None
        inputs, replay = found
        rows_R = inputs.write(slices)
        replay()
        if rows_R is None:
            return self._logits_RV[: sum(part.logit_count for part in slices)]
        return self._logits_RV.index_select(0, rows_R)

    def continue_greedily(
        self, slices: Sequence[SequenceSlice], count: int, limit: int, *, keep_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Decode `count` tokens for slices of one token each, without a wait for the device.

        Each new token is the likeliest token below `limit`, and the input of the next forward.
        Return the tokens, int64 [count, B], and the logits: with `keep_logits` [count, B, V], else
        an empty tensor. Return None if the batch has no graph.
        """
        bucket = bucket_of([1] * len(slices), self._bounds)
        found = self._graphs.get(bucket) if bucket is not None else None
        if found is None or bucket is None:
            return None
        inputs, replay = found
        inputs.write(slices, ahead=count - 1)
        tokens_B = torch.empty(0)
        tokens: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        for step in range(count):
            if step:
                inputs.advance()
                inputs.token_ids.copy_(tokens_B)
            replay()
            tokens_B = self._logits_RV[: bucket.rows, :limit].argmax(-1)
            tokens.append(tokens_B)
            if keep_logits:
                kept.append(self._logits_RV[: len(slices)].clone())
        logits = torch.stack(kept) if kept else torch.empty(0)
        return torch.stack(tokens)[:, : len(slices)], logits


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.mem_get_info(device)[0]


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes below `most`, followed by `most`."""
    return [*(size for size in sizes if size < most), most]


def _means(batch: int, bounds: Bounds) -> list[int]:
    """Return the means to capture.

    The last is the first mean with which `batch` sequences have `bounds.tokens` tokens or more, if
    there is such a mean.
    """
    means = _up_to(bounds.tokens_each, _MEANS)
    enough = sum(batch * mean < bounds.tokens for mean in means)
    return means[: enough + 1]


def _at_least(least: int, sizes: Sequence[int]) -> int:
    """Return the first of the ascending sizes that is at least `least`."""
    return sizes[bisect_left(sizes, least)]


def new_capture() -> CaptureGraph:
    """Return a function that captures graphs. Only one of these graphs may run at a time."""
    return _CudaCapture()


class _CudaCapture:
    """Captures graphs that share one memory pool, because only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # torch has no types for `Stream`.
        self._stream = cast(Any, torch.cuda.Stream)()

    def __call__(self, run: Callable[[], object]) -> Replay:
        """Capture `run`; raise RuntimeError if it waits for the device."""
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            # The first run creates what later runs reuse, such as cuBLAS's workspace; a capture
            # must not create it.
            run()
            _run_without_waits(run)
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # In this mode only the calls of this thread can break the capture: other threads may use
        # the device meanwhile.
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

    The error is raised before any capture starts, so nothing has to be undone. Other threads that
    wait meanwhile would get the error too, so a process captures while it loads, before any of its
    drafters runs.
    """
    with warnings.catch_warnings():
        # Torch warns that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
