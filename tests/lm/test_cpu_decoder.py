"""The forward that is one call of C gives what the model's own forward gives, and keeps away from models that it cannot do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from builds import BUILDS, use_build
from tiny_models import VOCAB_SIZE, build
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

from outrider.lm.cpu import weights
from outrider.lm.cpu.decoder import CpuDecoder
from outrider.lm.cpu.library import runnable_builds
from outrider.lm.cpu.weights import TiledLinear, settle_on_cpu
from outrider.lm.runner import ModelRunner, SequenceSlice

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
TAKEN: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases and tied embeddings": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama 3's rotation": LlamaConfig(
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
LEFT: dict[str, PreTrainedConfig] = {
    "a sliding window": MistralConfig(**SIZES, sliding_window=16),
    "attention and feed-forward side by side": CohereConfig(**SIZES),
    "norms without a weight": OlmoConfig(**SIZES),
    "queries that are scaled from a length on": Ministral3Config(**SIZES, sliding_window=None),
    "scales of its own": GraniteConfig(**SIZES, residual_multiplier=0.5),
    "another activation": LlamaConfig(**SIZES, hidden_act="gelu"),
    "a rotation that changes with the length": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    ),
    "sizes that fill no tile": LlamaConfig(**SIZES | {"hidden_size": 72}, head_dim=32),
    "heads that fill no vector": LlamaConfig(**SIZES, head_dim=16),
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


def settled(config: PreTrainedConfig, dtype: torch.dtype, page_size: int = 16) -> ModelRunner:
    model = build(config).to(dtype)
    settle_on_cpu(model)
    return ModelRunner(model, page_size=page_size, page_count=64)


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(
        3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


@pytest.mark.parametrize("config", TAKEN.values(), ids=TAKEN.keys())
def test_it_is_as_near_to_exact_numbers_as_the_models_own_forward(
    config: PreTrainedConfig, dtype: torch.dtype
) -> None:
    runner, tokens = settled(config, dtype), ids(90)
    assert runner.decoder is not None
    exact_model = build(config).to(dtype).double()
    with torch.inference_mode():
        exact = exact_model(torch.tensor([tokens])).logits[0]
        own = build(config).to(dtype)(torch.tensor([tokens])).logits[0].float()
    pages = [40, 3, 17, 5, 60, 21]
    parts = [slice(0, 50), slice(50, 51), slice(51, 56), slice(56, 90)]
    mine = torch.cat(
        [
            runner.forward([SequenceSlice(tokens[s], s.start, pages, s.stop - s.start)])
            for s in parts
        ]
    )
    assert (mine - exact).abs().mean() < 1.2 * (own - exact).abs().mean()
    assert (mine - exact).abs().max() < 2 * (own - exact).abs().max()


def test_a_sequence_gets_the_same_logits_to_the_bit_whatever_runs_beside_it(
    dtype: torch.dtype,
) -> None:
    runner = settled(TAKEN["llama"], dtype)
    assert runner.decoder is not None
    others = [SequenceSlice(ids(1 + i % 7, i), 0, [2 + i], 1 + i % 7) for i in range(40)]
    mine = SequenceSlice(ids(5), 0, [0], 5)
    alone = runner.forward([mine])
    beside = runner.forward([*others[:20], mine, *others[20:]])
    first = sum(part.logit_count for part in others[:20])
    assert torch.equal(alone, beside[first : first + 5])


def test_it_gets_the_same_with_any_number_of_others_however_they_share_out_the_work(
    dtype: torch.dtype,
) -> None:
    runner = settled(TAKEN["llama"], dtype)
    mine, others = (
        SequenceSlice(ids(2), 0, [0], 2),
        [SequenceSlice(ids(1, i), 0, [1 + i], 1) for i in range(40)],
    )
    alone = runner.forward([mine])
    for count in range(1, len(others) + 1):
        assert torch.equal(runner.forward([*others[:count], mine])[count:], alone), (
            f"beside {count}"
        )


def test_only_the_wanted_logits_are_computed(dtype: torch.dtype) -> None:
    runner = settled(TAKEN["llama"], dtype)
    tokens = ids(12)
    every = runner.forward([SequenceSlice(tokens, 0, [0], 12)])
    assert torch.equal(runner.forward([SequenceSlice(tokens, 0, [0], 2)]), every[-2:])
    assert runner.forward([SequenceSlice(tokens, 0, [0], 0)]).shape == (0, VOCAB_SIZE)


def test_a_text_gets_the_same_logits_to_the_bit_however_it_is_cut_into_forwards(
    dtype: torch.dtype,
) -> None:
    runner, tokens = settled(TAKEN["llama"], dtype), ids(300)
    whole = runner.forward([SequenceSlice(tokens, 0, list(range(19)), 300)])
    cuts = [0, 1, 2, 30, 37, 127, 128, 129, 200, 206, 299, 300]
    pages = list(range(60, 41, -1))
    parts = [
        runner.forward([SequenceSlice(tokens[a:b], a, pages, b - a)])
        for a, b in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("limit", [VOCAB_SIZE + 19, VOCAB_SIZE, VOCAB_SIZE - 19, 7])
def test_a_greedy_continuation_is_what_one_forward_a_token_gives(
    limit: int, dtype: torch.dtype
) -> None:
    count, lengths = 21, [1, 15, 16, 30, 47]
    texts = [ids(length, length) for length in lengths]
    pages = [[5 * i + 4, 5 * i + 1, 5 * i + 3, 5 * i, 5 * i + 2] for i in range(len(texts))]

    def read(runner: ModelRunner) -> list[SequenceSlice]:
        """All but the last token of each text is in the cache; the slices are of the last ones."""
        runner.forward(
            [
                SequenceSlice(text[:-1], 0, held, 0)
                for text, held in zip(texts, pages, strict=True)
                if len(text) > 1
            ]
        )
        return [
            SequenceSlice(text[-1:], len(text) - 1, held, 1)
            for text, held in zip(texts, pages, strict=True)
        ]

    runner = settled(TAKEN["llama"], dtype)
    slices, expected = read(runner), []
    for _ in range(count):
        expected.append(runner.forward(slices)[:, :limit].argmax(-1).tolist())
        slices = [
            SequenceSlice([token], s.start + 1, s.pages, 1)
            for token, s in zip(expected[-1], slices, strict=True)
        ]
    after = runner.forward(slices)

    runner = settled(TAKEN["llama"], dtype)
    assert runner.continue_greedily(read(runner), count, limit) == expected
    assert torch.equal(runner.forward(slices), after)


def test_a_continuation_is_of_single_tokens_only(dtype: torch.dtype) -> None:
    assert (
        settled(TAKEN["llama"], dtype).continue_greedily(
            [SequenceSlice(ids(2), 0, [0], 1)], 2, VOCAB_SIZE
        )
        is None
    )


@pytest.mark.parametrize("name", ["llama", "llama, large heads, one for all"])
def test_pages_that_fill_no_tile_and_pages_that_do_give_the_same(
    name: str, dtype: torch.dtype, a_build: str
) -> None:
    tokens = ids(150)
    outputs = []
    for page_size in (16, 32, 8, 12):
        runner = settled(TAKEN[name], dtype, page_size)
        assert runner.decoder is not None
        outputs.append(runner.forward([SequenceSlice(tokens, 0, list(range(20, 0, -1)), 150)]))
    whole_tiles, as_well, *others = outputs
    assert torch.equal(whole_tiles, as_well)
    for other in others:
        # Tiles are of AMX alone; vectors end with a page.
        assert (
            a_build != "_cpu_amx" or dtype is torch.float32 or not torch.equal(whole_tiles, other)
        )
        tolerance = {torch.bfloat16: 0.1, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(
            whole_tiles, other, rtol=0, atol=tolerance * float(whole_tiles.std())
        )


def test_two_threads_compute_to_the_bit_what_one_does(dtype: torch.dtype, a_build: str) -> None:
    runner = settled(TAKEN["llama"], dtype)
    # Among them a long prompt, whose rows are divided among threads.
    slices = [SequenceSlice(ids(1 + i, i), 0, [i], 1 + i) for i in range(12)] + [
        SequenceSlice(ids(300), 0, list(range(20, 39)), 300)
    ]
    alone = runner.forward(slices)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # Tiles that are emulated take their time.
        times = 5 if a_build == "_cpu_amx" else 20
        assert all(torch.equal(runner.forward(slices), alone) for _ in range(times))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("count", [5, 16, 21, 37, 140])
def test_what_lies_in_the_cache_behind_a_text_does_not_matter(
    count: int, dtype: torch.dtype
) -> None:
    tokens, pages = ids(count), list(range(30, 20, -1))
    clean, dirty = settled(TAKEN["llama"], dtype), settled(TAKEN["llama"], dtype)
    for cache in dirty._layers.values():
        assert cache._store is not None
        cache._store.keys.fill_(torch.nan)
        cache._store.values.fill_(torch.nan)
    wanted = clean.forward([SequenceSlice(tokens, 0, pages, count)])
    assert torch.equal(dirty.forward([SequenceSlice(tokens, 0, pages, count)]), wanted)


@pytest.mark.parametrize("config", LEFT.values(), ids=LEFT.keys())
def test_what_it_cannot_do_runs_as_before(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    runner, tokens = settled(config, dtype), ids(30)
    assert runner.decoder is None
    with torch.inference_mode():
        own = build(config).to(dtype)(torch.tensor([tokens])).logits[0].float()
    mine = runner.forward([SequenceSlice(tokens, 0, [4, 2], 30)])
    tolerance = {torch.bfloat16: 0.15, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(mine, own, rtol=0, atol=tolerance * float(own.std()))


def test_a_trial_that_differs_or_is_no_number_leaves_the_model_its_own_forward(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    for difference in (0.2, float("nan")):
        monkeypatch.setattr(CpuDecoder, "_difference", lambda *arguments, found=difference: found)
        assert settled(TAKEN["llama"], dtype).decoder is None


def test_float16_models_are_not_touched() -> None:
    model = build(TAKEN["llama"]).to(torch.float16)
    settle_on_cpu(model)
    assert ModelRunner(model, page_size=16, page_count=8).decoder is None


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("outs", [32, 40, 97, 8])
def test_tiles_give_their_weight_back_and_take_no_other_type(
    outs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    layer = torch.nn.Linear(96, outs, bias=has_bias).to(dtype)
    tiled = TiledLinear(layer.weight, layer.bias)
    assert torch.equal(tiled.weight, layer.weight)
    other = {torch.bfloat16: torch.float32, torch.float32: torch.bfloat16}[dtype]
    with pytest.raises(RuntimeError, match="input of"):
        tiled(torch.zeros(1, 96, dtype=other))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("outs", [32, 40, 97, 8])
def test_tiles_multiply_like_a_linear_layer(outs: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, outs, bias=has_bias).to(dtype)
    tolerance = {torch.bfloat16: 2**-8, torch.float32: 2**-21}[dtype]
    tiled = TiledLinear(layer.weight, layer.bias)
    for rows in (0, 1, 15, 16, 17, 32, 33, 100):
        x = torch.randn(2, rows, 96).to(dtype)
        exact = torch.nn.functional.linear(
            x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
        )
        torch.testing.assert_close(tiled(x).double(), exact, rtol=tolerance, atol=tolerance)
        # Of a transposed input the rows do not lie one behind the other.
        assert torch.equal(tiled(x.transpose(0, 1)), tiled(x).transpose(0, 1))


def test_onednn_finds_its_tiles_as_it_left_them(a_build: str) -> None:
    if a_build != "_cpu_amx" or a_build not in runnable_builds():
        pytest.skip("no processor's tiles are used")
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    tiled, packed = TiledLinear(layer.weight, None), weights.PackedLinear(layer.weight, None)
    inputs = [torch.randn(rows, 64).to(torch.bfloat16) for rows in (1, 40, 7, 16, 64, 3)]
    before = [packed(x) for x in inputs]
    between = [(tiled(x), packed(x))[1] for x in inputs]
    assert all(torch.equal(*pair) for pair in zip(before, between, strict=True))
