"""Measured costs: a short disturbance of the machine does not make a forward expensive."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.lm.runner import Bounds
from outrider_bench.simulator import measured_costs
from outrider_bench.simulator.costs import DraftingCost, Forward


def test_a_forward_costs_no_more_than_one_of_more_sequences_and_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disturbed = {(1, 2), (2, 1), (4, 9)}

    def seconds(runner: Any, sequences: int, tokens: int) -> float:
        return 0.010 + 0.001 * sequences * tokens + 0.100 * ((sequences, tokens) in disturbed)

    monkeypatch.setattr(measured_costs, "_forward_s", seconds)
    runner: Any = None
    found = {
        (f.sequences, f.tokens): f.seconds for f in measured_costs._forwards(runner, [1, 2, 4])
    }
    # A disturbed forward gets the time of the next larger forward. The largest forward keeps its
    # time, since no forward is larger.
    assert found[1, 2] == found[1, 3] == pytest.approx(0.013)
    assert found[2, 1] == found[2, 2] == pytest.approx(0.014)
    assert found[4, 9] == pytest.approx(0.146)
    for point in found.keys() - disturbed:
        assert found[point] == pytest.approx(seconds(None, *point))


@pytest.mark.parametrize(
    ("device", "on_gpu"), [("cpu", []), ("cuda:0", [("model-on-target", "cuda:0", 1)])]
)
def test_a_draft_model_is_measured_on_the_cpu_and_on_the_targets_gpu(
    device: str, on_gpu: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def draft_cost(path: Path, dtype: str, device: str, threads: int, _: object) -> DraftingCost:
        asked.append((device, threads))
        return DraftingCost(round_s=0.0, token_s={1: 0.001 * len(asked)})

    captured: list[Bounds] = []
    target = SimpleNamespace(device=device, dtype="bfloat16", capture=captured.append)
    forward = Forward(sequences=1, tokens=1, seconds=0.01)
    for name, value in {
        "_forwards": lambda *_: [forward],
        "_prompts": lambda *_: (0.0, 0.0),
        "_host": lambda: (0.0, 0.0),
        "_lookup_cost": lambda: DraftingCost(round_s=0.0, token_s={1: 0.0}),
        "_draft_cost": draft_cost,
    }.items():
        monkeypatch.setattr(measured_costs, name, value)
    monkeypatch.setattr(measured_costs.ModelRunner, "load", lambda *_, **__: target)
    table = measured_costs.measure(Path("t"), Path("d"), 1, "bfloat16", (1, 72))
    places = [("model", "cpu", 1), ("model-72", "cpu", 72), *on_gpu]
    assert [*table.drafting] == ["ngram", *(name for name, *_ in places)]
    assert asked == [(where, threads) for _, where, threads in places]
    [bounds] = captured
    assert bounds.sequences == 128
