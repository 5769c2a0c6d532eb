"""Shows the conformance kit's results as a table."""

from __future__ import annotations

from rich.table import Table

from outrider.conformance.rules import NOTES, RULES, Outcome, Result
from outrider.conformance.stage import NO_ANSWER

_STYLES = {Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.NOT_SEEN: "dim"}
_ANSWERS = "answers-verdicts"


def table(results: dict[str, Result], notes: dict[str, str]) -> Table:
    """Return a table of the rules and notes, with reasons and hints for the broken rules."""
    shown = Table("rule", "", "statement; reason of the failure; hint")
    for name, result in results.items():
        text = RULES[name].says
        if result.outcome is Outcome.FAIL:
            text = f"{text}\n[red]{result.reason}[/red]\n{_mend(name, results)}"
        outcome = f"[{_STYLES[result.outcome]}]{result.outcome.value}[/]"
        shown.add_row(name, outcome, text)
    for name, reason in notes.items():
        shown.add_row(name, "[yellow]note[/]", f"[yellow]{reason}[/yellow]\n{NOTES[name]}")
    return shown


def _mend(name: str, results: dict[str, Result]) -> str:
    """Return the hint for a broken rule.

    A drafter that sends no Skip breaks several rules, so the hint may name the rule to mend first.
    """
    fails_to_answer = results[_ANSWERS].outcome is Outcome.FAIL
    if name != _ANSWERS and fails_to_answer and NO_ANSWER in results[name].reason:
        return f"Mend {_ANSWERS} first: it is probably the same fault."
    return RULES[name].mend
