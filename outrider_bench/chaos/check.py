"""Checks the history of a campaign, as a pure function of its events.

A request is lost if it has no end, two ends, or an end that no fault explains. A request is altered
if its answer differs from the undisturbed answer. A process leaks if it still holds something when
all is quiet, or if it has grown by more than a limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider_bench.chaos.history import Event
from outrider_bench.chaos.parts import GATEWAYS, VERIFIERS

_LOGPROB_TOLERANCE = 1e-4
_GROWTH = {"files": 16, "threads": 16, "mebibytes": 100.0}
"""How much a process may grow after its second round; by then caches and thread pools are full."""
_EXPLAINED = ("verifier_unavailable", "not_ready", "draining", "overloaded")
"""Codes of errors that a fault may explain."""
_RESUME_S = 30.0
"""The seconds that a request whose answer has started waits for another verifier.
This is the gateway's default.
"""


@dataclass(frozen=True, slots=True)
class Violation:
    """An event that must not happen in a campaign."""

    round: int
    what: str
    """lost, altered or leaked."""
    detail: str


def check(events: Sequence[Event]) -> list[Violation]:
    """Return all violations, in the order of the rounds."""
    faults: dict[int, list[Event]] = {}
    for event in events:
        if event["event"] == "fault":
            faults.setdefault(event["round"], []).append(event)
    wanted = {e["number"]: e["answer"] for e in events if e["event"] == "undisturbed"}
    found: list[Violation] = []
    for event in events:
        if event["event"] == "request":
            # A round's requests end before the next round starts.
            here = [fault for fault in faults.get(event["round"], []) if _overlap(fault, event)]
            found += _check_request(event, wanted[event["number"]], here)
        elif event["event"] == "undisturbed" and event["outcome"] != "finished":
            found.append(Violation(event["round"], "lost", f"{_name(event)} without any fault"))
        elif event["event"] == "trouble":
            found.append(Violation(event["round"], "lost", event["detail"]))
    found += _check_sizes([event for event in events if event["event"] == "quiet"])
    return sorted(found, key=lambda violation: violation.round)


def _overlap(*events: Event) -> bool:
    """Return whether all of these events were under way at one moment."""
    latest_began: float = max(event["began"] for event in events)
    earliest_ended: float = min(event["ended"] for event in events)
    return latest_began <= earliest_ended


def _name(event: Event) -> str:
    code = event["answer"]["code"]
    return f"request {event['number']} {event['outcome']}{code and f' ({code})'}"


def _check_request(
    event: Event, wanted: Mapping[str, Any], faults: Sequence[Event]
) -> Iterator[Violation]:
    answer = event["answer"]
    for problem in answer["problems"]:
        yield Violation(event["round"], "lost", f"request {event['number']}: {problem}")
    if not _is_allowed(event, faults):
        yield Violation(event["round"], "lost", _name(event))
    for difference in _differences(answer, wanted, is_whole=event["outcome"] == "finished"):
        yield Violation(event["round"], "altered", f"request {event['number']}: {difference}")


def _is_allowed(event: Event, faults: Sequence[Event]) -> bool:
    """Return whether the faults that overlap a request allow its outcome."""
    outcome = event["outcome"]
    if outcome in ("finished", "left"):
        return True
    if outcome == "failed" and event["answer"]["code"] not in _EXPLAINED:
        return False
    if any(outcome in fault["allows"] for fault in faults if _is_near(fault, event)):
        return True
    return outcome == "failed" and _all_gone(event, faults)


def _is_near(fault: Event, request: Event) -> bool:
    """True unless the fault hit a gateway that did not serve the request."""
    return fault["target"] == request["gateway"] or fault["target"] not in GATEWAYS


def _all_gone(event: Event, faults: Sequence[Event]) -> bool:
    """True if at some moment of the request no verifier could be reached.

    If the answer has started, verifiers must be out of reach for at least the time that a started
    answer waits for another verifier.
    """
    least_s = _RESUME_S if event["answer"]["choices"] else 0.0
    for moment in [event["began"], *(fault["began"] for fault in faults)]:
        now = {"began": moment, "ended": moment}
        here = [fault for fault in faults if fault["unreachable"] and _overlap(fault, event, now)]
        if len({name for fault in here for name in fault["unreachable"]}) < len(VERIFIERS):
            continue
        if min(fault["ended"] for fault in here) - moment >= least_s:
            return True
    return False


def _differences(
    answer: Mapping[str, Any], wanted: Mapping[str, Any], *, is_whole: bool
) -> Iterator[str]:
    """Yield the places where an answer differs from the undisturbed answer.

    If the answer is not whole, its parts may be shorter.
    """
    if is_whole and answer["choices"].keys() != wanted["choices"].keys():
        yield "it has other choices"
    if is_whole and answer["usage"] != wanted["usage"]:
        yield f"usage is {answer['usage']}, not {wanted['usage']}"
    for index, choice in answer["choices"].items():
        other = wanted["choices"].get(index)
        if other is None:
            yield f"there is no choice {index}"
            continue
        has_ended = choice["reason"] is not None
        if has_ended and choice["reason"] != other["reason"]:
            yield f"choice {index} ends with {choice['reason']}, not {other['reason']}"
        for part in ("text", "tokens", "logprobs"):
            if not _agree(choice[part], other[part], is_whole=has_ended):
                yield f"choice {index} has other {part}"


def _agree(given: Any, wanted: Any, *, is_whole: bool) -> bool:
    """True if the values are equal, or if `given` is not whole and is a prefix of `wanted`."""
    if is_whole and len(given) != len(wanted):
        return False
    return len(given) <= len(wanted) and all(map(_equal, given, wanted))


def _equal(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=_LOGPROB_TOLERANCE)
    return one == other


def _check_sizes(quiet: Iterable[Event]) -> Iterator[Violation]:
    """Yield what is in use when all is quiet, and each process that has grown too much.

    A process is compared with its size after the second round since its start or restart.
    """
    lives: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    for event in quiet:
        for name, value in event["in_use"].items():
            yield Violation(event["round"], "leaked", f"{name} is {value:g} when all is quiet")
        for name, size in event["processes"].items():
            life = lives.setdefault((name, size["pid"]), [])
            life.append(size)
            if len(life) < 3:
                continue
            for what, most in _GROWTH.items():
                grown = size[what] - life[1][what]
                if grown > most and life[-2][what] - life[1][what] <= most:
                    yield Violation(event["round"], "leaked", f"{name}: {grown:g} more {what}")
