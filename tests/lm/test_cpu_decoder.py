"""The C decoder equals the model's own forward, and refuses models that it does not support."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    OlmoConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from outrider.lm import forward_check
from outrider.lm.cpu import weights
from outrider.lm.cpu.decoder import CpuDecoder
from outrider.lm.cpu.library import runnable_builds
from outrider.lm.cpu.weights import TiledLinear, optimize_for_cpu
from outrider.lm.forward_check import widened_logits
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import FINAL_STATE
from tests.lm.builds import BUILDS, use_build
from tests.lm.tiny_models import VOCAB_SIZE, build

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SUPPORTED: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases and tied embeddings": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama 3's rotary embedding": LlamaConfig(
        **SIZES,
        rope_parameters={**LLAMA3, "rope_theta": 500_000.0, "original_max_position_embeddings": 64},
    ),
    "llama, large heads, one for all": LlamaConfig(
        **SIZES | {"num_key_value_heads": 1}, head_dim=128
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
}
REFUSED: dict[str, PreTrainedConfig] = {
    "a sliding window": MistralConfig(**SIZES, sliding_window=16),
    "attention and feed-forward side by side": CohereConfig(**SIZES),
    "norms without a weight": OlmoConfig(**SIZES),
    "queries scaled from some length on": Ministral3Config(**SIZES, sliding_window=None),
    "scales of its own": GraniteConfig(**SIZES, residual_multiplier=0.5),
    "another activation": LlamaConfig(**SIZES, hidden_act="gelu"),
    "a rotary embedding that depends on the length": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    ),
    "sizes that are no whole tiles": LlamaConfig(**SIZES | {"hidden_size": 72}, head_dim=32),
    "heads smaller than a vector": LlamaConfig(**SIZES, head_dim=16),
}


@pytest.fixture(params=BUILDS, autouse=True)
def a_build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_build(request.param, monkeypatch)
    name: str = request.param
    return name


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    wanted: torch.dtype = request.param
    return wanted


def cpu_runner(
    config: PreTrainedConfig, dtype: torch.dtype, page_size: int = 16, *, int8: bool = False
) -> ModelRunner:
    model = build(config).to(dtype)
    optimize_for_cpu(model, int8=int8)
    return ModelRunner(model, page_size=page_size, page_count=64)


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


@pytest.mark.parametrize("config", SUPPORTED.values(), ids=SUPPORTED.keys())
def test_it_is_as_near_to_exact_numbers_as_the_models_own_forward(
    config: PreTrainedConfig, dtype: torch.dtype
) -> None:
    runner = cpu_runner(config, dtype)
    tokens = ids(90)
    assert runner.decoder is not None
    exact_model = build(config).to(dtype).double()
    with torch.inference_mode():
        exact = exact_model(torch.tensor([tokens])).logits[0]
        own = build(config).to(dtype)(torch.tensor([tokens])).logits[0].float()
    pages = [40, 3, 17, 5, 60, 21]
    cuts = [0, 50, 51, 56, 90]
    chunks = [
        runner.forward([SequenceSlice(tokens[start:end], start, pages, end - start)])
        for start, end in itertools.pairwise(cuts)
    ]
    found = torch.cat(chunks)
    assert (found - exact).abs().mean() < 1.2 * (own - exact).abs().mean()
    assert (found - exact).abs().max() < 2 * (own - exact).abs().max()


def test_it_keeps_the_hidden_states_of_the_models_own_forward(dtype: torch.dtype) -> None:
    config = SUPPORTED["llama"]
    runner = cpu_runner(config, dtype)
    model: Any = build(config).to(dtype)
    tokens = ids(20)
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    count = len(states) - 1
    assert runner.decoder is not None
    runner.watch([*range(count + 1), FINAL_STATE])
    runner.forward([SequenceSlice(tokens[:13], 0, [5, 4], 0)])
    runner.forward([SequenceSlice(ids(3, 1), 0, [7], 1), SequenceSlice(tokens[13:], 13, [5, 4], 1)])
    tolerance = 1e-4 if dtype is torch.float32 else 0.05

    def kept(state: int) -> torch.Tensor:
        return runner.pick_states([state], range(10), str(dtype).removeprefix("torch."))

    for state in (*range(count), FINAL_STATE):
        wanted = states[state][0, 13:]
        difference = (kept(state)[3:] - wanted).float().square().mean().sqrt()
        assert difference <= tolerance * wanted.float().std()
    with torch.inference_mode():
        normed = model.model.norm(kept(count))
    torch.testing.assert_close(kept(FINAL_STATE), normed, atol=tolerance, rtol=tolerance)


def test_only_the_requested_logits_are_computed(dtype: torch.dtype) -> None:
    runner = cpu_runner(SUPPORTED["llama"], dtype)
    tokens = ids(12)
    every = runner.forward([SequenceSlice(tokens, 0, [0], 12)])
    assert torch.equal(runner.forward([SequenceSlice(tokens, 0, [0], 2)]), every[-2:])
    assert runner.forward([SequenceSlice(tokens, 0, [0], 0)]).shape == (0, VOCAB_SIZE)


TEXTS = [ids(length, length) for length in (1, 15, 16, 30, 47)]
TEXT_PAGES = [[5 * i + 4, 5 * i + 1, 5 * i + 3, 5 * i, 5 * i + 2] for i in range(len(TEXTS))]


def last_tokens(runner: ModelRunner) -> list[SequenceSlice]:
    """Compute all but the last token of each of `TEXTS`; return slices of the last tokens."""
    held = list(zip(TEXTS, TEXT_PAGES, strict=True))
    prompts = [SequenceSlice(text[:-1], 0, pages, 0) for text, pages in held if len(text) > 1]
    runner.forward(prompts)
    return [SequenceSlice(text[-1:], len(text) - 1, pages, 1) for text, pages in held]


@pytest.mark.parametrize("limit", [VOCAB_SIZE + 19, 7])
def test_a_greedy_continuation_equals_one_forward_a_token(limit: int, dtype: torch.dtype) -> None:
    count = 21
    runner = cpu_runner(SUPPORTED["llama"], dtype)
    slices = last_tokens(runner)
    expected, logits = [], []
    for _ in range(count):
        logits.append(runner.forward(slices).clone())
        tokens = logits[-1][:, :limit].argmax(-1).tolist()
        expected.append(tokens)
        slices = [
            SequenceSlice([token], part.start + 1, part.pages, 1)
            for token, part in zip(tokens, slices, strict=True)
        ]
    after = runner.forward(slices)

    runner = cpu_runner(SUPPORTED["llama"], dtype)
    assert runner.continue_greedily(last_tokens(runner), count, limit) == expected
    assert torch.equal(runner.forward(slices), after)

    found = runner.continue_with_logits(last_tokens(runner), count, limit)
    assert found is not None
    assert found[0].tolist() == expected
    assert torch.equal(found[1], torch.stack(logits))


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("llama, large heads, one for all", marks=pytest.mark.slow)]
)
def test_pages_need_not_be_whole_tiles(name: str, dtype: torch.dtype, a_build: str) -> None:
    tokens = ids(150)
    outputs = []
    for page_size in (16, 32, 8, 12):
        runner = cpu_runner(SUPPORTED[name], dtype, page_size)
        assert runner.decoder is not None
        outputs.append(runner.forward([SequenceSlice(tokens, 0, list(range(20, 0, -1)), 150)]))
    of_one_tile, of_two_tiles, *others = outputs
    assert torch.equal(of_one_tile, of_two_tiles)
    uses_tiles = a_build == "_cpu_amx" and dtype is torch.bfloat16
    for other in others:
        # With AMX, pages of whole tiles are summed in tiles. Other pages are summed by vectors,
        # which gives other bits.
        assert not (uses_tiles and torch.equal(of_one_tile, other))
        relative = {torch.bfloat16: 0.1, torch.float32: 1e-5}[dtype]
        tolerance = relative * float(of_one_tile.std())
        torch.testing.assert_close(of_one_tile, other, rtol=0, atol=tolerance)


def test_two_threads_give_the_same_bits_as_one(dtype: torch.dtype, a_build: str) -> None:
    runner = cpu_runner(SUPPORTED["llama"], dtype)
    short = [SequenceSlice(ids(1 + i, i), 0, [i], 1 + i) for i in range(12)]
    # The threads divide the rows of a long prompt.
    slices = [*short, SequenceSlice(ids(300), 0, list(range(20, 39)), 300)]
    alone = runner.forward(slices)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # Emulated tiles are slow.
        times = 5 if a_build == "_cpu_amx" else 20
        assert all(torch.equal(runner.forward(slices), alone) for _ in range(times))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("count", [16, 21, 140])
def test_cache_content_behind_a_text_does_not_matter(count: int, dtype: torch.dtype) -> None:
    tokens = ids(count)
    pages = list(range(30, 20, -1))
    clean = cpu_runner(SUPPORTED["llama"], dtype)
    dirty = cpu_runner(SUPPORTED["llama"], dtype)
    for cache in dirty._layers.values():
        assert cache._store is not None
        cache._store.keys.fill_(torch.nan)
        cache._store.values.fill_(torch.nan)
    expected = clean.forward([SequenceSlice(tokens, 0, pages, count)])
    assert torch.equal(dirty.forward([SequenceSlice(tokens, 0, pages, count)]), expected)


@pytest.mark.parametrize("config", REFUSED.values(), ids=REFUSED.keys())
def test_a_model_without_support_runs_its_own_forward(config: PreTrainedConfig) -> None:
    runner = cpu_runner(config, torch.float32)
    tokens = ids(30)
    assert runner.decoder is None
    with torch.inference_mode():
        own = build(config)(torch.tensor([tokens])).logits[0].float()
    found = runner.forward([SequenceSlice(tokens, 0, [4, 2], 30)])
    torch.testing.assert_close(found, own, rtol=0, atol=1e-4 * float(own.std()))


def deep_runner() -> ModelRunner:
    """Return a runner of a model with 40 layers, which round more than the bundled target's six."""
    return cpu_runner(LlamaConfig(**SIZES | {"num_hidden_layers": 40}), torch.bfloat16)


def test_a_deep_model_is_taken_though_its_layers_round_differently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[tuple[float, float]] = []
    measured = forward_check.rounding_errors

    def watched(*arguments: Any) -> tuple[float, float]:
        errors.append(measured(*arguments))
        return errors[-1]

    monkeypatch.setattr(forward_check, "rounding_errors", watched)
    assert deep_runner().decoder is not None
    [(found, own)] = errors
    assert min(found, own) > 0.02


def test_a_deep_model_with_another_scale_of_attention_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = CpuDecoder._whole

    def scaled(self: CpuDecoder, *arguments: Any) -> Any:
        found = whole(self, *arguments)
        found.attention_scale *= 1.5
        return found

    monkeypatch.setattr(CpuDecoder, "_whole", scaled)
    assert deep_runner().decoder is None


@pytest.mark.parametrize("errors", [(0.2, 0.16), (float("nan"), 0.01), (0.01, float("nan"))])
def test_a_trial_that_is_further_off_leaves_the_model_its_own_forward(
    errors: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_check, "rounding_errors", lambda *arguments: errors)
    assert cpu_runner(SUPPORTED["llama"], torch.float32).decoder is None


@pytest.mark.parametrize(
    ("later", "texts", "is_taken"), [(0.08, 2, True), (0.1, 6, False)], ids=["chance", "worse"]
)
def test_further_texts_decide_where_one_is_further_off(
    later: float, texts: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first text has the errors that SmolLM2-135M in int8 had with AVX2."""
    tried: list[int] = []

    def errors(*arguments: Any) -> tuple[float, float]:
        tried.append(arguments[-1])
        return (later, 0.08) if tried[-1] else (0.1, 0.072)

    monkeypatch.setattr(forward_check, "rounding_errors", errors)
    assert (cpu_runner(SUPPORTED["llama"], torch.bfloat16).decoder is not None) == is_taken
    assert tried == [*range(texts)]


@pytest.mark.parametrize(
    ("dtype", "first", "later"),
    [(torch.float32, (0.0024, 0.0), (0.0, 0.0)), (torch.bfloat16, (0.129, 0.072), (0.075, 0.072))],
    ids=["float32", "bfloat16"],
)
def test_an_error_that_is_not_chance_is_not_averaged_away(
    dtype: torch.dtype,
    first: tuple[float, float],
    later: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def errors(*arguments: Any) -> tuple[float, float]:
        return later if arguments[-1] else first

    monkeypatch.setattr(forward_check, "rounding_errors", errors)
    assert cpu_runner(SUPPORTED["llama"], dtype).decoder is None


@pytest.mark.parametrize("config", SUPPORTED.values(), ids=SUPPORTED.keys())
def test_widened_logits_are_those_of_the_same_weights_in_float32(config: PreTrainedConfig) -> None:
    model = build(config).to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    optimize_for_cpu(model)
    tokens = torch.tensor(ids(90))
    found = widened_logits(model, tokens)
    with torch.inference_mode():
        expected = exact(tokens.unsqueeze(0)).logits[0]
    # The model rounds its rotary tables, but not its products.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.std()))


@pytest.mark.parametrize(("outs", "has_bias"), [(32, False), (40, True), (97, True), (8, False)])
def test_a_tiled_layer_multiplies_like_a_linear_layer_and_refuses_other_types(
    outs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, outs, bias=has_bias).to(dtype)
    tolerance = {torch.bfloat16: 2**-8, torch.float32: 2**-21}[dtype]
    tiled = TiledLinear(layer.weight, layer.bias)
    exact_layer = copy.deepcopy(layer).double()
    for rows in (0, 1, 15, 16, 17, 32, 33, 100):
        x = torch.randn(2, rows, 96).to(dtype)
        exact = exact_layer(x.double())
        torch.testing.assert_close(tiled(x).double(), exact, rtol=tolerance, atol=tolerance)
        # The rows of a transposed input are not contiguous.
        assert torch.equal(tiled(x.transpose(0, 1)), tiled(x).transpose(0, 1))
    assert torch.equal(tiled.weight, layer.weight)
    other = {torch.bfloat16: torch.float32, torch.float32: torch.bfloat16}[dtype]
    with pytest.raises(RuntimeError, match="the input is"):
        tiled(torch.zeros(1, 96, dtype=other))


@pytest.mark.parametrize("tiles", [1, 3, 9])
def test_a_tiled_layer_gives_a_row_the_same_bits_among_any_number_of_rows(
    tiles: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(32 * tiles, 40).to(dtype)
    tiled = TiledLinear(linear.weight, linear.bias)
    x = torch.randn(70, 32 * tiles).to(dtype)
    exact = linear.double()(x.double())
    alone = torch.cat([tiled(x[i : i + 1]) for i in range(70)])
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(alone.double(), exact, rtol=tolerance, atol=tolerance)
    for count in [*range(2, 41), 70]:
        assert torch.equal(tiled(x[:count]), alone[:count]), count


def test_onednn_finds_its_tile_configuration_unchanged(a_build: str) -> None:
    if a_build != "_cpu_amx" or a_build not in runnable_builds():
        pytest.skip("this processor has no AMX tiles, or the build does not use them")
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    tiled = TiledLinear(layer.weight, None)
    packed = weights.PackedLinear(layer.weight, None)
    inputs = [torch.randn(rows, 64).to(torch.bfloat16) for rows in (1, 40, 7, 16, 64, 3)]
    before = [packed(x) for x in inputs]
    for x, expected in zip(inputs, before, strict=True):
        tiled(x)
        assert torch.equal(packed(x), expected)
