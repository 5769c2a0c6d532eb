"""A model with fused layers gives the logits of the plain model with fewer launches.

With the fixture `kernels`, a layer's kernels are the real ones, which run on a GPU, or by Triton's
interpreter on a CPU. Without the fixture, they are plain versions.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from outrider.lm import attention, runner
from outrider.lm.fused_linear import FusedLinearPart
from outrider.lm.gpu import fused_layers, triton_attention
from outrider.lm.runner import Bounds, ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import FINAL_STATE
from tests.lm import reference_layers
from tests.lm.recorded_graphs import Capture
from tests.lm.reference_kernel import paged_attention
from tests.lm.tiny_models import CONFIGS, SIZES, build

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = [SequenceSlice([5, 9, 11, 3], 0, [0], 4), SequenceSlice([7, 2], 0, [3], 2)]
SHORT = [SequenceSlice([5, 9], 0, [0], 2), SequenceSlice([7], 0, [3], 1)]
LLAMA_LIKE: dict[str, PreTrainedConfig] = {
    "llama": CONFIGS["llama"],
    "mistral, sliding window": CONFIGS["mistral, sliding window"],
    "mistral, large heads": MistralConfig(**SIZES, head_dim=40, sliding_window=None),
    "qwen2, biases": Qwen2Config(**SIZES),
    "qwen3, norms of heads": CONFIGS["qwen3"],
}
OTHERS = ("gemma", "phi3, fused projections", "gpt2, learned positions")
KERNELS = ("add_norm", "rotate_and_store", "silu_product")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse layers on a CPU, with plain versions of the kernels."""
    monkeypatch.setattr(runner, "triton_works", lambda device: True)
    monkeypatch.setattr(attention.LayerCache, "supports_kernel", lambda self, device: True)
    monkeypatch.setattr(ModelRunner, "_takes_graphs", lambda self: False)
    monkeypatch.setattr(triton_attention, "paged_attention", paged_attention)
    for name in KERNELS:
        monkeypatch.setattr(fused_layers, name, getattr(reference_layers, name))


@pytest.fixture
def kernels(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the real kernels. The comparison at start is left out, since it would take a minute."""
    from outrider.lm.gpu import layer_kernels

    for name in KERNELS:
        monkeypatch.setattr(fused_layers, name, getattr(layer_kernels, name))
    monkeypatch.setattr(ModelRunner, "_compare", lambda self, texts, own: None)
    monkeypatch.setattr(ModelRunner, "_compare_rounding", lambda self, fused: None)


def served(
    config: PreTrainedConfig, *, fused: bool = True, dtype: torch.dtype | None = None
) -> Any:
    return ModelRunner(build(config).to(dtype), page_count=16, fused_layers=fused)


def logits_of(made: ModelRunner, batch: list[SequenceSlice] = BATCH) -> torch.Tensor:
    return made.forward(batch).clone()


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3, norms of heads"])
def test_the_kernels_give_the_models_own_logits(name: str, kernels: None) -> None:
    config = LLAMA_LIKE[name]
    made = served(config)
    assert made.fused is not None
    same(logits_of(made, SHORT), logits_of(served(config, fused=False), SHORT))


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_fused_layers_give_the_models_own_logits_and_hidden_states(name: str, gpu: None) -> None:
    config = LLAMA_LIKE[name]
    states = [0, 1, 3, FINAL_STATE]
    made = []
    for fused in (False, True):
        one = served(config, fused=fused)
        assert (one.fused is not None) == fused
        one.watch(states)
        logits = logits_of(one)
        made.append((logits, [one.kept[state].clone() for state in states]))
        # The texts continue from the written cache: the first as a tree, the second as a chain.
        later = [SequenceSlice([8, 1, 2], 4, [0], 3, [0, 0]), SequenceSlice([4], 2, [3], 1)]
        made[-1][1].append(logits_of(one, later))
    (own_logits, own_states), (logits, kept) = made
    same(logits, own_logits)
    for found, wanted in zip(kept, own_states, strict=True):
        same(found, wanted)


def test_graphs_repeat_fused_layers(gpu: None, capture: Capture) -> None:
    with pytest.MonkeyPatch.context() as here:
        here.setattr(ModelRunner, "_takes_graphs", lambda self: True)
        made = served(CONFIGS["llama"])
        plain = served(CONFIGS["llama"], fused=False)
    states = [2, FINAL_STATE]
    for one in (made, plain):
        one.watch(states)
    made.capture(Bounds(4, 4, 16))
    assert made.fused is not None
    assert made.graph_count > 0
    capture.replays = 0
    for batch in (BATCH, SHORT):
        same(logits_of(made, batch), logits_of(plain, batch))
        for state in states:
            same(made.kept[state], plain.kept[state])
    assert capture.replays == 2


def test_joined_weights_are_in_memory_once_and_the_own_forward_computes_as_before(
    gpu: None,
) -> None:
    made = served(CONFIGS["llama"])
    layer = made._model.model.layers[1]
    for module, names in [(layer.self_attn, "qkv"), (layer.mlp, ("gate", "up"))]:
        weights = [getattr(module, f"{name}_proj").weight for name in names]
        assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
        assert weights[0].untyped_storage().nbytes() == sum(weight.nbytes for weight in weights)
    made.fused = None
    wanted = logits_of(served(CONFIGS["llama"], fused=False))
    torch.testing.assert_close(logits_of(made), wanted, atol=0, rtol=0)


NOT_LAUNCHED = {"_unsafe_view", "as_strided", "detach", "empty", "empty_like", "empty_strided"}
NOT_LAUNCHED |= {"expand", "select", "slice", "split", "split_with_sizes", "t", "transpose"}
NOT_LAUNCHED |= {"unsqueeze", "view", "_conj", "alias", "new_empty", "unbind"}
"""Operators that make views, or memory that nothing fills."""


class Launches(TorchDispatchMode):
    """Counts the operators that launch a kernel on a GPU, and Triton's kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        interpreter = import_module("triton.runtime.interpreter")
        launch = interpreter.GridExecutor.__call__

        def counted(executor: Any, *arguments: Any, **options: Any) -> Any:
            self.count += 1
            # The interpreter makes copies that a GPU does not make. They are not counted.
            with torch.utils._python_dispatch._disable_current_modes():
                return launch(executor, *arguments, **options)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.partition(".")[0] not in NOT_LAUNCHED
        return func(*args, **(kwargs or {}))


def launches(name: str, monkeypatch: pytest.MonkeyPatch, *, fused: bool) -> tuple[int, int]:
    """Return the launches of one layer, and of a forward outside its three layers."""
    counts = []
    for layers in (2, 3):
        config = copy.deepcopy(LLAMA_LIKE[name])
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:layers]
        made = served(config, fused=fused)
        with monkeypatch.context() as here, Launches(here) as counting:
            made.forward(SHORT)
        counts.append(counting.count)
    each = counts[1] - counts[0]
    return each, counts[1] - 3 * each


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts the interpreter's kernels")
@pytest.mark.parametrize(
    ("name", "plain", "fused"),
    [("llama", (41, 33), (9, 26)), ("qwen3, norms of heads", (57, 33), (9, 26))],
)
def test_a_fused_layer_launches_four_products_attention_and_four_small_kernels(
    name: str,
    plain: tuple[int, int],
    fused: tuple[int, int],
    kernels: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launches(name, monkeypatch, fused=False) == plain
    assert launches(name, monkeypatch, fused=True) == fused


def messages_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return all log records but the warning that a text may differ when it is asked for again."""
    return [record for record in caplog.records if "may answer otherwise" not in record.message]


def test_on_a_cpu_nothing_is_fused_or_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = ModelRunner(build(CONFIGS["llama"]), page_count=16)
    assert made.fused is None
    assert messages_of(caplog) == []


@pytest.mark.parametrize("name", OTHERS)
def test_another_type_runs_its_own_layers_with_joined_projections(
    name: str, gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made = served(CONFIGS[name])
    [record] = messages_of(caplog)
    assert record.levelname == "INFO"
    assert "is served by its own layers, with more kernels" in record.message
    assert made.fused is None
    parts = [m for m in made._model.modules() if isinstance(m, FusedLinearPart)]
    assert len(parts) == (9 if name == "gemma" else 0)
    same(logits_of(made), logits_of(served(CONFIGS[name], fused=False)))


def test_another_activation_is_left_to_the_model(
    gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert served(LlamaConfig(**SIZES, hidden_act="gelu")).fused is None
    assert "its activation is GELUActivation" in messages_of(caplog)[0].message


def negated(gate_up: torch.Tensor) -> torch.Tensor:
    return -reference_layers.silu_product(gate_up)


def no_kernel(gate_up: torch.Tensor) -> torch.Tensor:
    """Fail like a kernel that cannot be compiled."""
    raise RuntimeError("no such instruction")


def inexact(gate_up: torch.Tensor) -> torch.Tensor:
    """Err by more than rounding, but by so little that only `_compare_rounding` notices."""
    out = reference_layers.silu_product(gate_up)
    return out + out * 0.02 * torch.randn_like(out)


@pytest.mark.parametrize(
    ("kernel", "dtype", "said"),
    [
        (negated, torch.float32, "its logits differ"),
        (no_kernel, torch.float32, "no such instruction"),
        (inexact, torch.bfloat16, "its trial was off by"),
    ],
)
def test_a_model_whose_kernels_disagree_is_served_without_them(
    kernel: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    said: str,
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = logits_of(served(CONFIGS["llama"], fused=False, dtype=dtype))
    monkeypatch.setattr(fused_layers, "silu_product", kernel)
    made = served(CONFIGS["llama"], dtype=dtype)
    assert made.fused is None
    torch.testing.assert_close(logits_of(made), wanted, atol=0, rtol=0)
    [record] = messages_of(caplog)
    assert record.levelname == "WARNING"
    assert said in record.message


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_fused_layers_pass_the_comparison_of_a_start_in_bfloat16(name: str, gpu: None) -> None:
    assert served(LLAMA_LIKE[name], dtype=torch.bfloat16).fused is not None
