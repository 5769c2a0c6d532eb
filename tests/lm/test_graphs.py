"""With CUDA graphs, a batch padded to its bucket gives the logits that it gives by itself.

A recording of operators replaces the graph. Like a graph, it repeats the operators on the same
memory with the numbers of the recording. So the tests fail if a forward takes anything from the
present batch except through its inputs' memory.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_kernel import paged_attention
from tiny_models import CONFIGS, VOCAB_SIZE, build
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.lm import attention
from outrider.lm.gpu import graphs, triton_attention
from outrider.lm.runner import Bounds, ModelRunner, SequenceSlice
from outrider.protocol.token_tree import path_to

PAGE_COUNT = 6
BOUNDS = Bounds(sequences=5, tokens_each=4, tokens=16)
NAMES = ["llama", "gemma3, alternating windows", "gpt2, learned positions"]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
}
"""Operators that wait for the device, which a graph cannot do."""


class Recording(TorchDispatchMode):
    """Records the operators of one run; `replay` repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        held = {_memory(tensor) for tensor in _tensors((args, kwargs))}

        def again() -> None:
            # Views and results written in place are in their old memory already.
            for made, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if _memory(made) not in held:
                    made.copy_(new)

        self.operators.append(again)
        return out

    def replay(self) -> None:
        for operator in self.operators:
            operator()


class Capture:
    """Replaces `graphs._CudaCapture`; counts recordings and replays."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.replays = 0

    def __call__(self, run: Callable[[], object]) -> Callable[[], object]:
        with Recording() as recording:
            run()
        self.recordings.append(recording)

        def replay() -> None:
            self.replays += 1
            recording.replay()

        return replay


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    made = Capture()
    monkeypatch.setattr(graphs, "_CudaCapture", lambda: made)
    monkeypatch.setattr(attention.LayerCache, "supports_kernel", lambda self, device: True)
    monkeypatch.setattr(triton_attention, "paged_attention", paged_attention)
    return made


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def expected(model: Any, texts: list[list[int]], counts: list[int]) -> torch.Tensor:
    """Return the logits of each text's last tokens."""
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0] for ids in texts]
    return torch.cat([rows[len(rows) - n :] for rows, n in zip(logits, counts, strict=True)])


def pair(name: str, page_size: int = 256, page_count: int = PAGE_COUNT) -> tuple[ModelRunner, Any]:
    """Return a runner with captured graphs, and the same model as `transformers` runs it."""
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
    # This forward finds the last tree's words in its inputs, and must not read them.
    chains = [chain, SequenceSlice([texts[1][-1], *tree], 36, [1], 4), beside]
    wanted = expected(reference, [texts[0] + tree, texts[1] + tree, texts[2]], [4, 4, 1])
    torch.testing.assert_close(runner.forward(chains), wanted, atol=1e-4, rtol=0)
    assert capture.replays == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_padded_batch_gives_the_logits_of_its_sequences_alone(
    name: str, capture: Capture
) -> None:
    """Each forward runs over the cache that those before it left behind."""
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
    five_tokens = [SequenceSlice([1] * 5, 0, [0], 5)]
    twenty_in_all = [SequenceSlice([1] * 4, 0, [page], 4) for page in range(5)]
    for batch in (six_sequences, five_tokens, twenty_in_all):
        assert len(runner.forward(batch)) == sum(part.logit_count for part in batch)
    assert capture.replays == 0


def test_every_batch_within_the_bounds_has_a_graph(capture: Capture) -> None:
    bounds = Bounds(sequences=37, tokens_each=9, tokens=150)
    made = graphs.Graphs(
        lambda ids, *_: torch.zeros(len(ids), 4),
        graphs.CacheShape(16, 2, 9),
        4,
        torch.device("cpu"),
    )
    made.capture(bounds)
    for count in range(1, 38):
        for total in range(count, min(9 * count, 150) + 1):
            lengths = [total // count + (i < total % count) for i in range(count)]
            inputs, _ = made._graphs[made._bucket(lengths)]
            assert inputs.batch >= count
            assert inputs.rows >= total


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


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; the tests above use a recording"
)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_graphs_give_the_logits_of_eager_forwards(name: str) -> None:
    eager, graphed = (
        ModelRunner(build(CONFIGS[name]).cuda().bfloat16(), page_count=64) for _ in range(2)
    )
    graphed.capture(BOUNDS)
    assert graphed._graphs is not None
    assert graphed._graphs._graphs
    texts = [text(i, 30 + 7 * i) for i in range(5)]
    for runner in (eager, graphed):
        for i, ids in enumerate(texts):
            runner.forward([SequenceSlice(ids, 0, list(range(8 * i, 8 * i + 8)), 0)])
    for counts in ([1], [4], [1, 2, 3], [3, 3, 3, 3, 3], [1, 1, 1, 1, 1]):
        batch = [
            SequenceSlice(text(n, n), len(texts[i]), list(range(8 * i, 8 * i + 8)), n)
            for i, n in enumerate(counts)
        ]
        logits = graphed.forward(batch).clone()
        torch.testing.assert_close(logits, eager.forward(batch), atol=0.1, rtol=0.05)
