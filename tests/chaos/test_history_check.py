"""The check of a campaign's history finds each violation that a test puts into a history."""

from __future__ import annotations

from typing import Any

import pytest

from outrider_bench.chaos.check import Violation, check
from outrider_bench.chaos.requests import Answer

CHOICE = {"text": "abc", "reason": "length", "tokens": ["a", "bc"], "logprobs": [-0.5, -1.0]}
ANSWER = {"choices": {"0": CHOICE}, "usage": [5, 2], "code": "", "is_done": True, "problems": []}


def request(began: float = 1.0, ended: float = 2.0, **fields: Any) -> dict[str, Any]:
    """Return a request that finished well.

    `fields` replace fields of its event, answer or choice.
    """
    answer = {**ANSWER, "choices": {"0": {**CHOICE}}}
    made = {"event": "request", "round": 3, "number": 7, "outcome": "finished", "answer": answer}
    made["gateway"] = "gateway-1"
    for name, value in fields.items():
        places = [place for place in (made, answer, answer["choices"]["0"]) if name in place]
        places[0][name] = value
    return {**made, "began": began, "ended": ended}


def failed(code: str = "verifier_unavailable", **fields: Any) -> dict[str, Any]:
    """Return a request that ended in an error after a part of its text."""
    part = {"text": "ab", "reason": None, "tokens": ["a"], "logprobs": [-0.5], "usage": []}
    return request(**{"outcome": "failed", "code": code, **part, **fields})


def fault(
    began: float,
    ended: float,
    *unreachable: str,
    allows: tuple[str, ...] = (),
    target: str = "gateway-1",
) -> dict[str, Any]:
    times = {"event": "fault", "round": 3, "name": "f", "began": began, "ended": ended}
    return {**times, "unreachable": unreachable, "allows": allows, "target": target}


def quiet(round_: int, in_use: dict[str, float] | None = None, **size: float) -> dict[str, Any]:
    processes = {"gateway": {"pid": 1, "files": 20, "threads": 9, "mebibytes": 100.0} | size}
    return {"event": "quiet", "round": round_, "in_use": in_use or {}, "processes": processes}


def violations(*events: dict[str, Any]) -> list[Violation]:
    undisturbed = request(0.0, 0.5) | {"event": "undisturbed", "round": -1}
    return check([undisturbed, *events])


@pytest.mark.parametrize(
    "events",
    [
        [request()],
        [request(logprobs=[-0.5, -1.00001])],
        [failed(outcome="left", code="")],
        [failed(choices={}), fault(0.5, 1.5, "verifier-1", "verifier-2")],
        [failed(choices={}), fault(0.5, 1.5, "verifier-1"), fault(1.4, 3.0, "verifier-2")],
        [failed(ended=33.0), fault(0.5, 31.5, "verifier-1", "verifier-2")],
        [failed(outcome="cut"), fault(0.5, 1.5, allows=("cut", "refused"))],
        [quiet(0, files=1), quiet(1), quiet(2, files=30, mebibytes=180.0)],
        [quiet(0), quiet(1), quiet(2, pid=2, files=90)],
    ],
)
def test_what_may_happen_is_no_violation(events: list[dict[str, Any]]) -> None:
    assert violations(*events) == []


@pytest.mark.parametrize(
    ("events", "what", "detail"),
    [
        ([request(text="abd")], "altered", "choice 0 has other text"),
        ([request(text="abcd")], "altered", "choice 0 has other text"),
        ([request(text="ab")], "altered", "choice 0 has other text"),
        ([request(reason="stop")], "altered", "ends with stop, not length"),
        ([request(tokens=["ab", "c"])], "altered", "choice 0 has other tokens"),
        ([request(logprobs=[-0.5, -1.1])], "altered", "choice 0 has other logprobs"),
        ([request(usage=[5, 3])], "altered", r"usage is \[5, 3\]"),
        ([request(choices={})], "altered", "other choices"),
        ([request(problems=["the stream has two errors"])], "lost", "two errors"),
        ([request(outcome="hung")], "lost", "request 7 hung"),
        ([failed()], "lost", r"request 7 failed \(verifier_unavailable\)"),
        ([failed(), fault(0.5, 1.5, "verifier-1")], "lost", "request 7 failed"),
        (
            [failed(), fault(0.5, 1.2, "verifier-1"), fault(1.4, 3.0, "verifier-2")],
            "lost",
            "request 7 failed",
        ),
        ([failed(), fault(0.5, 3.0, allows=("failed",), target="gateway-2")], "lost", "failed"),
        ([failed(), fault(2.5, 3.0, allows=("failed",))], "lost", "request 7 failed"),
        ([failed(), fault(0.5, 1.5, "verifier-1", "verifier-2")], "lost", "request 7 failed"),
        (
            [failed("slow_reader"), fault(0.5, 3.0, allows=("failed",))],
            "lost",
            r"failed \(slow_reader\)",
        ),
        (
            [failed("internal"), fault(0.5, 3.0, "verifier-1", "verifier-2", allows=("failed",))],
            "lost",
            r"failed \(internal\)",
        ),
        (
            [failed(outcome="cut"), fault(0.5, 1.5, "verifier-1", "verifier-2")],
            "lost",
            "request 7 cut",
        ),
        (
            [failed(text="xb"), fault(0.5, 1.5, allows=("failed",))],
            "altered",
            "choice 0 has other text",
        ),
        ([{"event": "trouble", "round": 3, "detail": "model ended"}], "lost", "model ended"),
        ([quiet(3, {"verifier-1 running": 2})], "leaked", "verifier-1 running is 2"),
        ([quiet(1), quiet(2), quiet(3, files=37)], "leaked", "gateway: 17 more files"),
        ([quiet(1), quiet(2), quiet(3, threads=30)], "leaked", "gateway: 21 more threads"),
        ([quiet(1), quiet(2), quiet(3, mebibytes=201.0)], "leaked", "gateway: 101 more mebibytes"),
    ],
)
def test_each_planted_violation_is_found_in_its_round(
    events: list[dict[str, Any]], what: str, detail: str
) -> None:
    [found] = violations(*events)
    assert (found.round, found.what) == (3, what)
    with pytest.raises(AssertionError, match=detail):
        raise AssertionError(found.detail)


def test_a_request_that_fails_without_any_fault_is_lost() -> None:
    [found] = check([failed() | {"event": "undisturbed", "round": -1}])
    assert (found.what, found.round) == ("lost", -1)


def _answer(*lines: str) -> Answer:
    answer = Answer()
    for line in lines:
        answer.add(f"data: {line}")
    return answer


TEXT = '{"choices": [{"index": 0, "text": "a", "finish_reason": null}]}'
END = '{"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}'
USAGE = '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}'
ERROR = '{"error": {"message": "gone", "code": "verifier_unavailable"}}'


def test_a_stream_with_one_end_has_no_problem() -> None:
    finished = _answer(TEXT, END, USAGE, "[DONE]")
    assert (finished.problems, finished.is_done, finished.usage) == ([], True, [3, 1])
    ended = _answer(TEXT, ERROR, "[DONE]")
    assert (ended.problems, ended.code) == ([], "verifier_unavailable")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ((TEXT, END, USAGE, "[DONE]", "[DONE]"), "the stream goes on after its end"),
        ((TEXT, END, TEXT), "choice 0 goes on after its end"),
        ((TEXT, ERROR, ERROR), "the stream has two errors"),
        ((TEXT, ERROR, TEXT), "choice 0 goes on after its end"),
        ((TEXT, '{"error": {"message": "gone"}}'), "the error has no code"),
        ((TEXT, USAGE, "[DONE]"), "without the end of a choice"),
        ((TEXT, END, "[DONE]"), "without usage"),
        ((TEXT, '{"choices": [{"index": 0'), "a line is not JSON"),
    ],
)
def test_a_stream_with_another_end_has_a_problem(lines: tuple[str, ...], problem: str) -> None:
    assert problem in _answer(*lines).problems[0]
