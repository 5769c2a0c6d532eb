"""The KV cache on a GPU leaves room for the largest step, its graphs and other processes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.errors import OutriderError
from outrider.lm.gpu import memory
from outrider.lm.gpu.graphs import buckets
from outrider.lm.runner import Bounds, ModelRunner, SequenceSlice
from outrider.protocol.messages import SamplingParams
from outrider.sampling.sampler import target_probs
from tests.lm.recorded_graphs import Capture, tensors
from tests.lm.tiny_models import CONFIGS, VOCAB_SIZE, build

GIB = 2**30
BOUNDS = Bounds(sequences=4, tokens_each=9, tokens=64)


def test_a_share_is_of_the_whole_card_so_that_processes_may_start_in_any_order() -> None:
    total = 80 * GIB
    target = {"own": 16 * GIB, "step": 4 * GIB, "share": 0.85}
    draft = {"own": 2 * GIB, "step": 2 * GIB, "share": 0.15}
    cache = memory.cache_bytes(total, free=62 * GIB, **target)
    draft_cache = memory.cache_bytes(total, free=62 * GIB, **draft)
    taken = 16 + 4 + 2 + 2 + 2 * memory._CONTEXT_BYTES / GIB
    assert cache + draft_cache == pytest.approx((80 - taken) * GIB, abs=2)


def test_the_cache_is_not_larger_than_what_other_processes_left() -> None:
    assert memory.cache_bytes(24 * GIB, 5 * GIB, 16 * GIB, 3 * GIB, 0.95) == 2 * GIB
    assert memory.cache_bytes(24 * GIB, 2 * GIB, 16 * GIB, 3 * GIB, 0.95) < 0


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operators create, as CUDA's allocator does."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: Counter[int] = Counter()
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {self._place(tensor)[0] for tensor in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            place, size = self._place(tensor)
            if place in self._holders or place not in known:
                if not self._holders[place]:
                    self.now += size
                self._holders[place] += 1
                weakref.finalize(tensor, self._drop, place, size)
        self.peak = max(self.peak, self.now)
        return out

    def _place(self, tensor: torch.Tensor) -> tuple[int, int]:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def _drop(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._holders[place]
            self.now -= size


def peak_bytes(run: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor]:
    with LiveBytes() as live:
        result = run()
    return live.peak, result


def measured(monkeypatch: pytest.MonkeyPatch, context_length: int = 256) -> int:
    """Return the bytes of a small model's largest step, less the constant for each CUDA graph."""
    monkeypatch.setattr(memory, "_peak_bytes", peak_bytes)
    config = CONFIGS["llama"]
    sizes = {"max_position_embeddings": context_length}
    runner = ModelRunner(build(type(config)(**config.to_diff_dict() | sizes)), page_count=16)
    step = runner._largest_step_bytes(BOUNDS)
    return step - len(buckets(BOUNDS)) * memory._GRAPH_BYTES


def test_the_measured_step_holds_a_full_batch_with_its_logits_and_sampling(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = measured(monkeypatch)
    runner = ModelRunner(build(CONFIGS["llama"]), page_count=16)
    slices = [SequenceSlice([1] * 16, 100, [4 * i + j for j in range(4)] * 2, 16) for i in range(4)]
    forward_bytes, logits_RV = peak_bytes(lambda: runner.forward(slices))
    assert logits_RV.shape == (BOUNDS.tokens, VOCAB_SIZE)
    settings = [SamplingParams(0.8, top_k=9, top_p=0.9)] * BOUNDS.tokens
    sampling_bytes, _ = peak_bytes(lambda: target_probs(logits_RV, settings))
    graphs_bytes = forward_bytes + logits_RV.nbytes
    assert step >= graphs_bytes + max(forward_bytes, sampling_bytes)
    assert step < 4 * (graphs_bytes + max(forward_bytes, sampling_bytes))


def test_the_measured_step_grows_with_the_batch(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = measured(monkeypatch)
    monkeypatch.setitem(globals(), "BOUNDS", Bounds(sequences=4, tokens_each=9, tokens=128))
    assert measured(monkeypatch) > 1.8 * small


def test_a_card_without_room_for_the_cache_is_refused_with_its_sizes(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_peak_bytes", peak_bytes)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 24 * GIB))
    runner = ModelRunner(build(CONFIGS["llama"]), page_count=16)
    assert runner._gpu_cache_bytes(BOUNDS, 0.9, 4096) > 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 24 * GIB))
    with pytest.raises(OutriderError, match=r"no memory is left for its KV cache: .*21\.6 GiB"):
        runner._gpu_cache_bytes(BOUNDS, 0.9, 4096)
