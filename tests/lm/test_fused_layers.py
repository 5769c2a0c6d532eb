"""With Liger-Kernel's kernels, a model gives its own logits with fewer launches.

Runs on a GPU, or by Triton's interpreter on a CPU.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig
from transformers.models.llama import modeling_llama

from outrider.lm import attention
from outrider.lm.fused_linear import FusedLinearPart
from outrider.lm.gpu import fused_layers, triton_attention
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.lm.trial import OwnLogits
from tests.lm.reference_kernel import paged_attention
from tests.lm.tiny_models import CONFIGS, build

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = [SequenceSlice([5, 9, 11, 3], 0, [0], 4), SequenceSlice([7, 2], 0, [3], 2)]
ROTARY = modeling_llama.apply_rotary_pos_emb
NAMES = [
    "llama",
    "qwen3",
    "mistral, sliding window",
    "phi3, fused projections",
    "gemma",
    "gemma2, soft cap and alternating windows",
    "gemma3, alternating windows",
]


def complete_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Triton's interpreter what Liger-Kernel needs of a GPU: float arguments, libdevice."""
    interpreter = import_module("triton.runtime.interpreter")
    convert = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    # Found when they are called, because the interpreter replaces what `tl` has.
    ops = "liger_kernel.ops"
    monkeypatch.setattr(import_module(f"{ops}.rms_norm"), "rsqrt", lambda x: tl.rsqrt(x))
    monkeypatch.setattr(import_module(f"{ops}.geglu"), "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take Liger-Kernel on any device, and its replacements back after the test."""
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(fused_layers, "triton_works", lambda device: True)
    if DEVICE.type == "cpu":
        complete_interpreter(monkeypatch)
        # A start's comparison of 43 tokens takes the interpreter a minute.
        monkeypatch.setattr(ModelRunner, "_compare", lambda self, texts, own: None)
    for kind in {CONFIGS[name].model_type.removesuffix("_text") for name in NAMES}:
        module = import_module(f"transformers.models.{kind}.modeling_{kind}")
        for name, value in vars(module).copy().items():
            if name == "apply_rotary_pos_emb" or name.endswith(("RMSNorm", "MLP")):
                monkeypatch.setattr(module, name, value)


def runner(config: PreTrainedConfig, *, fused: bool) -> ModelRunner:
    made = ModelRunner(build(config).to(DEVICE), page_count=16, fused_layers=fused)
    # On a CPU, it would replace the whole forward.
    made.decoder = None
    return made


@pytest.mark.parametrize("name", NAMES)
def test_fused_layers_give_the_models_own_logits(name: str, liger: None) -> None:
    wanted = runner(CONFIGS[name], fused=False).forward(BATCH).clone()
    logits = runner(CONFIGS[name], fused=True).forward(BATCH)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


NOT_LAUNCHED = {"_unsafe_view", "as_strided", "detach", "empty", "empty_like", "empty_strided"}
NOT_LAUNCHED |= {"expand", "select", "slice", "split", "split_with_sizes", "t", "transpose"}
NOT_LAUNCHED |= {"unsqueeze", "view", "_conj", "alias", "new_empty"}
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
            # The interpreter's own copies are none of a GPU's.
            with torch.utils._python_dispatch._disable_current_modes():
                return launch(executor, *arguments, **options)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.partition(".")[0] not in NOT_LAUNCHED
        return func(*args, **(kwargs or {}))


def launches_of_a_layer(name: str, monkeypatch: pytest.MonkeyPatch, *, fused: bool) -> int:
    made = runner(CONFIGS[name], fused=fused)
    layer = made._model.model.layers[1]
    counts: list[int] = []
    with monkeypatch.context() as here, Launches(here) as launches:
        layer.register_forward_pre_hook(lambda *_: counts.append(launches.count))
        layer.register_forward_hook(lambda *_: counts.append(launches.count))
        made.forward(BATCH)
    before, after = counts
    return after - before


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts the interpreter's kernels")
@pytest.mark.parametrize(("name", "plain", "fused"), [("llama", 41, 17), ("qwen3", 57, 19)])
def test_a_fused_layer_has_less_than_half_the_launches(
    name: str, plain: int, fused: int, liger: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.LayerCache, "supports_kernel", lambda self, device: True)
    monkeypatch.setattr(ModelRunner, "_takes_graphs", lambda self: False)
    monkeypatch.setattr(triton_attention, "paged_attention", paged_attention)
    counts = [launches_of_a_layer(name, monkeypatch, fused=on) for on in (False, True)]
    assert counts == [plain, fused]


def logits_of(made: ModelRunner) -> torch.Tensor:
    return made.forward(BATCH).clone()


def own_code(made: ModelRunner) -> bool:
    """Whether a Llama computes by `transformers` alone."""
    changed = [name for name, module in made._model.named_modules() if "forward" in vars(module)]
    joined = [m for m in made._model.modules() if isinstance(m, FusedLinearPart)]
    return not changed and not joined and modeling_llama.apply_rotary_pos_emb is ROTARY


def test_a_later_model_of_the_type_has_its_own_classes(liger: None) -> None:
    assert not own_code(runner(CONFIGS["llama"], fused=True))
    kinds = {type(module) for module in build(CONFIGS["llama"]).modules()}
    assert {modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP} <= kinds
    assert modeling_llama.LlamaMLP.__module__ == modeling_llama.__name__


def test_a_later_model_of_the_type_is_compared_with_its_own_rotary_embedding(
    without_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = logits_of(runner(CONFIGS["llama"], fused=False))
    references: list[torch.Tensor] = []

    def put_in(model: Any, **options: bool) -> None:
        modeling_llama.apply_rotary_pos_emb = lambda query, key, *_: (query, key)

    def agree(self: ModelRunner, texts: object, own: OwnLogits) -> None:
        references.append(own.logits)

    monkeypatch.setattr("liger_kernel.transformers._apply_liger_kernel_to_instance", put_in)
    monkeypatch.setattr(ModelRunner, "_compare", agree)
    for _ in range(2):
        made = runner(CONFIGS["llama"], fused=True)
    assert modeling_llama.apply_rotary_pos_emb is not ROTARY
    torch.testing.assert_close(references[-1], references[0], atol=0, rtol=0)
    # The planted function computes something else.
    assert not torch.allclose(logits_of(made), plain)


@pytest.mark.parametrize("name", NAMES)
def test_after_its_undo_a_model_gives_the_same_bits_as_before(name: str, liger: None) -> None:
    made = runner(CONFIGS[name], fused=False)
    wanted = logits_of(made)
    undo = fused_layers.use_kernels(made._model, name, DEVICE)
    assert undo is not None
    assert [1 for module in made._model.modules() if "forward" in vars(module)]
    undo()
    assert not [1 for module in made._model.modules() if "forward" in vars(module)]
    torch.testing.assert_close(logits_of(made), wanted, atol=0, rtol=0)


def messages_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """All log records but the warning that a model's rows may differ."""
    return [record for record in caplog.records if "may answer otherwise" not in record.message]


def test_on_a_cpu_nothing_is_fused_or_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = ModelRunner(build(CONFIGS["llama"]), page_count=16)
    assert own_code(made)
    assert messages_of(caplog) == []


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but the models are small enough for the comparison of a start."""
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(fused_layers, "triton_works", lambda device: True)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", ROTARY)


def test_a_type_without_kernels_is_served_and_named(
    without_kernels: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runner(CONFIGS["gpt2, learned positions"], fused=True)
    [record] = messages_of(caplog)
    assert record.levelname == "INFO"
    assert record.message.endswith("Liger-Kernel's kernels: it has none for the type gpt2")


def test_without_the_package_a_model_is_served_and_the_log_says_how_to_install_it(
    without_kernels: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    assert own_code(runner(CONFIGS["llama"], fused=True))
    [record] = messages_of(caplog)
    assert record.levelname == "INFO"
    assert "liger-kernel is missing" in record.message
    assert "pip install '.[fused]'" in record.message


def wrong_logits(model: Any, **options: bool) -> None:
    """Replace what Liger-Kernel does, by what computes something else."""
    modeling_llama.apply_rotary_pos_emb = lambda query, key, *_: (query, key)
    for layer in model.model.layers:
        layer.mlp.forward = lambda x: -x


def no_logits(model: Any, **options: bool) -> None:
    """Fail in the forward, as a kernel does that cannot be compiled."""
    model.model.norm.forward = lambda x: x.no_such_attribute


def wrong_type(model: Any, **options: bool) -> None:
    """Fail half-way, as for a class that is not the type's."""
    wrong_logits(model)
    raise TypeError("Unsupported model")


@pytest.mark.parametrize(
    ("apply", "said"),
    [
        (wrong_logits, "its logits differ"),
        (no_logits, "no_such_attribute"),
        (wrong_type, "TypeError: Unsupported model"),
    ],
)
def test_a_model_whose_kernels_disagree_is_served_without_them(
    apply: Callable[..., None],
    said: str,
    without_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = logits_of(runner(CONFIGS["llama"], fused=False))
    monkeypatch.setattr("liger_kernel.transformers._apply_liger_kernel_to_instance", apply)
    made = runner(CONFIGS["llama"], fused=True)
    assert own_code(made)
    torch.testing.assert_close(logits_of(made), wanted, atol=0, rtol=0)
    [record] = messages_of(caplog)
    assert record.levelname == "WARNING"
    assert said in record.message
