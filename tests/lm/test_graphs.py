"""With CUDA graphs, a batch padded to its bucket gives the same logits as without padding.

On a CPU, recorded operators replace the graph (see recorded_graphs.py).
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch

from outrider.lm.gpu import graphs, triton_attention
from outrider.lm.gpu.inputs import BlockTable, CacheShape
from outrider.lm.pages import KVSequence, PagePool
from outrider.lm.runner import Bounds, ModelRunner, SequenceSlice
from outrider.protocol.token_tree import MAX_TREE_TOKENS
from tests.lm.recorded_graphs import Capture, Recording, triton_kernel
from tests.lm.reference_kernel import paged_attention as reference_attention
from tests.lm.tiny_models import CONFIGS, VOCAB_SIZE, build
from tests.tree_paths import path_to

# Rows of padding compute on arbitrary memory, and numpy warns of infinities in it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)
PAGE_COUNT = 6
BOUNDS = Bounds(sequences=5, tokens_each=4, tokens=16)
NAMES = [
    "llama",
    "gemma3, alternating windows",
    "granite_swa, sinks and alternating windows",
    "gpt2, learned positions",
]


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def expected(model: Any, texts: list[list[int]], counts: list[int]) -> torch.Tensor:
    """Return the logits of the last n tokens of each text, with n from `counts`."""
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0] for ids in texts]
    return torch.cat([rows[len(rows) - n :] for rows, n in zip(logits, counts, strict=True)])


def pair(name: str, page_size: int = 256, page_count: int = PAGE_COUNT) -> tuple[ModelRunner, Any]:
    """Return a runner with captured graphs, and the model as `transformers` runs it."""
    runner = ModelRunner(build(CONFIGS[name]), page_size=page_size, page_count=page_count)
    runner.capture(BOUNDS)
    assert runner._graphs is not None
    return runner, build(CONFIGS[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_gives_the_logits_of_its_paths_beside_chains(name: str, capture: Capture) -> None:
    runner, reference = pair(name)
    texts = [text(i, 30 + 7 * i) for i in range(3)]
    for i, ids in enumerate(texts):
        runner.forward([SequenceSlice(ids[:-1], 0, [i], 0)])
    capture.replays = 0
    tree = text(9, 3)
    chain = SequenceSlice([texts[0][-1], *tree], 29, [0], 4)
    beside = SequenceSlice(texts[2][-1:], 43, [2], 1)
    for parents in ([0, 0, 0], [0, 1, 0], [0, 0, 2]):
        paths = [texts[1] + [tree[at - 1] for at in path_to(row, parents)] for row in range(4)]
        batch = [chain, SequenceSlice([texts[1][-1], *tree], 36, [1], 4, parents), beside]
        wanted = expected(reference, [texts[0] + tree, *paths, texts[2]], [4, 1, 1, 1, 1, 1])
        torch.testing.assert_close(runner.forward(batch), wanted, atol=1e-4, rtol=0)
    # The inputs of this forward still hold the bitmasks of the last tree, and it must not read
    # them.
    chains = [chain, SequenceSlice([texts[1][-1], *tree], 36, [1], 4), beside]
    wanted = expected(reference, [texts[0] + tree, texts[1] + tree, texts[2]], [4, 4, 1])
    torch.testing.assert_close(runner.forward(chains), wanted, atol=1e-4, rtol=0)
    assert capture.replays == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_padded_batch_gives_the_logits_of_its_sequences_alone(
    name: str, capture: Capture
) -> None:
    """Each forward runs on the cache that earlier forwards have left."""
    runner, reference = pair(name)
    for counts in ([1], [4], [2, 1, 4], [3, 3, 3, 3, 3], [1, 1, 1, 1, 1]):
        texts = [text(i, 30 + 7 * i) for i in range(len(counts))]
        for i, ids in enumerate(texts):
            runner.forward([SequenceSlice(ids[: -counts[i]], 0, [i], 0)])
        capture.replays = 0
        batch = [
            SequenceSlice(ids[-n:], len(ids) - n, [i], n)
            for i, (ids, n) in enumerate(zip(texts, counts, strict=True))
        ]
        logits = runner.forward(batch)
        torch.testing.assert_close(logits, expected(reference, texts, counts), atol=1e-4, rtol=0)
        assert capture.replays == 1


def test_graphs_serve_any_batch_and_write_only_the_batchs_pages(
    capture: Capture,
) -> None:
    runner, reference = pair("llama")
    recorded = len(capture.recordings)
    rng = random.Random(5)
    texts: dict[int, list[int]] = {page: text(page, 20 + 9 * page) for page in range(PAGE_COUNT)}
    for page, ids in texts.items():
        runner.forward([SequenceSlice(ids, 0, [page], 0)])
    capture.replays = 0
    for _ in range(30):
        pages = rng.sample(range(PAGE_COUNT), rng.randint(1, 4))
        new = {page: text(rng.randrange(10**6), rng.randint(1, 3)) for page in pages}
        batch = [
            SequenceSlice(ids, len(texts[page]), [page], rng.randint(0, len(ids)))
            for page, ids in new.items()
        ]
        logits = runner.forward(batch)
        for page, ids in new.items():
            texts[page] += ids
        counts = [part.logit_count for part in batch]
        wanted = expected(reference, [texts[page] for page in pages], counts)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    assert (capture.replays, len(capture.recordings)) == (30, recorded)


def test_batches_beyond_the_bounds_run_without_a_graph(capture: Capture) -> None:
    runner, _ = pair("llama")
    capture.replays = 0
    six_sequences = [SequenceSlice([1], 0, [page], 1) for page in range(6)]
    seventeen_tokens = [SequenceSlice([1] * 17, 0, [0], 5)]
    twenty_in_all = [SequenceSlice([1] * 4, 0, [page], 4) for page in range(5)]
    for batch in (six_sequences, seventeen_tokens, twenty_in_all):
        assert len(runner.forward(batch)) == sum(part.logit_count for part in batch)
    assert capture.replays == 0


def test_every_batch_within_the_bounds_has_a_bucket_that_holds_it() -> None:
    bounds = Bounds(sequences=37, tokens_each=9, tokens=300)
    captured = set(graphs.buckets(bounds))
    for count in range(1, 38):
        for total in range(count, bounds.tokens + 1):
            even = [total // count + (i < total % count) for i in range(count)]
            with_prompt = [1] * (count - 1) + [total - count + 1]
            for lengths in (even, with_prompt):
                bucket = graphs.bucket_of(lengths, bounds)
                assert bucket is not None
                assert bucket in captured
                assert bucket.batch >= count
                assert bucket.rows >= total
                assert bucket.longest >= max(lengths)
    assert graphs.bucket_of([1] * 38, bounds) is None
    assert graphs.bucket_of([301], bounds) is None


def test_graphs_that_give_other_logits_are_dropped(
    capture: Capture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = ModelRunner(build(CONFIGS["llama"]), page_size=256, page_count=PAGE_COUNT)
    monkeypatch.setattr(Recording, "replay", lambda self: None)
    with caplog.at_level(logging.WARNING):
        runner.capture(BOUNDS)
    assert "no CUDA graph is used: LlamaForCausalLM cannot be served: with the" in caplog.text
    capture.replays = 0
    runner.forward([SequenceSlice([1], 0, [0], 1)])
    assert capture.replays == 0


def test_a_model_that_cannot_be_captured_runs_without_graphs(
    capture: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    config = CONFIGS["llama"]
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build(type(config)(**config.to_diff_dict() | {"rope_parameters": rope}))
    runner = ModelRunner(model, page_size=256, page_count=PAGE_COUNT)
    with caplog.at_level(logging.WARNING):
        runner.capture(BOUNDS)
    assert "not permitted when stream is capturing" in caplog.text
    assert runner.forward([SequenceSlice([1], 0, [0], 1)]).shape == (1, VOCAB_SIZE)
    assert capture.replays == 0


def poison(runner: ModelRunner, slices: list[SequenceSlice]) -> None:
    """Fill each page that belongs to no slice with NaN, including the page for padding."""
    owned = {page for part in slices for page in part.pages}
    for array in runner._cache_arrays():
        pages = array.view(-1, runner.page_size, *array.shape[1:])
        pages[[page for page in range(len(pages)) if page not in owned]] = torch.nan


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_runs_in_a_graph_beside_decoding_sequences(name: str, capture: Capture) -> None:
    """Pages that belong to no slice hold NaN, which would spread if they were read."""
    runner, reference = pair(name)
    texts = [text(i, 30 + 7 * i) for i in range(4)]
    decoding = [SequenceSlice(texts[i][:-1], 0, [i], 0) for i in range(2)]
    for part in decoding:
        runner.forward([part])
    tree, parents = text(9, 3), [0, 1, 0]
    paths = [texts[1] + [tree[at - 1] for at in path_to(row, parents)] for row in range(4)]
    batches = [
        # Two chunks of prompts: one sequence has logits, the other has none.
        [SequenceSlice(texts[2][:9], 0, [2], 0), SequenceSlice(texts[3][:7], 0, [3], 2)],
        [
            SequenceSlice(texts[0][-1:], 29, [0], 1),
            SequenceSlice(texts[2][9:15], 9, [2], 1),
            SequenceSlice([texts[1][-1], *tree], 36, [1], 4, parents),
            SequenceSlice(texts[3][7:12], 7, [3], 0),
        ],
        [SequenceSlice(texts[2][15:31], 15, [2], 16)],
    ]
    wanted = [
        expected(reference, [texts[3][:7]], [2]),
        expected(reference, [texts[0], texts[2][:15], *paths], [1] * 6),
        expected(reference, [texts[2][:31]], [16]),
    ]
    capture.replays = 0
    for batch, logits in zip(batches, wanted, strict=True):
        poison(runner, [*decoding, *batches[0]])
        torch.testing.assert_close(runner.forward(batch), logits, atol=1e-4, rtol=0)
    assert capture.replays == len(batches)


def long_runner(monkeypatch: pytest.MonkeyPatch, kernel: Any, device: str = "cpu") -> ModelRunner:
    """Return a runner with one layer, 2,048 tokens of context, and graphs of the given kernel.

    The cache holds random numbers. A sequence of 2,048 tokens is split into several parts.
    """
    sizes = {"max_position_embeddings": 2048, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = CONFIGS["llama, one head for all"]
    model = build(type(config)(**config.to_diff_dict() | sizes)).to(device)
    runner = ModelRunner(model, page_count=300)
    for array in runner._cache_arrays():
        array.normal_()
    # Few buckets, because Triton's interpreter is slow.
    monkeypatch.setattr(graphs, "_MEANS", (1,))
    monkeypatch.setattr(triton_attention, "paged_attention", kernel)
    runner._trial = None
    runner.capture(Bounds(sequences=2, tokens_each=1 + MAX_TREE_TOKENS, tokens=80))
    return runner


def long_batches() -> list[list[SequenceSlice]]:
    """Return three batches, each with a step after 1,000 tokens.

    The first also has a tree of 64 tokens after 1,900, and the second a part of a prompt.
    """
    draw = random.Random(2)
    parents = [draw.randrange(max(0, i - 6), i + 1) for i in range(MAX_TREE_TOKENS)]
    pages = draw.sample(range(300), 200)
    tree = SequenceSlice(text(1, 65), 1900, pages[:128], 65, parents)
    beside = SequenceSlice(text(2, 1), 1000, pages[128:], 1)
    return [
        [tree, beside],
        [beside, SequenceSlice(text(3, 70), 550, pages[:128], 3)],
        [beside],
    ]


def compare_long(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    """Compare what graphs compute over a poisoned cache with what `kernel` computes over it."""
    for batch in long_batches():
        poison(runner, batch)
        made = runner.forward(batch).clone()
        with monkeypatch.context() as eager:
            eager.setattr(runner, "_graphs", None)
            eager.setattr(triton_attention, "paged_attention", kernel)
            wanted = runner.forward(batch)
        torch.testing.assert_close(made, wanted, atol=1e-4, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a test below does it on the GPU")
def test_trees_of_64_and_prompts_behind_many_tokens_run_in_graphs(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = long_runner(monkeypatch, triton_kernel)
    capture.replays = 0
    compare_long(runner, monkeypatch, reference_attention)
    assert capture.replays == len(long_batches())


def test_a_tree_may_have_slots_beyond_the_context(capture: Capture) -> None:
    """The tree's positions stay within the context. The other sequence's pages stay unchanged."""
    runner = ModelRunner(build(CONFIGS["llama"]), page_size=16, page_count=40)
    runner.capture(Bounds(sequences=2, tokens_each=1 + MAX_TREE_TOKENS, tokens=80))
    assert runner.context_length == 256
    texts, pages = [text(1, 255), text(2, 40)], [list(range(20)), list(range(30, 33))]
    for ids, own in zip(texts, pages, strict=True):
        runner.forward([SequenceSlice(ids[:-1], 0, own, 0)])
    tree = text(3, MAX_TREE_TOKENS)
    batch = [
        SequenceSlice([texts[0][-1], *tree], 254, pages[0], 1 + len(tree), [0] * len(tree)),
        SequenceSlice(texts[1][-1:], 39, pages[1], 1),
    ]
    paths = [texts[0], *[[*texts[0], token] for token in tree], texts[1]]
    wanted = expected(build(CONFIGS["llama"]), paths, [1] * len(paths))
    capture.replays = 0
    for _ in range(2):
        torch.testing.assert_close(runner.forward(batch), wanted, atol=1e-4, rtol=0)
        batch.reverse()
        wanted = wanted.roll(1, 0)
    assert capture.replays == 2


@pytest.mark.parametrize("name", NAMES)
def test_several_tokens_in_one_call_are_those_of_single_forwards(
    name: str, capture: Capture
) -> None:
    """Tokens cross page borders, follow a rewind, and write to no other sequence's page."""
    size, limit = 4, VOCAB_SIZE - 3
    runner, reference = pair(name, page_size=size, page_count=60)
    draw = random.Random(4)
    pages = draw.sample(range(60), 60)
    sequences = [KVSequence(pages[20 * i : 20 * i + 20]) for i in range(3)]
    texts = [text(i, 9 + 3 * i) for i in range(3)]
    for ids, kv in zip(texts, sequences, strict=True):
        for at in range(0, len(ids) - 1, 12):
            runner.forward([SequenceSlice(ids[:-1][at : at + 12], at, kv.pages, 0, kv=kv)])
    for count, batch in ((5, [0, 1, 2]), (1, [2]), (7, [2, 0]), (3, [1, 2, 0])):
        slices = [
            SequenceSlice(texts[i][-1:], len(texts[i]) - 1, sequences[i].pages, 1, kv=sequences[i])
            for i in batch
        ]
        poison(runner, [SequenceSlice([0], 0, kv.pages, 1) for kv in sequences])
        capture.replays = 0
        found = runner.continue_with_logits(slices, count, limit)
        assert found is not None
        assert capture.replays == count
        tokens, logits = found
        for place, i in enumerate(batch):
            ids = [*texts[i], *tokens[:, place].tolist()]
            wanted = expected(reference, [ids[:-1]], [count])
            torch.testing.assert_close(logits[:, place], wanted, atol=1e-4, rtol=0)
            assert ids[-count:] == wanted[:, :limit].argmax(-1).tolist()
            # The last two guesses are wrong, and another token follows.
            kept = ids[: len(texts[i]) + max(0, count - 2)]
            texts[i] = [*kept, draw.randrange(VOCAB_SIZE)]
    assert runner.continue_greedily(slices, 2, limit) is not None
    assert runner.continue_greedily([SequenceSlice([1, 2], 0, [0], 1)], 2, limit) is None
    six_sequences = [SequenceSlice([1], 0, [page], 1) for page in range(6)]
    assert runner.continue_greedily(six_sequences, 2, limit) is None


def test_capture_goes_on_with_smaller_buckets_after_memory_ran_out(
    capture: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    runner = ModelRunner(build(CONFIGS["llama"]), page_size=256, page_count=PAGE_COUNT)
    capture.failures = [torch.OutOfMemoryError("8 MiB wanted"), None, torch.OutOfMemoryError("9")]
    with caplog.at_level(logging.WARNING):
        runner.capture(BOUNDS)
    assert "no CUDA graph for 5 sequences and 16 tokens: 8 MiB wanted" in caplog.text
    assert runner.graph_count == len(graphs.buckets(BOUNDS)) - 2
    capture.replays = 0
    prompt = text(4, 14)
    wanted = expected(build(CONFIGS["llama"]), [prompt], [3])
    torch.testing.assert_close(
        runner.forward([SequenceSlice(prompt, 0, [0], 3)]), wanted, atol=1e-4, rtol=0
    )
    assert capture.replays == 0
    runner.forward([SequenceSlice([1], 14, [0], 1)])
    assert capture.replays == 1


@pytest.mark.parametrize("place", [0, 3])
def test_the_error_of_a_device_that_failed_is_not_taken_for_a_missing_graph(
    place: int, capture: Capture
) -> None:
    runner = ModelRunner(build(CONFIGS["llama"]), page_size=256, page_count=PAGE_COUNT)
    capture.failures = [*[None] * place, torch.AcceleratorError("an illegal memory access")]
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        runner.capture(BOUNDS)


def test_a_device_that_fails_in_a_graphs_trial_is_not_taken_for_a_graph_with_other_logits(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Recording) -> None:
        raise torch.AcceleratorError("an illegal memory access")

    runner = ModelRunner(build(CONFIGS["llama"]), page_size=256, page_count=PAGE_COUNT)
    monkeypatch.setattr(Recording, "replay", fail)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        runner.capture(BOUNDS)


def test_the_block_table_has_every_page_of_a_batch_and_gets_each_only_once() -> None:
    """Sequences grow, are rewound, share pages, end, and lose their rows to other sequences."""
    draw = random.Random(3)
    pool = PagePool(200, 4)
    table = BlockTable(3, CacheShape(4, 40, 200), torch.device("cpu"))
    sent: list[int] = []
    send = table._send

    def spy(at: list[int], pages: list[int]) -> None:
        sent.append(len(at))
        send(at, pages)

    table._send = spy  # type: ignore[method-assign]
    sequences = [KVSequence() for _ in range(4)]
    for _ in range(500):
        running = draw.sample(sequences, draw.randint(1, 3))
        for sequence in running:
            held = len(sequence.pages) * 4
            match draw.randrange(6):
                case 0:
                    pool.truncate(sequence, draw.randint(0, held))
                case 1:
                    sequence.num_computed_tokens = held
                    at = sequences.index(sequence)
                    sequences[at] = pool.fork(sequence, held)
                    running[running.index(sequence)] = sequences[at]
                    pool.free(sequence)
        for sequence in running:
            pool.reserve(sequence, min(160, len(sequence.pages) * 4 + draw.randint(1, 12)))
        slices = [
            SequenceSlice([0], len(sequence.pages) * 4 - draw.randint(1, 4), sequence.pages, 1)
            for sequence in running
        ]
        for part, sequence in zip(slices, running, strict=True):
            part.kv = sequence
        rows = table.rows(slices)
        assert len(set(rows)) == len(rows)
        for part, row in zip(slices, rows, strict=True):
            count = -(-part.end // 4)
            assert table.pages_RP[row, :count].tolist() == part.pages[:count]
        assert set(table.pages_RP[table.padding_row].tolist()) == {200}
        sent.clear()
        assert table.rows(slices) == rows
        assert sent == [], "nothing is sent twice"


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; the tests above use a recording"
)


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_graphs_give_the_logits_of_eager_forwards(name: str) -> None:
    eager, graphed = (
        ModelRunner(build(CONFIGS[name]).cuda().bfloat16(), page_count=64) for _ in range(2)
    )
    graphed.capture(BOUNDS)
    assert graphed.graph_count == len(graphs.buckets(BOUNDS))
    assert graphed.graph_memory_bytes > 0
    texts = [text(i, 30 + 7 * i) for i in range(5)]
    for runner in (eager, graphed):
        for i, ids in enumerate(texts):
            runner.forward([SequenceSlice(ids, 0, list(range(8 * i, 8 * i + 8)), 0)])
    for counts in ([1], [4], [1, 2, 3], [3, 3, 3, 3, 3], [1, 1, 1, 1, 1], [1, 12, 2], [16]):
        batch = [
            SequenceSlice(text(n, n), len(texts[i]), list(range(8 * i, 8 * i + 8)), n)
            for i, n in enumerate(counts)
        ]
        poison(graphed, [SequenceSlice([], 0, list(range(40)), 0)])
        logits = graphed.forward(batch).clone()
        torch.testing.assert_close(logits, eager.forward(batch), atol=0.1, rtol=0.05)


@needs_gpu
def test_on_a_gpu_trees_and_prompts_behind_many_tokens_run_in_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = long_runner(monkeypatch, triton_attention.paged_attention, "cuda")
    assert runner.graph_count == len(graphs.buckets(Bounds(2, 1 + MAX_TREE_TOKENS, 80)))
    compare_long(runner, monkeypatch, reference_attention)
