"""The table of a campaign follows from its history."""

from __future__ import annotations

from typing import Any

from outrider_bench.chaos.check import Violation
from outrider_bench.chaos.history import whole
from outrider_bench.chaos.playing import markdown


def event(kind: str, round_: int, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "round": round_, **fields}


def request(round_: int, outcome: str = "finished") -> dict[str, Any]:
    return event("request", round_, outcome=outcome)


HISTORY = [
    event("undisturbed", -1, outcome="finished"),
    request(0),
    request(0, "failed"),
    event("fault", 0, name="redis full"),
    event("fault", 0, name="drafter killed"),
    event("quiet", 0),
    request(1),
    event("fault", 1, name="redis full"),
    event("quiet", 1),
]
TABLE = """\
| fault | tries | requests | finished | lost | altered | leaked |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| drafter killed | 1 | 2 | 1 | 1 | 0 | 0 |
| redis full | 2 | 3 | 2 | 1 | 0 | 2 |
| all rounds | 2 | 3 | 2 | 1 | 0 | 2 |
"""


def test_each_fault_counts_the_requests_and_violations_of_its_rounds() -> None:
    violations = [Violation(0, "lost", ""), Violation(1, "leaked", ""), Violation(1, "leaked", "")]
    assert markdown(HISTORY, violations) == TABLE


def test_a_last_round_that_was_interrupted_is_left_out() -> None:
    assert whole([*HISTORY, request(2, "cut")]) == HISTORY
    assert whole(HISTORY) == HISTORY
    ended_by_trouble = [*HISTORY, request(2, "cut"), event("trouble", 2)]
    assert whole(ended_by_trouble) == ended_by_trouble
