"""Weights in int8 change a model's numbers by no more than rounding explains."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CohereConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from drafter_svc.families.model import ModelFamily
from drafter_svc.families.settings import ModelSettings
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from outrider.errors import OutriderError, Reason
from outrider.lm import runner as runner_module
from outrider.lm.cpu import weights
from outrider.lm.cpu.weights import TiledLinear, optimize_for_cpu
from outrider.lm.forward_check import rounding_errors
from outrider.lm.runner import ModelRunner, SequenceSlice
from tests.lm.builds import BUILDS, use_build
from tests.lm.tiny_models import VOCAB_SIZE, build

DRAFT = str(Path(__file__).parents[2] / "models" / "draft")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
PLACE = PlacementPlan("cpu", (), None, 1)
GROUP = 32
"""The number of elements of a row that share a scale."""


@pytest.fixture(params=BUILDS, autouse=True)
def a_build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_build(request.param, monkeypatch)
    name: str = request.param
    return name


def int8_runner(config: PreTrainedConfig) -> ModelRunner:
    model = build(config).to(torch.bfloat16)
    optimize_for_cpu(model, int8=True)
    return ModelRunner(model, page_count=64)


def ids(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def layer_and_scales(outs: int, *, has_bias: bool) -> tuple[TiledLinear, torch.nn.Linear]:
    """Return a layer in int8, and the layer that it replaces."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, outs, bias=has_bias).to(torch.bfloat16)
    with torch.no_grad():
        layer.weight[outs // 2] = 0
    return TiledLinear(layer.weight, layer.bias, int8=True), layer


@pytest.mark.parametrize(("outs", "has_bias"), [(32, False), (40, True), (97, True), (8, False)])
def test_a_product_is_off_by_the_rounding_of_its_rows_at_most(outs: int, has_bias: bool) -> None:
    """A number of a row is off by at most half a step: 1/254 of its group's largest number."""
    tiled, layer = layer_and_scales(outs, has_bias=has_bias)
    assert tiled._scales is not None
    lines = tiled._tiles.permute(0, 2, 4, 1, 3, 5).reshape(-1, 96).double() - 128
    exact_weight = (lines * tiled._scales.double().unsqueeze(1))[:outs]
    bias = 0 if layer.bias is None else layer.bias.detach().double()
    for rows in (0, 1, 2, 3, 4, 5, 8, 9, 15, 17, 32, 33, 100):
        x = (torch.randn(rows, 96) * torch.logspace(-3, 3, 96)).to(torch.bfloat16)
        x[: rows // 3, :GROUP] = 0
        exact = x.double() @ exact_weight.T + bias
        steps = x.double().view(rows, 3, GROUP).abs().amax(-1) / 127
        shares = exact_weight.abs().view(outs, 3, GROUP).sum(-1)
        bound = 0.501 * steps @ shares.T + 2**-8 * exact.abs() + 1e-6
        assert ((tiled(x).double() - exact).abs() <= bound).all(), rows


def test_a_rows_product_has_the_same_bits_beside_any_others() -> None:
    tiled, _ = layer_and_scales(97, has_bias=True)
    x = (torch.randn(70, 96) * torch.logspace(-3, 3, 96)).to(torch.bfloat16)
    single = torch.cat([tiled(row[None]) for row in x])
    for rows in (2, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49, 70):
        assert torch.equal(tiled(x[:rows]), single[:rows]), rows
        assert torch.equal(tiled(x[-rows:]), single[-rows:]), rows


def test_a_weight_is_off_by_half_a_step_of_its_outputs_largest_number() -> None:
    tiled, layer = layer_and_scales(97, has_bias=False)
    steps = layer.weight.float().abs().amax(1, keepdim=True) / 127
    difference = (tiled.weight.float() - layer.weight.float()).abs()
    assert (difference <= 0.501 * steps + 2**-8 * layer.weight.float().abs()).all()
    assert tiled.weight.dtype is torch.bfloat16
    assert 2 * tiled._tiles.nbytes == TiledLinear(layer.weight, None)._tiles.nbytes


def test_not_a_number_and_infinity_fill_their_rows_and_no_other() -> None:
    tiled, _ = layer_and_scales(40, has_bias=False)
    x = torch.randn(9, 96).to(torch.bfloat16)
    expected = tiled(x)
    x[3, 50], x[5, 2], x[7] = torch.nan, -torch.inf, torch.nan
    found = tiled(x)
    broken, others = [3, 5, 7], [0, 1, 2, 4, 6, 8]
    assert not found[broken].isfinite().any()
    assert torch.equal(found[others], expected[others])


def test_a_product_without_memory_for_its_rows_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiled, _ = layer_and_scales(40, has_bias=False)
    multiply = tiled._gemm
    # 2^55 rows are more than a processor can address. C must ask for memory before it reads a row.
    monkeypatch.setattr(
        tiled, "_gemm", lambda struct, x, rows, out: multiply(struct, x, 1 << 55, out)
    )
    with pytest.raises(MemoryError, match="no memory for 3 rows of 96 numbers in int8"):
        tiled(torch.randn(3, 96).to(torch.bfloat16))


def test_layers_in_float32_stay_so_in_a_bfloat16_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(64, 32).bfloat16())
    optimize_for_cpu(model, int8=True)
    assert [layer.numbers for layer in model] == ["float32", "int8"]


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES, head_dim=64),
    ],
    ids=["llama", "biases", "qwen2", "qwen3"],
)
def test_the_decoder_is_as_near_to_the_same_weights_in_float32_as_the_layers_are(
    config: PreTrainedConfig,
) -> None:
    runner = int8_runner(config)
    decoder = runner.decoder
    assert decoder is not None
    found, own = rounding_errors(
        runner._model, runner._layers, 16, lambda layout: decoder.forward(layout)[0]
    )
    assert found < 1.2 * own
    assert own < 0.05
    exact = build(config).to(torch.bfloat16).float()
    tokens = ids(90)
    with torch.inference_mode():
        expected = exact(torch.tensor([tokens])).logits[0]
    logits = runner.forward([SequenceSlice(tokens, 0, list(range(6)), 90)])
    assert (logits - expected).square().mean().sqrt() < 0.1 * expected.std()


def test_any_number_of_other_sequences_and_threads_gives_the_same_bits() -> None:
    runner = int8_runner(LlamaConfig(**SIZES))
    mine = SequenceSlice(ids(2), 0, [0], 2)
    others = [SequenceSlice(ids(1 + i), 0, [1 + i], 1) for i in range(12)]
    alone = runner.forward([mine])
    for count in range(1, len(others) + 1):
        logits = runner.forward([*others[:count], mine])[count:]
        assert torch.equal(logits, alone), f"beside {count}"
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # The threads divide the work of quantising the rows, and then each thread reads all rows.
        for _ in range(20):
            assert torch.equal(runner.forward([*others, mine])[len(others) :], alone)
    finally:
        torch.set_num_threads(threads)


def test_a_model_that_the_decoder_refuses_multiplies_by_int8_in_its_own_forward() -> None:
    config = CohereConfig(**SIZES)
    runner = int8_runner(config)
    assert runner.decoder is None
    kinds = {m.numbers for m in runner._model.modules() if isinstance(m, TiledLinear)}
    assert kinds == {"int8"}
    tokens = ids(30)
    with torch.inference_mode():
        expected = build(config)(torch.tensor([tokens])).logits[0]
    found = runner.forward([SequenceSlice(tokens, 0, [4, 2], 30)])
    assert (found - expected).square().mean().sqrt() < 0.1 * expected.std()


def drafting_runner(**settings: Any) -> ModelRunner:
    """Return the draft model of a drafter with these settings."""

    async def load() -> ModelRunner:
        wanted = ModelSettings(model=DRAFT, page_count=64, **settings)
        loaded = await ModelFamily.load(wanted, PLACE, DrafterMetrics("d", "model"))
        family: Any = loaded.make(_Info())
        return family._model.runner

    return asyncio.run(load())


def numbers(runner: ModelRunner) -> str:
    assert runner.decoder is not None
    return runner.decoder.numbers


def test_weights_are_int8_by_default_where_that_is_faster(a_build: str) -> None:
    faster = "int8" if a_build == "_cpu_avx512_bf16" else "bfloat16"
    assert numbers(drafting_runner()) == faster
    assert numbers(drafting_runner(dtype="float32")) == "float32"
    assert numbers(drafting_runner(weights="dtype")) == "bfloat16"
    assert numbers(ModelRunner.load(DRAFT, device="cpu", page_count=64)) == "bfloat16"


def test_a_draft_model_is_kept_in_int8_and_mostly_guesses_the_same() -> None:
    runner = drafting_runner(weights="int8")
    assert numbers(runner) == "int8"
    assert runner.dtype is torch.bfloat16
    plain = ModelRunner.load(DRAFT, device="cpu", page_count=64)
    text = [SequenceSlice(ids(200), 0, list(range(13)), 200)]
    same = runner.forward(text).argmax(-1) == plain.forward(text).argmax(-1)
    assert same.float().mean() > 0.9


class _Info:
    vocab_size = 4096


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", "float32", "weights int8 computes in bfloat16, not in float32"),
        ("cuda", "auto", "weights int8 is for CPUs, not for cuda"),
    ],
)
def test_int8_is_refused_where_it_cannot_be(
    device: str, dtype: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The error comes before anything is done with the device.
    monkeypatch.setattr(runner_module, "find_device", torch.device)
    with pytest.raises(OutriderError, match=message) as error:
        ModelRunner.load(DRAFT, device=device, dtype=dtype, int8=True)
    assert (error.value.reason, error.value.field) == (Reason.INVALID_VALUE, "weights")


def test_int8_without_the_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "library", lambda: None)
    with pytest.raises(OutriderError, match="needs the C kernels, which were not built"):
        ModelRunner.load(DRAFT, device="cpu", int8=True)
