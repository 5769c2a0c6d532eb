"""The steps of `bench/gpu.sh` that need no services: kernels and whole forwards."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from random import Random
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.lm.gpu.triton_attention import paged_attention
from outrider.lm.layout import BatchLayout
from outrider.lm.pages import KVSequence
from outrider.lm.runner import Bounds, ModelRunner, SequenceSlice
from outrider.protocol.messages import AcceptanceRule, SamplingParams
from outrider.sampling.context import Context
from outrider_bench.gpu.lines import Device, Lines
from verifier_svc.verification.acceptance import accept
from verifier_svc.verification.draft import Draft

_PAGE_SIZE = 16
# Keys of all sequences together that fit a card beside the weights.
_MOST_KEYS = 300_000
# Kernels of a forward that are listed.
_LONGEST = 12
_HOW = {
    "greedy": SamplingParams(0.0),
    "temperature 1": SamplingParams(1.0),
    "top-p": SamplingParams(0.7, top_p=0.9),
    "top-k and top-p": SamplingParams(0.7, top_k=50, top_p=0.9),
    "greedy, penalties": SamplingParams(0.0, repetition_penalty=1.1, presence_penalty=0.5),
}


def kernels(lines: Lines, device: Device) -> None:
    """Measure attention of one layer of the target, and acceptance with its vocabulary."""
    sizes = device.sizes
    for context, batch, tokens in product(sizes.contexts, sizes.batches, sizes.tokens):
        lines.check()
        if batch * context <= _MOST_KEYS:
            _attention(lines, device, batch, context, tokens)
    for batch, how in product(sizes.batches, _HOW):
        lines.check()
        _acceptance(lines, device, batch, how)


def _slices(batch: int, context: int, tokens: int) -> list[SequenceSlice]:
    """Chains of `tokens` behind `context` tokens each, in pages scattered over a cache."""
    each = -(-(context + tokens) // _PAGE_SIZE)
    pages = Random(0).sample(range(batch * each), batch * each)
    # As in a service, the device knows the pages of a running sequence after its first step.
    sequences = [KVSequence(pages[i * each : (i + 1) * each]) for i in range(batch)]
    return [
        SequenceSlice([1] * tokens, context, sequence.pages, tokens, kv=sequence)
        for sequence in sequences
    ]


def _attention(lines: Lines, device: Device, batch: int, context: int, tokens: int) -> None:
    config: Any = LlamaConfig(**device.sizes.models["target"])
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    options: dict[str, Any] = {"dtype": device.dtype, "device": device.device}
    slices = _slices(batch, context, tokens)
    pages = sum(len(part.pages) for part in slices)
    cache = torch.randn(2, pages, _PAGE_SIZE, kv_heads, size, **options)
    query = torch.randn(batch * tokens, heads, size, **options)
    arguments = BatchLayout(slices, _PAGE_SIZE, device.device).kernel
    how = {"max_seq_len": config.max_position_embeddings, "scale": size**-0.5}
    ms = device.kernel_ms(lambda: paged_attention(query, cache[0], cache[1], arguments, **how))
    # The keys as torch likes them best: contiguous, of one length, all visible to every row.
    rows = query.view(batch, tokens, heads, size).transpose(1, 2)
    keys, values = cache.view(2, batch, -1, kv_heads, size).transpose(2, 3).contiguous()
    torch_ms = device.kernel_ms(
        lambda: scaled_dot_product_attention(rows, keys, values, enable_gqa=True)
    )
    floor_ms = device.floor_ms(batch * context * kv_heads * size * 2 * cache.itemsize)
    figures = {"ms": ms, "torch_ms": torch_ms, "of_torch": torch_ms / ms, "floor_ms": floor_ms}
    cell = {"batch": batch, "context": context, "tokens": tokens}
    lines.say("attention", **cell, **figures, share=floor_ms / ms)


def _acceptance(lines: Lines, device: Device, batch: int, how: str) -> None:
    tokens = device.sizes.tokens[-1]
    vocab_size = device.sizes.models["target"]["vocab_size"]
    logits_RV = 3 * torch.randn(batch * tokens, vocab_size, device=device.device)
    rule = AcceptanceRule.GREEDY if _HOW[how].greedy else AcceptanceRule.COUPLED
    context = Context(_HOW[how], [1] * 4000, 3000, [1] * (tokens - 1))
    drafts = [Draft(context, seed, rule) for seed in range(batch)]
    # Acceptance ends with a copy to the host, so the host's time is the whole.
    _, ms = device.timed(lambda: accept(logits_RV, drafts))
    floor_ms = device.floor_ms(logits_RV.nbytes)
    cell = {"batch": batch, "tokens": tokens, "ms": ms, "floor_ms": floor_ms}
    lines.say(f"acceptance, {how}", **cell, share=floor_ms / ms)


class _Model:
    """A model with random weights that were drawn on the device, in service."""

    def __init__(self, device: Device, name: str, tokens_each: int, *, fused: bool = True) -> None:
        # An earlier model's cache fills the card.
        gc.collect()
        torch.cuda.empty_cache()
        self.name = name if fused else f"{name}, not fused"
        self._device = device
        config: Any = LlamaConfig(**device.sizes.models[name])
        before = torch.get_default_dtype()
        torch.set_default_dtype(device.dtype)
        with device.device:
            model: Any = LlamaForCausalLM(config)
        torch.set_default_dtype(before)
        self._bytes = sum(parameter.nbytes for parameter in model.parameters())
        if not config.tie_word_embeddings:
            # A step reads a row a token of the embedding.
            self._bytes -= model.get_input_embeddings().weight.nbytes
        numbers = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        self._token_bytes = 2 * numbers * device.dtype.itemsize
        sizes = device.sizes
        self._bounds = Bounds(max(sizes.batches), tokens_each, sizes.forward_tokens)
        self.runner = ModelRunner(model, bounds=self._bounds, fused_layers=fused)

    def holds(self, batch: int, context: int, tokens: int) -> bool:
        """Whether such a batch fits the cache and one forward."""
        pages = batch * -(-(context + tokens) // _PAGE_SIZE)
        fits = batch * tokens <= self._device.sizes.forward_tokens
        return fits and pages <= self.runner.page_count

    def timed(self, slices: list[SequenceSlice]) -> tuple[float, float]:
        """Milliseconds of a forward on the device and on the host."""
        return self._device.timed(lambda: self.runner.forward(slices))

    def floor_ms(self, batch: int, context: int) -> float:
        """The least time of a step: weights and keys are read once."""
        return self._device.floor_ms(self._bytes + batch * context * self._token_bytes)

    def capture(self, lines: Lines) -> None:
        """Capture graphs; says how long that took and what memory they hold."""
        began = time.perf_counter()
        self.runner.capture(self._bounds)
        seconds = time.perf_counter() - began
        held = {"graphs": self.runner.graph_count, "bytes": self.runner.graph_memory_bytes}
        lines.say(f"{self.name}, capture", seconds=seconds, **held)


def steps(lines: Lines, device: Device) -> None:
    """Measure steps of target and draft model as they are served, and without fused layers."""
    sizes = device.sizes
    most = max(sizes.tokens)
    if device.is_gpu and find_spec("liger_kernel") is not None:
        # First, because fused layers leave their rotary embedding to later models.
        for name in sizes.models:
            _steps(lines, _Model(device, name, most, fused=False), sizes.contexts[:1], [1], [])
    else:
        lines.say("not fused", left_out="all are, without a GPU or liger-kernel")
    for name in sizes.models:
        tokens = sizes.tokens if name == "target" else [1]
        _steps(lines, _Model(device, name, most), sizes.contexts, tokens, sizes.beside_prompt)


def _steps(
    lines: Lines, model: _Model, contexts: list[int], tokens: list[int], beside: list[int]
) -> None:
    """Measure each cell's forward eagerly and then as a graph; then chunks of prompts."""
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
        # A prompt's chunk fills the forward.
        length = sizes.forward_tokens - others
        slices = _slices(others + 1, contexts[0], length)
        decoding = [replace(part, token_ids=[1], logit_count=1) for part in slices[:-1]]
        ms, host_ms = model.timed([*decoding, replace(slices[-1], logit_count=1)])
        cell = {"batch": others + 1, "context": contexts[0], "tokens": length}
        lines.say(f"{model.name}, a prompt beside others", **cell, ms=ms, host_ms=host_ms)


def _longest_kernels(lines: Lines, model: _Model, batch: int, context: int, tokens: int) -> None:
    """Say which kernels of a forward take most of its time."""
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
