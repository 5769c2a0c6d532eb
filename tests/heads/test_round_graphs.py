"""A head's rounds on a GPU guess what its forwards guess, with one copy and one wait.

On a CPU, recorded operators replace CUDA graphs (see tests/lm/recorded_graphs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.heads import round_graphs
from outrider.heads.kinds.autoregressive import AutoregressiveModel
from outrider.heads.model import HeadModel, HeadProposal, HeadSequence
from outrider.lm.gpu import triton_attention
from outrider.sampling.tensors import fetch
from tests.fake_device import DEVICE, FakeDevice
from tests.heads.test_paging import Rig
from tests.lm.conftest import capture  # noqa: F401  # a fixture
from tests.lm.recorded_graphs import Capture, triton_kernel
from tests.lm.reference_kernel import paged_attention
from tests.lm.test_step_costs import counted

KINDS = ["eagle", "eagle3", "mtp", "eagle3, a window"]
WIDTH = 8


@pytest.fixture(autouse=True)
def by_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply with torch's operators, as on a GPU: a recording cannot repeat calls of C code."""

    monkeypatch.setattr("outrider.heads.model.optimize_for_cpu", lambda *modules, int8=False: None)


def captured(rig: Rig, pages: int = 200) -> AutoregressiveModel:
    """Return the rig's head with graphs of its rounds."""
    model = rig.model(pages=pages)
    model.capture(WIDTH)
    assert isinstance(model, AutoregressiveModel)
    assert model.graphs is not None
    return model


def assert_equal(found: HeadProposal, wanted: HeadProposal) -> None:
    assert found.tokens.equal(wanted.tokens)
    assert found.best.equal(wanted.best)
    torch.testing.assert_close(found.shares, wanted.shares, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.confidences, wanted.confidences, atol=1e-5, rtol=1e-4)
    # A single level has no branches, with or without graphs.
    none = [()] * len(found.tokens)
    for branches, others in zip(found.deeper or none, wanted.deeper or none, strict=True):
        assert [(each.at, each.run) for each in branches] == [(o.at, o.run) for o in others]
        for branch, other in zip(branches, others, strict=True):
            assert branch.shares == pytest.approx(other.shares, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("width", [1, WIDTH], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_by_graphs_guess_what_forwards_guess(
    kind: str,
    width: int,
    capture: Capture,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Rounds have batches of several sizes, cross page borders, follow rewinds and reuse pages."""
    rig = Rig(kind, tmp_path)
    model, plain = captured(rig), rig.model(pages=60)
    texts = [rig.text(length) for length in (3, 9, 17)]
    reads = [[each.open(text[:1], "") for text in texts] for each in (model, plain)]
    for count, batch in ((5, [0, 1, 2]), (4, [1]), (1, [2, 0]), (6, [0, 2])):
        for i in batch:
            texts[i] = [*texts[i], *rig.text(2)]
        found, wanted = (
            _propose(rig, each, [(read[i], texts[i]) for i in batch], count, width)
            for each, read in ((model, reads[0]), (plain, reads[1]))
        )
        assert_equal(found, wanted)
    assert capture.replays == 5 + 4 + 1 + 6


def test_the_gpus_kernel_sees_a_trees_rows_of_earlier_levels(
    capture: Capture,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test runs in Triton's interpreter, with a window that begins within the tree."""
    monkeypatch.setattr(triton_attention, "paged_attention", triton_kernel)
    rig = Rig("eagle3, a window", tmp_path)
    model, plain = captured(rig), rig.model(pages=60)
    texts = [rig.text(length) for length in (5, 11)]
    # The plain kernel reads the prompts of both models, so that their pages are equal before the
    # round.
    monkeypatch.setattr(triton_attention, "paged_attention", paged_attention)
    reads = [[rig.read(each, text) for text in texts] for each in (model, plain)]
    assert_equal(model.propose(reads[0], 5, WIDTH), plain.propose(reads[1], 5, WIDTH))
    assert capture.replays == 5


@pytest.mark.parametrize(
    ("failure", "count"),
    [(torch.OutOfMemoryError("no memory"), 2 * 11), (RuntimeError("it waits"), 0)],
    ids=["memory", "a wait"],
)
def test_a_round_that_was_not_captured_is_guessed_by_forwards(
    failure: Exception,
    count: int,
    capture: Capture,  # noqa: F811
    tmp_path: Path,
) -> None:
    rig = Rig("mtp", tmp_path)
    capture.failures = [failure]
    model, plain = captured(rig), rig.model(pages=200)
    assert model.graphs is not None
    assert model.graphs.count == count
    # No graph was captured for chains of the largest batch: the memory did not suffice for it, or
    # no graph was captured at all.
    texts = [rig.text(3) for _ in range(17)]
    reads = [[rig.read(each, text) for text in texts] for each in (model, plain)]
    assert_equal(model.propose(reads[0], 2), plain.propose(reads[1], 2))
    assert capture.replays == 0


def _propose(
    rig: Rig,
    model: HeadModel,
    batch: list[tuple[HeadSequence, list[int]]],
    count: int,
    width: int,
) -> HeadProposal:
    model.extend([rig.extension(sequence, text) for sequence, text in batch])
    return model.propose([sequence for sequence, _ in batch], count, width)


@pytest.mark.parametrize("width", [1, WIDTH], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_a_round_by_graphs_is_one_copy_and_one_wait(
    kind: str,
    width: int,
    capture: Capture,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(kind, tmp_path)
    model = captured(rig)
    texts = [rig.text(length) for length in (9, 10)]
    reads = [rig.read(model, text) for text in texts]
    fetches = []

    def fetched(tensors: Sequence[torch.Tensor]) -> list[Any]:
        fetches.append(len(tensors))
        return fetch(tensors)

    monkeypatch.setattr(round_graphs, "fetch", fetched)
    model.propose(reads, 4, width)
    fetches.clear()
    capture.replays = 0
    # One copy brings the inputs to the device, and two launches gather the committed tokens'
    # states. All other work is in the graphs.
    assert counted(lambda: model.propose(reads, 4, width)) == {"copies up": 1, "launches": 2}
    assert (capture.replays, len(fetches)) == (4, 1)


COPIES_AND_WAITS = {
    "eagle": ((3, 1), (6, 5)),
    "eagle3": ((3, 1), (6, 5)),
    "mtp": ((3, 1), (6, 5)),
    "peagle": ((1, 1), (1, 1)),
    "dflash": ((2, 1), (2, 1)),
    "dspark": ((3, 1), (3, 1)),
    "medusa": ((0, 1), (0, 1)),
    "redrafter": ((1, 1), (7, 5)),
}
"""Copies and waits of a round of four guesses without graphs: for chains, and for trees.

A level of a chain copies its layout. A level of a tree copies its layout and the places of the
chain's rows, and waits, since the host chooses the rows from which the next level continues.
"""


@pytest.mark.parametrize("kind", COPIES_AND_WAITS)
def test_a_round_without_graphs_copies_once_a_forward(
    kind: str,
    capture: Capture,  # noqa: F811  # it also sets the plain kernel
    tmp_path: Path,
) -> None:
    rig = Rig(kind, tmp_path)
    texts = [rig.text(length) for length in (9, 10, 12)]
    for width, costs in zip((1, WIDTH), COPIES_AND_WAITS[kind], strict=True):
        plain = rig.model(pages=60)
        wanted = plain.propose([rig.read(plain, text) for text in texts], 4, width)
        with torch.inference_mode(), FakeDevice() as device:
            model = rig.model(pages=60, device=DEVICE)
            reads = [rig.read(model, text) for text in texts]
            device.copies = device.waits = 0
            found = model.propose(reads, 4, width).on_host()
            assert (device.copies, device.waits) == costs
        assert_equal(found, wanted)
