"""Trees on a CPU: each build, and gathering, computes a row as the last row of its chain."""

from __future__ import annotations

import random
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    GPT2Config,
    GraniteSWAConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)

from outrider.lm.cpu.attention import PagedAttention
from outrider.lm.cpu.library import runnable_builds
from outrider.lm.cpu.weights import optimize_for_cpu
from outrider.lm.layout import BatchLayout, SequenceSlice
from outrider.lm.runner import ModelRunner
from outrider.lm.softmax import Softmax
from outrider.protocol.token_tree import ancestor_words, depths
from tests.lm.builds import BUILDS, use_build
from tests.lm.tiny_models import VOCAB_SIZE, build
from tests.lm.trees import Part, Sequences, batches, cached, near, parents, trees
from tests.tree_paths import path_to

DTYPES = [torch.float32, torch.bfloat16]
SEEDS = st.integers(0, 2**32)
# Emulated tiles are slow.
FEW = settings(max_examples=10)
# Tolerances as shares of the logits' root mean square: chains and trees may add in different
# orders, and in bfloat16 each layer rounds the difference.
ROUNDING = {torch.float32: 3e-5, torch.bfloat16: 0.15}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "attn_logit_softcapping": 0.5,
    "query_pre_attn_scalar": 16,
}
_PIECES: dict[str, Any] = {
    "intermediate_size_mlp": 96,
    "moe_layers": [],
    "attention_chunk_size": 20,
    "floor_scale": 8,
    "no_rope_layers": [1, 0, 1],
}
# Models that run the forward of `transformers`: heads of size 8 are too small for C attention.
OWN_FORWARD: dict[str, PreTrainedConfig] = {
    "C attention": GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=256, n_embd=64, n_layer=3, n_head=4
    ),
    "C attention, window of 8": MistralConfig(**_SIZES, head_dim=16, sliding_window=8),
    "gathered": LlamaConfig(**_SIZES, head_dim=8),
    "gathered, window of 3": MistralConfig(**_SIZES, head_dim=8, sliding_window=3),
    "C attention, sinks": GraniteSWAConfig(**_SIZES),
    "gathered, sinks and windows of 8": GraniteSWAConfig(
        **_SIZES | {"num_attention_heads": 8}, sliding_window=8
    ),
    "C attention, pieces of 20": Llama4TextConfig(**_SIZES, **_PIECES, head_dim=16),
    "gathered, pieces of 20": Llama4TextConfig(**_SIZES, **_PIECES, head_dim=8),
    "soft cap, windows of 100": Gemma2Config(**_SIZES, **_WINDOWS, head_dim=16, sliding_window=100),
}


@cache
def own_forward(name: str, dtype: torch.dtype) -> ModelRunner:
    runner = ModelRunner(build(OWN_FORWARD[name]).to(dtype), page_size=8, page_count=500)
    assert runner.decoder is None
    uses_c = any(layer.cpu_attention is not None for layer in runner._layers.values())
    assert uses_c == name.startswith("C attention")
    return runner


@cache
def c_decoder(
    build_name: str, dtype: torch.dtype, page_size: int, *, has_large_group: bool = False
) -> ModelRunner:
    """Return a decoder.

    A large group has more query heads for one key/value head than a tile has rows.
    """
    sizes: dict[str, Any] = {"hidden_size": 128}
    if has_large_group:
        heads = {"num_attention_heads": 20, "num_key_value_heads": 1, "head_dim": 64}
        sizes = {"hidden_size": 640, **heads}
    with pytest.MonkeyPatch.context() as patch:
        use_build(build_name, patch)
        model = build(LlamaConfig(**_SIZES | sizes)).to(dtype)
        optimize_for_cpu(model)
        runner = ModelRunner(model, build_name, page_size=page_size, page_count=500)
    assert runner.decoder is not None
    return runner


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    wanted: torch.dtype = request.param
    return wanted


@pytest.fixture(scope="module", params=BUILDS)
def build_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


# The decoder of each build in both types, and forwards of `transformers`, each model in one type.
RUNNERS = (
    [
        pytest.param(
            partial(c_decoder, build.values[0], dtype, page_size),
            id=f"{build.values[0]} {dtype}",
            marks=build.marks,
        )
        for build in BUILDS
        for dtype, page_size in ((torch.float32, 5), (torch.bfloat16, 16))
    ]
    + [
        pytest.param(
            partial(c_decoder, build.values[0], torch.bfloat16, 32, has_large_group=True),
            id=f"{build.values[0]}, 20 heads for one",
            marks=build.marks,
        )
        for build in BUILDS
        if build.values[0] == "_cpu_amx"
    ]
    + [
        pytest.param(partial(own_forward, name, DTYPES[i % 2]), id=f"{name} {DTYPES[i % 2]}")
        for i, name in enumerate(OWN_FORWARD)
    ]
)


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    made: ModelRunner = request.param()
    return made


@FEW
@given(parts=batches(), seed=SEEDS)
def test_each_row_of_a_tree_is_computed_as_its_path(
    runner: ModelRunner, parts: list[Part], seed: int
) -> None:
    sequences = Sequences(runner, parts, seed)
    for i, logits in enumerate(sequences.forward()):
        for rows, expected in sequences.rows_of_chains(i, most=3):
            if runner.decoder is not None:
                assert torch.equal(logits[rows], expected)
            near(logits[rows], expected, ROUNDING[runner.dtype])


SOME_TREES = st.lists(trees(), min_size=1, max_size=3)
ROWS = st.lists(st.integers(0, 10**6), min_size=3, max_size=3)


@FEW
@given(parts=SOME_TREES, seed=SEEDS, row_of=ROWS)
def test_an_accepted_path_of_each_tree_is_continued_like_a_chain(
    runner: ModelRunner, parts: list[Part], seed: int, row_of: list[int]
) -> None:
    sequences = Sequences(runner, parts, seed)
    sequences.forward()
    rows = [row_of[i] % (len(part.parents) + 1) for i, part in enumerate(parts)]
    sources: list[int] = []
    targets: list[int] = []
    texts = [sequences.path_tokens(i, row) for i, row in enumerate(rows)]
    for i, part in enumerate(parts):
        slots = sequences.slots(i)
        root = part.before + part.text - 1
        on_path = [slots[root + row] for row in path_to(rows[i], part.parents)]
        sources += on_path
        targets += slots[root + 1 : root + 1 + len(on_path)]
    runner.move_tokens(sources, targets)
    fresh = [sequences.prefill(text, 0)[1] for text in texts]
    size = runner.page_size
    for i, (text, pages) in enumerate(zip(texts, fresh, strict=True)):
        expected_slots = [page * size + j for page in pages for j in range(size)][: len(text)]
        expected = cached(runner, expected_slots)
        for array, wanted in zip(
            cached(runner, sequences.slots(i)[: len(text)]), expected, strict=True
        ):
            near(array, wanted, ROUNDING[runner.dtype])
    moved, prefilled = (
        runner.forward(
            [
                SequenceSlice([5], len(text), held, 1)
                for text, held in zip(texts, pages, strict=True)
            ]
        ).clone()
        for pages in (sequences.pages, fresh)
    )
    near(moved, prefilled, ROUNDING[runner.dtype])


@FEW
@given(parts=batches(), seed=SEEDS)
def test_a_tree_without_branches_gives_the_bits_of_a_chain(
    runner: ModelRunner, parts: list[Part], seed: int
) -> None:
    found = []
    for says_parents in (False, True):
        chains = [
            Part(part.before, part.text + len(part.parents), [])
            if not says_parents
            else Part(part.before, part.text, list(range(len(part.parents))))
            for part in parts
        ]
        found.append(torch.cat(Sequences(runner, chains, seed).forward()))
    assert torch.equal(*found)


def plain_attention(
    part: SequenceSlice, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int
) -> torch.Tensor:
    """Attend in float32: query [tokens, heads, size], keys and values [slots, KV heads, size]."""
    position = torch.arange(part.end)
    position[part.tree_start :] = part.tree_start - 1 + torch.tensor(depths(part.parents))
    seen = torch.arange(part.end) <= torch.arange(part.start, part.end)[:, None]
    for i, word in enumerate(ancestor_words(part.parents)):
        for j in range(len(part.parents)):
            seen[part.tree_start - part.start + i, part.tree_start + j] = bool(word >> j & 1)
    seen &= position > position[part.start :, None] - window
    repeats = query.shape[1] // keys.shape[1]
    wide_keys, wide_values = (t.float().repeat_interleave(repeats, 1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), wide_keys) * 0.2
    probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, wide_values)


@FEW
@given(
    parents=parents(),
    before=st.integers(0, 120),
    seed=SEEDS,
    window=st.sampled_from([1, 3, 8, 40, 100, 1000]),
    page_size=st.sampled_from([5, 16, 128]),
)
def test_attention_to_a_tree_equals_plain_attention(
    build_name: str,
    dtype: torch.dtype,
    parents: list[int],
    before: int,
    seed: int,
    window: int,
    page_size: int,
) -> None:
    """Beyond the tokens `before` the slice, the cache holds NaN."""
    torch.manual_seed(seed)
    pages = random.Random(seed).sample(range(64), 64)[: -(-(before + 65) // page_size)]
    part = SequenceSlice([0] * (len(parents) + 1), before, pages, 0, parents)
    keys, values = torch.randn(2, 64, page_size, 2, 32).to(dtype)
    query = torch.randn(len(parents) + 1, 8, 32).to(dtype)
    key, value = torch.randn(2, len(parents) + 1, 2, 32).to(dtype)
    for held in (keys, values):
        in_order = held[pages].flatten(0, 1)
        in_order[before:] = torch.nan
        held[pages] = in_order.view(-1, page_size, 2, 32)
    layout = BatchLayout([part], page_size, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        use_build(build_name, patch)
        attention = PagedAttention(keys, values)
    q, k, v = (t[None].transpose(1, 2) for t in (query, key, value))
    out = attention.attend(layout.cpu_batch, q, k, v, Softmax(0.2, window))
    held_keys, held_values = (held[pages].flatten(0, 1)[: part.end] for held in (keys, values))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    expected = plain_attention(part, query, held_keys, held_values, window)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@FEW
@given(
    parents=parents(),
    before=st.integers(0, 120),
    seed=SEEDS,
    window=st.sampled_from([0, 1, 3, 8, 40, 1000]),
    page_size=st.sampled_from([5, 16, 128]),
    head_size=st.sampled_from([16, 64]),
)
def test_attention_to_a_tree_gives_each_row_the_bits_of_its_chain(
    build_name: str,
    dtype: torch.dtype,
    parents: list[int],
    before: int,
    seed: int,
    window: int,
    page_size: int,
    head_size: int,
) -> None:
    """Each row equals the last row of a chain with the tokens of its path."""
    torch.manual_seed(seed)
    pages = random.Random(seed).sample(range(64), -(-(before + 65) // page_size))
    cache = torch.randn(2, 64, page_size, 2, head_size).to(dtype)
    query = torch.randn(len(parents) + 1, 8, head_size).to(dtype)
    key, value = torch.randn(2, len(parents) + 1, 2, head_size).to(dtype)

    def attend(rows: list[int], parents: list[int]) -> torch.Tensor:
        part = SequenceSlice([0] * len(rows), before, pages, 0, parents)
        batch = BatchLayout([part], page_size, torch.device("cpu")).cpu_batch
        q, k, v = (held[rows][None].transpose(1, 2) for held in (query, key, value))
        return PagedAttention(*cache.clone()).attend(batch, q, k, v, Softmax(0.2, window or None))

    with pytest.MonkeyPatch.context() as patch:
        use_build(build_name, patch)
        tree = attend([*range(len(parents) + 1)], parents)
        for row in random.Random(seed).sample(range(len(parents) + 1), min(4, len(parents))):
            chain = attend([0, *path_to(row, parents)], [])
            assert torch.equal(tree[row], chain[-1])


@settings(max_examples=25)
@given(moves=st.lists(st.tuples(st.integers(0, 79), st.integers(0, 79)), max_size=70), seed=SEEDS)
def test_moves_read_all_sources_before_they_write_a_target(
    moves: list[tuple[int, int]], seed: int
) -> None:
    """Targets differ from one another, but each may be a source as well."""
    moves = list({target: (source, target) for source, target in moves}.values())
    sources, targets = [move[0] for move in moves], [move[1] for move in moves]
    for runner in (
        c_decoder(runnable_builds()[0], torch.bfloat16, 16),
        own_forward("gathered", torch.float32),
    ):
        torch.manual_seed(seed)
        arrays = [array for layer in runner._layers.values() for array in layer.arrays]
        for array in arrays:
            array.copy_(torch.randn(array.shape))
        expected = [array.clone() for array in arrays]
        for array in expected:
            array[targets] = array[sources]
        runner.move_tokens(sources, targets)
        assert all(a.equal(b) for a, b in zip(arrays, expected, strict=True))


def test_a_slice_that_is_a_tree_is_not_continued_greedily() -> None:
    runner = c_decoder(runnable_builds()[0], torch.float32, 16)
    runner.forward([SequenceSlice([3, 4], 0, [0], 0)])
    assert runner.continue_greedily([SequenceSlice([5], 2, [0], 1, [0])], 2, VOCAB_SIZE) is None
