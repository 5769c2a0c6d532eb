"""Plays faults against a real stack and checks every request."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from outrider_bench.chaos.campaign import Campaign, play
from outrider_bench.chaos.check import Violation, check
from outrider_bench.chaos.faults import bag_of
from outrider_bench.chaos.history import Event, History, whole
from outrider_bench.chaos.parts import absent
from outrider_bench.experiment.processes import StackFailed

_WHAT = ("lost", "altered", "leaked")


def run(campaign: Campaign, kinds: Sequence[str], path: Path) -> int:
    """Play a campaign with faults of these kinds, or of all kinds if `kinds` is empty.

    Writes the history to `path`, and returns the exit status. Raises ValueError for wrong kinds.
    """
    bag = bag_of(kinds, absent())
    is_whole = False
    with closing(History(path)) as history:
        try:
            asyncio.run(_until_stopped(play(campaign, bag, history, _tell)))
            is_whole = True
        except StackFailed as error:
            _tell(str(error))
    is_right = _report(path, history.events)
    _tell(f"seed {campaign.seed}; written: {path}")
    return 0 if is_whole and is_right else 1


def _tell(text: str) -> None:
    print(text, flush=True)


async def _until_stopped(playing: Coroutine[Any, Any, None]) -> None:
    """Await a campaign; on SIGINT or SIGTERM, stop it and raise StackFailed."""
    task = asyncio.ensure_future(playing)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError as cause:
        raise StackFailed("interrupted") from cause


def _report(path: Path, events: Sequence[Event]) -> bool:
    """Check a history, print its table and violations, and write the table beside the history.

    Returns True if there are no violations.
    """
    events = whole(events)
    found = check(events)
    table = markdown(events, found)
    path.with_suffix(".md").write_text(table)
    _tell(table)
    for violation in found:
        _tell(f"round {violation.round}: {violation.what}: {violation.detail}")
    return not found


def markdown(events: Sequence[Event], violations: Sequence[Violation]) -> str:
    """Return a Markdown table: how often each fault was played, and the counts of its rounds.

    Requests, finished requests and each kind of violation are counted.
    """
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
