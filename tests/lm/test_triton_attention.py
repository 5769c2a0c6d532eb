"""The GPU attention kernel equals a plain version, for prompts, chains and trees of draft tokens.

Runs on a GPU, or by Triton's interpreter on a CPU.
"""

from __future__ import annotations

import csv
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.lm import attention, runner
from outrider.lm.gpu import tiles, triton_attention
from outrider.lm.gpu.move_tokens import TokenMover
from outrider.lm.layout import BatchLayout, KernelArguments, SequenceSlice
from outrider.lm.runner import ModelRunner
from outrider.lm.softmax import Softmax
from tests.lm import compile_kernels
from tests.lm.reference_kernel import paged_attention as reference
from tests.lm.tiny_models import CONFIGS, VOCAB_SIZE, build
from tests.tree_paths import path_to

# Rows of padding compute on arbitrary memory, and numpy warns of infinities in it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROOT = Path(__file__).parents[2]
CHAIN = 0
# For each slice: tokens of text, tokens before the text, tokens of the tree.
MIXED = [(1, 40, 9), (1, 12, CHAIN), (5, 3, 30), (1, 0, 64), (70, 2, 20), (3, 60, CHAIN)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)


def random_parents(count: int) -> list[int]:
    """Return parents of a tree with deep paths and branches anywhere."""
    return [i if random.random() < 0.6 else random.randint(0, i) for i in range(count)]


def batch(
    lengths: list[tuple[int, int, int]], page_size: int = 16, pages: int = 64
) -> list[SequenceSlice]:
    """Return slices of these lengths, in pages scattered over the cache."""
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
    max_seq_len: int = 512,
    change: Callable[[KernelArguments], KernelArguments] = lambda batch: batch,
    sinks: bool = False,
    **how: Any,
) -> torch.Tensor:
    """Attend over numbers that depend only on the shapes."""
    torch.manual_seed(1)
    arguments = change(BatchLayout(slices, page_size, DEVICE).kernel)
    query = torch.randn(arguments.positions.numel(), heads, size, dtype=dtype, device=DEVICE)
    keys, values = (
        torch.randn(pages, page_size, kv_heads, width, dtype=dtype, device=DEVICE)
        for width in (size, value_size)
    )
    if sinks:
        how["sinks"] = torch.randn(heads, device=DEVICE).to(dtype) + 2
    softmax = Softmax(0.25, **how)
    out: torch.Tensor = kernel(query, keys, values, arguments, softmax, max_seq_len=max_seq_len)
    return out


def compare(slices: list[SequenceSlice], **how: Any) -> None:
    tolerance = 4e-3 if how.get("dtype") is torch.float16 else 1e-5
    expected = attend(slices, reference, **how)
    torch.testing.assert_close(attend(slices, **how), expected, atol=tolerance, rtol=tolerance)


# Triton's interpreter takes seconds for a large batch. The quick suite has a case for each of the
# kernel's branches.
HOW: list[Any] = [
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"window": 1}, marks=pytest.mark.slow),
    {"window": 19, "softcap": 2.0},
    {"dtype": torch.float16},
    pytest.param({"sinks": True}, marks=pytest.mark.slow),
    {"sinks": True, "window": 19, "dtype": torch.float16},
    {"window": 19, "chunked": True},
]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_trees_prompts_and_chains_in_one_batch(how: dict[str, Any]) -> None:
    compare(batch(MIXED), **how)


SHAPES: list[dict[str, int]] = [
    {"heads": 6, "kv_heads": 2},
    {"heads": 20, "kv_heads": 1},
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


@pytest.mark.parametrize(
    ("page_size", "how"),
    [
        (7, {}),
        (16, {"window": 100}),
        (7, {"window": 700, "softcap": 2.0}),
        (16, {"dtype": torch.float16}),
        (16, {"window": 700, "sinks": True}),
        (7, {"window": 500, "chunked": True}),
    ],
    ids=str,
)
def test_long_sequences_are_split_into_parts(page_size: int, how: dict[str, Any]) -> None:
    """Some tokens see only one key of a part, others all keys of a part and no key of the next."""
    lengths = [(1, before, CHAIN) for before in (511, 512, 5)]
    lengths += [(3, 1023, CHAIN), (2, 1700, CHAIN)]
    where = {"page_size": page_size, "pages": 1024}
    compare(batch(lengths, **where), heads=2, kv_heads=1, max_seq_len=4096, **where, **how)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"window": 900, "softcap": 2.0},
        pytest.param({"dtype": torch.float16}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_parts_grow_with_the_slots(how: dict[str, Any]) -> None:
    """The last parts of these sequences are in the first and the second doubling of the length."""
    lengths = [(2, 8_191, CHAIN), (1, 16_380, 7)]
    slices = batch(lengths, pages=4096)
    compare(slices, heads=1, kv_heads=1, pages=4096, max_seq_len=20_000, **how)


@pytest.mark.parametrize("multiprocessors", [0, 1])
def test_the_number_of_programs_changes_no_bit(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0 multiprocessors, a program takes all parts of its rows; with 1, every second part."""
    slices = batch([(1, 2600, CHAIN), (3, 1500, CHAIN)], pages=512)
    where = {"heads": 1, "kv_heads": 1, "pages": 512, "max_seq_len": 4096}
    expected = attend(slices, **where)
    card = replace(tiles.card_of(DEVICE), multiprocessors=multiprocessors)
    monkeypatch.setattr(tiles, "card_of", lambda device: card)
    assert attend(slices, **where).equal(expected)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"window": 100},
        {"window": 700, "softcap": 2.0},
        {"sinks": True},
        pytest.param({"window": 410, "chunked": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_prompt_beside_chains_and_trees_is_not_split(how: dict[str, Any]) -> None:
    """The longest slice that is split has 128 tokens, and the shortest that is not has 129.

    All slices see several parts.
    """
    lengths = [(1, 900, CHAIN), (128, 390, CHAIN), (129, 390, CHAIN), (1, 500, 20)]
    slices = batch(lengths, pages=512)
    compare(slices, heads=1, kv_heads=1, pages=512, max_seq_len=2048, **how)


def with_sequences_of_no_tokens(batch: KernelArguments) -> KernelArguments:
    """Put a sequence of no tokens before, between and after the given sequences."""

    def spread(numbers: torch.Tensor, padding: int) -> torch.Tensor:
        count = 2 * len(numbers) + 1
        out = numbers.new_full((count, *numbers.shape[1:]), padding)
        out[1::2] = numbers
        return out

    return replace(
        batch,
        cu_seqlens_q=batch.cu_seqlens_q.repeat_interleave(2),
        seq_lens=spread(batch.seq_lens, 1),
        tree_starts=spread(batch.tree_starts, 1),
        block_table=spread(batch.block_table, 0),
    )


def with_rows_of_no_sequence(batch: KernelArguments) -> KernelArguments:
    """Put 40 rows after the last sequence, as in a graph of a larger batch."""

    def padded(numbers: torch.Tensor) -> torch.Tensor:
        return torch.cat([numbers, numbers.new_zeros(40)])

    return replace(
        batch,
        slots=padded(batch.slots),
        positions=padded(batch.positions),
        ancestors=padded(batch.ancestors),
    )


@pytest.mark.parametrize("max_seq_len", [512, 4096])
@pytest.mark.parametrize("change", [with_sequences_of_no_tokens, with_rows_of_no_sequence])
def test_padding_of_a_batch_changes_no_row(
    change: Callable[[KernelArguments], KernelArguments], max_seq_len: int
) -> None:
    slices = batch([(1, 40, 9), (20, 12, CHAIN), (1, 3, CHAIN)])
    count = sum(len(part.token_ids) for part in slices)
    expected = attend(slices, reference, change=change)[:count]
    result = attend(slices, change=change, max_seq_len=max_seq_len)[:count]
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("before", "how"),
    [
        (453, {}),
        (450, {"dtype": torch.float16}),
        (510, {"window": 3}),
        (490, {"window": 31, "chunked": True}),
        (511, {}),
    ],
    ids=str,
)
def test_parts_begin_anywhere_in_a_tree(before: int, how: dict[str, Any]) -> None:
    slices = batch([(1, before, 64)], pages=512)
    compare(slices, heads=1, kv_heads=1, pages=512, max_seq_len=4096, **how)


@pytest.mark.parametrize(
    ("before", "how"), [(37, {}), (100, {"window": 30}), (508, {"softcap": 0.5})], ids=str
)
def test_a_trees_first_path_gets_the_very_result_of_its_chain(
    before: int, how: dict[str, Any]
) -> None:
    """Both batches have the same number of rows, so they have the same tiles.

    The last three rows are branches in the tree, and are not compared.
    """
    parents = [0, 1, 2, 3, 4, 2, 0, 7]
    tree = SequenceSlice([0] * 9, before, list(range(80)), 1, parents)
    chain = SequenceSlice([0] * 9, before, list(range(80)), 1)
    results = [
        attend([part], heads=2, kv_heads=1, pages=80, max_seq_len=1280, **how)[:6]
        for part in (tree, chain)
    ]
    assert results[0].equal(results[1])


@pytest.mark.parametrize(
    "name",
    [
        "gemma2, soft cap and alternating windows",
        pytest.param("granite_swa, sinks and alternating windows", marks=pytest.mark.slow),
        pytest.param("gpt2, learned positions", marks=pytest.mark.slow),
    ],
)
def test_a_model_gets_its_own_logits_with_the_kernel_also_after_tokens_of_a_tree_moved(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.LayerCache, "supports_kernel", lambda self, device: True)
    monkeypatch.setattr(runner, "triton_works", lambda device: True)
    monkeypatch.setattr(ModelRunner, "_takes_graphs", lambda self: False)
    # The comparison below replaces the comparison at start, which takes the interpreter longer.
    monkeypatch.setattr(ModelRunner, "_compare", lambda self, texts, own: None)
    ours = ModelRunner(build(CONFIGS[name]).to(DEVICE), page_count=16)
    assert ours._token_mover is not None
    model = build(CONFIGS[name])
    # transformers 5.17 would compute Gemma 2 by sdpa, which leaves out the soft cap.
    model.set_attn_implementation("eager")
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
    layer.attend(trial, trial, trial, Softmax(1.0))
    assert layer.supports_kernel(torch.device(device)) == supported


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the tables of `compile_kernels.py`."""
    folder = tmp_path_factory.mktemp("kernels")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.lm.compile_kernels", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def table(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return [
            {name: int(value) if value.isdigit() else value for name, value in row.items()}
            for row in csv.DictReader(file)
        ]


LAYER_KERNELS = {
    "sum and norm, bfloat16",
    "sum and norm of 576, bfloat16",
    "sum and norm of 16384, float32",
    "heads, bfloat16",
    "normed heads, bfloat16",
    "normed heads of 256, float32",
    "gated product, bfloat16",
    "gated product, float32",
}


@pytest.mark.slow
def test_the_kernels_compile_for_other_gpus_and_fit_their_shared_memory(compiled: Path) -> None:
    kernels = table(compiled / "kernels.csv")
    assert len(kernels) == 25 * len(compile_kernels.CARDS)
    for kernel in kernels:
        card = compile_kernels.CARDS[kernel["architecture"]]
        assert kernel["shared_bytes"] <= card.shared_bytes, kernel
    assert {kernel["kernel"] for kernel in kernels if not kernel["instruction"]} == {
        "float32",
        "large heads, float32",
        *LAYER_KERNELS,
        "parts",
        "parts, window",
        "parts, window, sinks",
        "moves",
        "noise",
        "penalties",
    }


@pytest.mark.slow
def test_no_register_of_a_layers_kernels_spills(compiled: Path) -> None:
    kernels = [row for row in table(compiled / "kernels.csv") if row["kernel"] in LAYER_KERNELS]
    assert len(kernels) == len(LAYER_KERNELS) * len(compile_kernels.CARDS)
    for kernel in kernels:
        assert kernel["stack_bytes"] == 0, kernel
        assert kernel["registers"] <= 96, kernel


@pytest.mark.slow
def test_keys_and_values_have_two_buffers_on_every_card_and_three_on_large_cards(
    compiled: Path,
) -> None:
    for kernel in table(compiled / "kernels.csv"):
        if kernel["kernel"] in ("one token each, bfloat16", "drafts, bfloat16"):
            assert kernel["buffers"] == (3 if kernel["architecture"] >= 90 else 2), kernel
            assert kernel["stack_bytes"] == 0, kernel


@pytest.mark.slow
def test_tiles_of_plain_steps_and_of_drafts_divide_keys_alike(compiled: Path) -> None:
    """Steps and drafts add a row's keys in the same order, as `outrider.lm.gpu.tiles` says."""
    kernels = {
        (kernel["architecture"], kernel["kernel"]): (kernel["instruction"], kernel["warps"])
        for kernel in table(compiled / "kernels.csv")
    }
    for architecture in compile_kernels.CARDS:
        plain = kernels[architecture, "one token each, bfloat16"]
        assert plain == kernels[architecture, "drafts, bfloat16"] == ("mma.sync", "1x4")
