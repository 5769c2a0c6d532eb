"""The GPU attention kernel equals a plain version, for prompts, chains and trees of draft tokens.

Runs on a GPU, or by Triton's interpreter on a CPU.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_kernel import paged_attention as reference
from tiny_models import CONFIGS, VOCAB_SIZE, build

from outrider.lm import attention, runner
from outrider.lm.gpu import triton_attention
from outrider.lm.gpu.move_tokens import TokenMover
from outrider.lm.layout import BatchLayout, SequenceSlice
from outrider.lm.runner import ModelRunner
from outrider.protocol.token_tree import path_to

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROOT = Path(__file__).parents[2]
CHAIN = 0
# Tokens of text, tokens before them, tokens of the tree.
MIXED = [(1, 40, 9), (1, 12, CHAIN), (5, 3, 30), (1, 0, 64), (70, 2, 20), (3, 60, CHAIN)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)


def random_parents(count: int) -> list[int]:
    """Parents of a tree with deep paths and branches anywhere."""
    return [i if random.random() < 0.6 else random.randint(0, i) for i in range(count)]


def batch(
    lengths: list[tuple[int, int, int]], page_size: int = 16, pages: int = 64
) -> list[SequenceSlice]:
    """Slices of these lengths, in pages scattered over the cache."""
    order = random.sample(range(pages), pages)
    slices = []
    for text, before, tree in lengths:
        needed = -(-(before + text + tree) // page_size)
        numbers, order = order[:needed], order[needed:]
        tokens = [0] * (text + tree)
        slices.append(SequenceSlice(tokens, before, numbers, 1, random_parents(tree)))
    return slices


def attend(
    slices: list[SequenceSlice],
    kernel: Any = triton_attention.paged_attention,
    *,
    page_size: int = 16,
    pages: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    value_size: int = 16,
    dtype: torch.dtype = torch.float32,
    max_seq_len: int = 1024,
    **how: Any,
) -> torch.Tensor:
    """Attend over numbers that depend on the shapes alone."""
    torch.manual_seed(1)
    layout = BatchLayout(slices, page_size, DEVICE)
    query = torch.randn(layout.positions.numel(), heads, size, dtype=dtype, device=DEVICE)
    keys, values = (
        torch.randn(pages, page_size, kv_heads, width, dtype=dtype, device=DEVICE)
        for width in (size, value_size)
    )
    out: torch.Tensor = kernel(
        query, keys, values, layout.kernel, max_seq_len=max_seq_len, scale=0.25, **how
    )
    return out


def compare(slices: list[SequenceSlice], **how: Any) -> None:
    tolerance = 4e-3 if how.get("dtype") is torch.float16 else 1e-5
    expected = attend(slices, reference, **how)
    torch.testing.assert_close(attend(slices, **how), expected, atol=tolerance, rtol=tolerance)


HOW: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 19, "softcap": 2.0},
    {"dtype": torch.float16},
]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_trees_prompts_and_chains_in_one_batch(how: dict[str, Any]) -> None:
    compare(batch(MIXED), **how)


SHAPES: list[dict[str, int]] = [
    {"heads": 6, "kv_heads": 2},
    {"heads": 40, "kv_heads": 1},
    {"size": 80, "value_size": 80},
    {"size": 32, "value_size": 16},
    {"size": 8, "value_size": 8},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_of_any_number_and_size(shape: dict[str, int]) -> None:
    """Heads share keys, and their sizes need not be powers of two."""
    compare(batch([(1, 40, CHAIN), (5, 12, CHAIN), (33, 0, CHAIN), (1, 6, 20)]), **shape)


@pytest.mark.parametrize("page_size", [1, 7, 128])
def test_trees_cross_borders_of_pages(page_size: int) -> None:
    slices = batch([(1, 6, 20), (2, 30, 11), (1, 9, CHAIN)], page_size, 128)
    compare(slices, page_size=page_size, pages=128)


@pytest.mark.parametrize("how", [{}, {"window": 100}, {"window": 1500}], ids=str)
def test_long_sequences_are_split_into_parts(how: dict[str, int]) -> None:
    """Some tokens see one key of a part, others all keys of a part and none of the next."""
    lengths = [(1, before, CHAIN) for before in (1023, 1024, 5)]
    lengths += [(3, 2047, CHAIN), (2, 2700, CHAIN)]
    slices = batch(lengths, pages=512)
    compare(slices, heads=2, kv_heads=1, pages=512, max_seq_len=4096, **how)


@pytest.mark.parametrize(("before", "how"), [(965, {}), (1022, {"window": 3}), (1023, {})], ids=str)
def test_parts_begin_anywhere_in_a_tree(before: int, how: dict[str, Any]) -> None:
    compare(batch([(1, before, 60)], pages=512), pages=512, max_seq_len=4096, **how)


@pytest.mark.parametrize(
    ("before", "how"), [(37, {}), (100, {"window": 30}), (1020, {"softcap": 0.5})], ids=str
)
def test_a_trees_first_path_gets_the_very_result_of_its_chain(
    before: int, how: dict[str, Any]
) -> None:
    """As many rows in both batches, so that tiles are the same; the last rows are branches."""
    parents = [0, 1, 2, 3, 4, 2, 0, 7]
    tree = SequenceSlice([0] * 9, before, list(range(80)), 1, parents)
    chain = SequenceSlice([0] * 9, before, list(range(80)), 1)
    results = [attend([part], pages=80, max_seq_len=1280, **how)[:6] for part in (tree, chain)]
    assert results[0].equal(results[1])


@pytest.mark.parametrize(
    "name",
    [
        "gemma2, soft cap and alternating windows",
        pytest.param("gpt2, learned positions", marks=pytest.mark.slow),
    ],
)
def test_a_model_gets_its_own_logits_with_the_kernel_also_after_tokens_of_a_tree_moved(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.LayerCache, "supports_kernel", lambda self, device: True)
    monkeypatch.setattr(runner, "triton_works", lambda device: True)
    monkeypatch.setattr(ModelRunner, "_takes_graphs", lambda self: False)
    ours = ModelRunner(build(CONFIGS[name]).to(DEVICE), page_count=16)
    assert ours._token_mover is not None
    model = build(CONFIGS[name])
    text = random.choices(range(VOCAB_SIZE), k=30)
    tree = random.choices(range(VOCAB_SIZE), k=8)
    pages, parents = [7, 2, 9], [0, 1, 1, 3, 0, 5, 6, 5]
    ours.forward([SequenceSlice(text[:-1], 0, pages, 0)])
    logits = ours.forward([SequenceSlice([text[-1], *tree], 29, pages, 9, parents)])
    paths = [path_to(row, parents) for row in range(len(parents) + 1)]
    texts = [text + [tree[row - 1] for row in path] for path in paths]
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in texts])
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=0)
    path = paths[7]
    slots = [pages[slot // 16] * 16 + slot % 16 for slot in range(48)]
    ours.move_tokens(
        [slots[29 + row] for row in path], [slots[30 + place] for place in range(len(path))]
    )
    logits = ours.forward([SequenceSlice([5], 30 + len(path), pages, 1)])
    with torch.inference_mode():
        expected = model(torch.tensor([[*texts[7], 5]])).logits[0, -1:]
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sequences", [1, 12])
def test_moves_of_many_sequences_in_all_layers_equal_index_copies(sequences: int) -> None:
    """Twelve sequences have more moves than the kernel reads at once."""
    shapes = [(1, 8), (2, 16), (3, 4), (8, 128)]
    arrays = [
        torch.randn(64 * sequences, *shape, device=DEVICE).to(dtype)
        for shape, dtype in zip(shapes, [torch.float32, torch.bfloat16] * 2, strict=True)
    ]
    sources: list[int] = []
    targets: list[int] = []
    order = random.sample(range(64 * sequences), 64 * sequences)
    for i in range(sequences):
        slots = order[64 * i : 64 * i + 64]
        taken = sorted(random.sample(range(1, 64), 30))
        moved = [(row, place) for place, row in enumerate(taken, 1) if row != place]
        sources += [slots[row] for row, _ in moved]
        targets += [slots[place] for _, place in moved]
    expected = [array.clone() for array in arrays]
    for array in expected:
        array[targets] = array[sources]
    mover = TokenMover.of(arrays)
    assert mover is not None
    mover.move(sources, targets)
    for array, wanted in zip(arrays, expected, strict=True):
        assert array.equal(wanted)


@pytest.mark.parametrize(
    ("device", "size", "supported"),
    [("cuda", 100, True), ("cuda", 256, True), ("cuda", 512, False), ("cpu", 128, False)],
)
def test_a_layer_uses_the_kernel_only_where_it_is_supported(
    device: str, size: int, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "triton_works", lambda device: device.type == "cuda")
    layer = attention.LayerCache()
    trial = torch.zeros(1, 2, 3, size)
    layer.attend(trial, trial, trial, 1.0, None, None)
    assert layer.supports_kernel(torch.device(device)) == supported


@pytest.mark.slow
def test_the_kernels_compile_for_other_gpus_and_fit_the_smallest() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 39
    # On the oldest architecture the two largest tiles spill a few registers.
    spilling = {(kernel["architecture"], kernel["name"]) for kernel in kernels if kernel["stack"]}
    assert spilling <= {(80, "large heads, bfloat16"), (80, "prompts and trees, bfloat16")}
    assert max(kernel["stack"] for kernel in kernels) <= 136
    assert max(kernel["shared"] for kernel in kernels) <= 99 * 1024
    assert {kernel["name"] for kernel in kernels if not kernel["mma"]} == {
        "float32",
        "large heads, float32",
        "parts",
        "parts, window",
        "moves",
        "noise",
    }
