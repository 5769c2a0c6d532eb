"""A step's launches and waits: its inputs go up to the device once, its tokens come back once.

On a CPU nothing waits, so the tests count calls that would wait for a GPU. Acceptance runs on a
fake device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.lm.pages import KVSequence, PagePool
from outrider.lm.runner import Bounds, ModelRunner, SequenceSlice
from outrider.protocol.messages import AcceptanceRule, SamplingParams
from outrider.sampling.context import Context
from tests.accepting import accept
from tests.fake_device import DEVICE, FakeDevice
from tests.lm.recorded_graphs import Capture, tensors
from tests.lm.tiny_models import CONFIGS, VOCAB_SIZE, build
from verifier_svc.verification.draft import Draft

BATCH, ROWS = 8, 5
_WAITS = {
    torch.Tensor.cpu,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.nonzero,
    torch.nonzero,
    torch.masked_select,
    torch.Tensor.masked_select,
    torch.Tensor.unique,
    torch.unique,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}
"""Calls that read a tensor, or need its values for a shape."""


class _Calls(TorchFunctionMode):
    """Counts calls that wait for a device, and copies to it."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_mask = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and any(
            tensor.dtype is torch.bool for tensor in tensors(args[1])
        )
        if func in _WAITS or by_mask:
            self._counts["waits"] += 1
        # Copies with `non_blocking` go to the device; all other copies are between tensors of the
        # device.
        if kwargs.get("non_blocking"):
            self._counts["copies up"] += 1
        return func(*args, **kwargs)


class _Launches(TorchDispatchMode):
    """Counts operators that compute: neither views nor new memory."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            self._counts["launches"] += 1
        return out


def counted(run: Callable[[], object]) -> Counter[str]:
    counts: Counter[str] = Counter()
    with torch.inference_mode(), _Calls(counts), _Launches(counts):
        run()
    return counts


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "cpu": lambda t: t.cpu(),
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t.any()),
    "int": lambda t: int(t.sum()),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 1],
}


@pytest.mark.parametrize("how", WAITS)
def test_every_way_to_wait_is_counted(how: str) -> None:
    assert counted(lambda: WAITS[how](torch.arange(3)))["waits"] == 1


SETTINGS = {
    "greedy": SamplingParams(0.0),
    "coupled": SamplingParams(1.0),
    "top-k and top-p": SamplingParams(0.7, top_k=20, top_p=0.9),
    "penalties": SamplingParams(0.0, repetition_penalty=1.1, presence_penalty=0.1),
}


@pytest.mark.parametrize("shape", ["chains", "trees"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_step_copies_its_inputs_up_once_and_waits_once(
    setting: str, shape: str, capture: Capture
) -> None:
    sampling = SETTINGS[setting]
    runner = ModelRunner(build(CONFIGS["llama"]), page_size=16, page_count=64)
    runner.capture(Bounds(BATCH, ROWS, BATCH * ROWS))
    pool = PagePool(64, 16)
    kept = [KVSequence() for _ in range(BATCH)]
    parents = [0, 0, 1, 1] if shape == "trees" else []
    rule = AcceptanceRule.GREEDY if sampling.greedy else AcceptanceRule.COUPLED

    def forward(length: int) -> torch.Tensor:
        for kv in kept:
            assert pool.reserve(kv, length + ROWS)
        slices = [SequenceSlice([3] * ROWS, length, kv.pages, ROWS, parents, kv) for kv in kept]
        return runner.forward(slices)

    def draft(length: int) -> list[Draft]:
        context = Context(sampling, [3] * length, length // 2, [3] * (ROWS - 1), parents=parents)
        return [Draft(context, seed, rule) for seed in range(BATCH)]

    forward(17)
    replays = capture.replays
    # This step needs no pages but those of the first step, whose numbers the device already has. So
    # only the inputs are copied to the device. The copy is the only launch besides the graph's.
    assert counted(lambda: forward(22)) == {"copies up": 1, "launches": 1}
    # Each sequence needs one more page. One copy sends the numbers of all these pages, and one
    # kernel writes them.
    assert counted(lambda: forward(28)) == {"copies up": 2, "launches": 2}
    assert capture.replays == replays + 2
    logits_RV = forward(22)
    assert logits_RV.shape == (BATCH * ROWS, VOCAB_SIZE)
    with FakeDevice() as device:
        accept(device.put(logits_RV), draft(22))
    # Plain greedy acceptance needs no numbers from the host.
    assert (device.copies, device.waits) == (int(setting != "greedy"), 1)


def test_a_round_of_a_draft_model_copies_up_once_and_waits_once(capture: Capture) -> None:
    runner = ModelRunner(build(CONFIGS["llama"]), page_size=16, page_count=64)
    runner.capture(Bounds(BATCH, ROWS, BATCH * ROWS))
    pool = PagePool(64, 16)
    kept = [KVSequence() for _ in range(BATCH)]

    def draft(length: int, count: int) -> None:
        for kv in kept:
            assert pool.reserve(kv, length + count)
        slices = [SequenceSlice([3], length, kv.pages, 1, kv=kv) for kv in kept]
        assert runner.continue_greedily(slices, count, VOCAB_SIZE) is not None

    draft(17, 4)
    capture.replays = 0
    round_of_4 = counted(lambda: draft(19, 4))
    assert capture.replays == 4
    round_of_5 = counted(lambda: draft(19, 5))
    # There are 3 launches in all for the copy of the inputs, the first argmax and the stack. Each
    # further token has 8 launches for its inputs and its argmax.
    assert round_of_4 == {"copies up": 1, "waits": 1, "launches": 3 + 3 * 8}
    assert round_of_5 == {"copies up": 1, "waits": 1, "launches": 3 + 4 * 8}
    # The further pages of the round go up together.
    assert counted(lambda: draft(30, 4)) == {"copies up": 2, "waits": 1, "launches": 4 + 3 * 8}


FACTORIES: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.tensor([1, 2], device=DEVICE),
    "as_tensor": lambda: torch.as_tensor([1, 2], device=DEVICE),
    "to": lambda: torch.arange(2).to(DEVICE),
    "copy_": lambda: torch.zeros(2, device=DEVICE).copy_(torch.ones(2)),
}


@pytest.mark.parametrize("how", FACTORIES)
def test_a_blocking_copy_to_the_device_is_a_wait(how: str) -> None:
    with FakeDevice() as device:
        made = FACTORIES[how]()
        assert (device.copies, device.waits) == (1, 1)
        made.copy_(torch.zeros(2), non_blocking=True)
    assert (made.device, device.copies, device.waits) == (DEVICE, 2, 1)


def test_picked_states_are_ready_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(build(CONFIGS["llama"]), page_size=16, page_count=8)
    runner.watch([1])
    runner.forward([SequenceSlice([3, 4, 5], 0, [0], 1)])
    wanted = runner.pick_states([1], [0, 2], "float32")
    with FakeDevice() as device:
        monkeypatch.setattr(runner, "kept", {1: device.put(runner.kept[1])})
        monkeypatch.setattr(runner, "device", DEVICE)
        found = runner.pick_states([1], [0, 2], "float32")
        assert (device.copies, device.waits) == (1, 0)
        assert found.tolist() == wanted.tolist()


def test_a_batch_with_a_prompt_waits_no_more_than_others(capture: Capture) -> None:
    runner = ModelRunner(build(CONFIGS["llama"]), page_size=16, page_count=64)
    runner.capture(Bounds(BATCH, ROWS, BATCH * ROWS))
    capture.replays = 0
    slices = [
        SequenceSlice([3] * 11, 0, [5], 0),
        SequenceSlice([3], 20, [7, 8], 1),
    ]
    assert counted(lambda: runner.forward(slices))["waits"] == 0
    assert capture.replays == 1
