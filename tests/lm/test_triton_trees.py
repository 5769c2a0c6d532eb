"""Trees on a GPU: attention equals a plain version, and accepted tokens are moved to their places.

Runs on a GPU, or by Triton's interpreter on a CPU.
"""

from __future__ import annotations

import random
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
CHAIN = 0
# Tokens of text, tokens before them, tokens of the tree.
MIXED = [(1, 40, 9), (1, 12, CHAIN), (5, 3, 30), (1, 0, 64), (70, 2, 20), (3, 60, CHAIN)]
HOW: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 3},
    {"window": 19, "softcap": 2.0},
    {"window": 70},
    {"softcap": 0.5},
]


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
    page_size: int = 16,
    pages: int = 64,
    dtype: torch.dtype = torch.float32,
    max_seq_len: int = 1024,
    **how: Any,
) -> torch.Tensor:
    """Attend over numbers that depend on the shapes alone."""
    torch.manual_seed(1)
    layout = BatchLayout(slices, page_size, DEVICE)
    query = torch.randn(layout.positions.numel(), 4, 16, dtype=dtype, device=DEVICE)
    keys, values = torch.randn(2, pages, page_size, 2, 16, dtype=dtype, device=DEVICE)
    out: torch.Tensor = kernel(
        query, keys, values, layout.kernel, max_seq_len=max_seq_len, scale=0.25, **how
    )
    return out


@pytest.mark.parametrize("how", HOW, ids=str)
def test_trees_prompts_and_chains_in_one_batch(how: dict[str, Any]) -> None:
    slices = batch(MIXED)
    torch.testing.assert_close(
        attend(slices, **how), attend(slices, reference, **how), atol=1e-5, rtol=1e-5
    )


def test_trees_in_half_precision() -> None:
    slices = batch(MIXED)
    out = attend(slices, dtype=torch.float16)
    expected = attend(slices, reference, dtype=torch.float16)
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("page_size", [1, 7, 128])
def test_trees_cross_borders_of_pages(page_size: int) -> None:
    pages = 128
    slices = batch([(1, 6, 20), (2, 30, 11), (1, 9, CHAIN)], page_size, pages)
    out = attend(slices, page_size=page_size, pages=pages)
    expected = attend(slices, reference, page_size, pages)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", HOW[:4], ids=str)
@pytest.mark.parametrize("before", [965, 1000, 1022, 1023, 2047])
def test_parts_begin_anywhere_in_a_tree(before: int, how: dict[str, Any]) -> None:
    slices = batch([(1, before, 60), (1, before, CHAIN)], pages=512)
    kept = {"pages": 512, "max_seq_len": 4096}
    out = attend(slices, **kept, **how)
    expected = attend(slices, reference, **kept, **how)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", [{}, {"window": 30}, {"softcap": 0.5}], ids=str)
@pytest.mark.parametrize("before", [37, 100, 1020])
def test_a_trees_first_path_gets_the_very_result_of_its_chain(
    before: int, how: dict[str, Any]
) -> None:
    """As many rows in both batches, so that tiles are the same; the last rows are branches."""
    parents = [0, 1, 2, 3, 4, 2, 0, 7]
    tree = SequenceSlice([0] * 9, before, list(range(80)), 1, parents)
    chain = SequenceSlice([0] * 9, before, list(range(80)), 1)
    kept = {"pages": 80, "max_seq_len": 1280}
    results = [attend([part], **kept, **how)[:6] for part in (tree, chain)]
    assert results[0].equal(results[1])


def paths(parents: list[int]) -> list[list[int]]:
    return [path_to(row, parents) for row in range(len(parents) + 1)]


@pytest.mark.parametrize("name", ["llama", "mistral, sliding window"])
def test_after_its_tokens_moved_a_tree_is_as_if_it_had_been_a_chain(
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
    texts = [text + [tree[row - 1] for row in path] for path in paths(parents)]
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in texts])
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=0)
    path = path_to(7, parents)
    slots = [pages[slot // 16] * 16 + slot % 16 for slot in range(48)]
    ours.move_tokens(
        [slots[29 + row] for row in path], [slots[30 + place] for place in range(len(path))]
    )
    logits = ours.forward([SequenceSlice([5], 30 + len(path), pages, 1)])
    with torch.inference_mode():
        expected = model(torch.tensor([[*texts[7], 5]])).logits[0, -1:]
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sequences", [1, 3, 12])
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


def test_slots_of_an_odd_size_have_no_mover() -> None:
    assert TokenMover.of([torch.zeros(8, 1, 3, device=DEVICE)]) is None
