"""The table of a campaign, made from its history: each fault, and what its rounds did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from outrider_bench.chaos.check import Violation
from outrider_bench.chaos.history import Event

_WHAT = ("lost", "altered", "leaked")


def markdown(events: Sequence[Event], violations: Sequence[Violation]) -> str:
    """A Markdown table with the tries of each fault, and the counts of the rounds that had it."""
    heads = ("fault", "tries", "requests", "finished", *_WHAT)
    lines = [heads, ("---",) + ("---:",) * (len(heads) - 1), *_rows(events, violations)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _rows(events: Sequence[Event], violations: Sequence[Violation]) -> Iterator[tuple[str, ...]]:
    rounds: dict[str, list[int]] = {}
    for event in events:
        if event["event"] == "fault":
            rounds.setdefault(event["name"], []).append(event["round"])
    requests = [event for event in events if event["event"] == "request"]
    finished = [event for event in requests if event["outcome"] == "finished"]
    counts = [Counter(event["round"] for event in some) for some in (requests, finished)]
    counts += [Counter(v.round for v in violations if v.what == what) for what in _WHAT]
    for name, numbers in sorted(rounds.items()):
        sums = (sum(count[number] for number in numbers) for count in counts)
        yield name, str(len(numbers)), *map(str, sums)
    played = len({number for numbers in rounds.values() for number in numbers})
    yield "all rounds", str(played), *(str(count.total()) for count in counts)
