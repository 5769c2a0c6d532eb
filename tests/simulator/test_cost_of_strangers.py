"""Useless strangers cost next to nothing, however many there are. The tests run in virtual time.

Each stranger is a drafter of a different family.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.simulator.policies import speed

GOOD = {"name": "good", "acceptance": 0.8}
SECONDS = 6.0
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "silent": ({"acceptance": 0.0}, 0.0),
    "wrong": ({"acceptance": 0.0}, -1.0),
    "late": ({"acceptance": 0.9, "round_trip_ms": 3000.0}, -1.0),
    "soon silent": ({"acceptance": 0.9}, 2.0),
    "answers once": ({"acceptance": 0.9, "max_messages": 1}, -1.0),
}
"""Each kind of stranger has its settings, and the second from which it hangs; -1 means never."""


def strangers(kind: str, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return strangers, and the events of their lives."""
    settings, hangs_at = KINDS[kind]
    found = [{"name": f"s{i}", **settings} for i in range(count)]
    if hangs_at < 0.0:
        return found, []
    hang = {"at": hangs_at, "what": "hang", "seconds": 1e6}
    return found, [{"who": each["name"], **hang} for each in found]


@cache
def good_speed(batch: int) -> float:
    return speed([GOOD], batch, SECONDS)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("kind", "count", "least"),
    [
        ("silent", 3, 0.95),
        pytest.param("silent", 60, 0.85, marks=pytest.mark.slow),
        pytest.param("late", 3, 0.9, marks=pytest.mark.slow),
        pytest.param("wrong", 3, 0.95, marks=pytest.mark.slow),
        pytest.param("soon silent", 60, 0.8, marks=pytest.mark.slow),
        pytest.param("answers once", 60, 0.7, marks=pytest.mark.slow),
    ],
)
def test_strangers_leave_the_gain_of_a_good_drafter(
    kind: str, count: int, least: float, batch: int
) -> None:
    """The good drafter joins last, so every stranger has its first chance before it."""
    found, schedule = strangers(kind, count)
    assert speed([*found, GOOD], batch, SECONDS, schedule) >= least * good_speed(batch)


@pytest.mark.slow  # many drafters, for several seconds each
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_strangers_alone_cost_next_to_nothing(kind: str, batch: int) -> None:
    found, schedule = strangers(kind, 60)
    # Most of the loss is the strangers' first chances: 8 to 11 steps for each of the 60, in 6 s.
    assert speed(found, batch, SECONDS, schedule) >= 0.88
