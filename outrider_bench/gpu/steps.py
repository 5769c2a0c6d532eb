"""The step `steps` of `bench/gpu.sh`: whole forwards, and the kernels that take longest."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.lm.pages import KVSequence
from outrider.lm.runner import Bounds, ModelRunner, SequenceSlice
from outrider_bench.gpu.result_lines import Device, Lines

_PAGE_SIZE = 16
# The number of a forward's kernels that are listed.
_LONGEST = 12


def _slices(batch: int, context: int, tokens: int) -> list[SequenceSlice]:
    """Return slices with chains of `tokens` tokens after `context` tokens, in scattered pages."""
    each = -(-(context + tokens) // _PAGE_SIZE)
    pages = Random(0).sample(range(batch * each), batch * each)
    # As in a service, the device knows the pages of a running sequence after its first step.
    sequences = [KVSequence(pages[i * each : (i + 1) * each]) for i in range(batch)]
    return [
        SequenceSlice([1] * tokens, context, sequence.pages, tokens, kv=sequence)
        for sequence in sequences
    ]


class _Model:
    """A model like a served model, with random weights drawn on the device."""

    def __init__(self, device: Device, name: str, tokens_each: int) -> None:
        # Until it is collected, an earlier model's cache fills the card.
        gc.collect()
        torch.cuda.empty_cache()
        self.name = name
        self._device = device
        config: Any = LlamaConfig(**device.sizes.models[name])
        before = torch.get_default_dtype()
        torch.set_default_dtype(device.dtype)
        with device.device:
            model: Any = LlamaForCausalLM(config)
        torch.set_default_dtype(before)
        self._bytes = sum(parameter.nbytes for parameter in model.parameters())
        if not config.tie_word_embeddings:
            # A step reads only one row of the embedding per token.
            self._bytes -= model.get_input_embeddings().weight.nbytes
        numbers = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        self._token_bytes = 2 * numbers * device.dtype.itemsize
        sizes = device.sizes
        self._bounds = Bounds(max(sizes.batches), tokens_each, sizes.forward_tokens)
        self.runner = ModelRunner(model, bounds=self._bounds)

    def holds(self, batch: int, context: int, tokens: int) -> bool:
        """Return whether a batch of this size fits the cache and one forward."""
        pages = batch * -(-(context + tokens) // _PAGE_SIZE)
        fits = batch * tokens <= self._device.sizes.forward_tokens
        return fits and pages <= self.runner.page_count

    def timed(self, slices: list[SequenceSlice]) -> tuple[float, float]:
        """Return the milliseconds of a forward on the device and on the host."""
        return self._device.timed(lambda: self.runner.forward(slices))

    def floor_ms(self, batch: int, context: int) -> float:
        """Return the least milliseconds of a step: it reads weights, keys and values once."""
        return self._device.floor_ms(self._bytes + batch * context * self._token_bytes)

    def capture(self, lines: Lines) -> None:
        """Capture graphs; print how long that took and how much memory the graphs hold."""
        began = time.perf_counter()
        self.runner.capture(self._bounds)
        seconds = time.perf_counter() - began
        held = {"graphs": self.runner.graph_count, "bytes": self.runner.graph_memory_bytes}
        lines.say(f"{self.name}, capture", seconds=seconds, **held)


def steps(lines: Lines, device: Device) -> None:
    """Measure steps of target and draft model as they are served."""
    sizes = device.sizes
    most = max(sizes.tokens)
    for name in sizes.models:
        tokens = sizes.tokens if name == "target" else [1]
        _steps(lines, _Model(device, name, most), sizes.contexts, tokens, sizes.beside_prompt)


def _steps(
    lines: Lines, model: _Model, contexts: list[int], tokens: list[int], beside: list[int]
) -> None:
    """Measure each cell's forward eagerly and as a graph, then chunks of prompts.

    A cell is a batch size, a context length and a number of tokens.
    """
    sizes = model._device.sizes
    cells = [cell for cell in product(sizes.batches, contexts, tokens) if model.holds(*cell)]
    for batch, context, count in cells:
        lines.check()
        ms, host_ms = model.timed(_slices(batch, context, count))
        cell = {"batch": batch, "context": context, "tokens": count}
        lines.say(model.name, **cell, eager_ms=ms, eager_host_ms=host_ms)
    model.capture(lines)
    for batch, context, count in cells:
        lines.check()
        ms, host_ms = model.timed(_slices(batch, context, count))
        floor_ms = model.floor_ms(batch, context)
        cell = {"batch": batch, "context": context, "tokens": count}
        figures = {"graph_ms": ms, "host_ms": host_ms, "floor_ms": floor_ms}
        lines.say(model.name, **cell, **figures, share=floor_ms / ms)
    short = [cell for cell in cells if cell[1] == contexts[0]]
    for shape in (short[0], short[-1]):
        _longest_kernels(lines, model, *shape)
    for others in beside:
        lines.check()
        # A prompt's chunk fills the rest of the forward.
        length = sizes.forward_tokens - others
        slices = _slices(others + 1, contexts[0], length)
        decoding = [replace(part, token_ids=[1], logit_count=1) for part in slices[:-1]]
        ms, host_ms = model.timed([*decoding, replace(slices[-1], logit_count=1)])
        cell = {"batch": others + 1, "context": contexts[0], "tokens": length}
        lines.say(f"{model.name}, a prompt beside others", **cell, ms=ms, host_ms=host_ms)


def _longest_kernels(lines: Lines, model: _Model, batch: int, context: int, tokens: int) -> None:
    """Print the kernels that take most of a forward's time."""
    if not model._device.is_gpu:
        return
    slices = _slices(batch, context, tokens)
    model.runner.forward(slices)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        model.runner.forward(slices)
        torch.cuda.synchronize()
    by_time = sorted(profiled.key_averages(), key=lambda event: -event.device_time_total)
    cell = {"batch": batch, "context": context, "tokens": tokens}
    for rank, event in enumerate(by_time[:_LONGEST]):
        figures = {"kernel": event.key[:80], "us": event.device_time_total, "calls": event.count}
        lines.say(f"{model.name}, kernel {rank + 1}", **cell, **figures)
