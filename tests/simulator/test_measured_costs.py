"""Measured costs: what disturbs the machine for a moment does not make a forward expensive."""

from __future__ import annotations

from typing import Any

import pytest

from outrider_bench.simulator import measured_costs


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
    # The next larger one stands in for a disturbed one. The largest has none.
    assert found[1, 2] == found[1, 3] == pytest.approx(0.013)
    assert found[2, 1] == found[2, 2] == pytest.approx(0.014)
    assert found[4, 9] == pytest.approx(0.146)
    for point in found.keys() - disturbed:
        assert found[point] == pytest.approx(seconds(None, *point))
