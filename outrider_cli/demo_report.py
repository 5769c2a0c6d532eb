"""The output of `outrider demo`: a table of its answers, and a published model's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outrider_cli.client import Answer

_SHOWN_CHARACTERS = 400
_CAPTION = "greedy; each asked twice in turns, and the quicker answer counts; on this machine, now"
# Has a sentence for each reason why at least half of the steps had no draft. docs/api.md has the
# table of these reasons.
_PAUSES = {
    "no_drafter": "no drafter works on such a text",
    "too_slow": "too few guesses would be accepted for the longer steps that check them",
    "low_acceptance": "too few guesses for this text are accepted",
    "no_guess": "it had no guess in time",
    "budget": "drafting made the steps slower",
    "measuring": "steps without drafts were measured",
}


@dataclass
class Row:
    """The answers to one kind of question in one decoding mode."""

    kind: str
    name: str
    speculation: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)

    @property
    def token_count(self) -> int:
        """The number of tokens of all answers."""
        return sum(answer.token_count for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second of the quickest answer, which other work slowed down least."""
        return max(answer.token_count / answer.seconds for answer in self.answers)

    def total(self, key: str) -> int:
        """Return the sum of one statistic of `metrics.speculative_decoding` over all answers."""
        return sum(a.speculative[key] for a in self.answers if a.speculative is not None)

    @property
    def forward_count(self) -> int:
        """The number of forwards; each commits accepted tokens and one more token of the target."""
        return self.token_count - self.total("num_accepted_draft_tokens")

    def identical_to(self, plain: Row) -> int:
        """Return the number of answers whose text equals the text of plain decoding."""
        pairs = zip(self.answers, plain.answers, strict=True)
        return sum(ours.text == its.text for ours, its in pairs)


def report(
    title: str,
    questions: Sequence[tuple[str, dict[str, Any]]],
    rows: Sequence[Row],
    console: Console,
    *,
    is_exactness: bool,
) -> int:
    """Print a part's answers and table; return 1 if texts that must be equal differ, else 0.

    With `is_exactness`, times say nothing, since drafts are verified even where they cost more than
    they save. Without it, some texts may differ, and the answers are shown.
    """
    if not is_exactness:
        for kind, question in questions:
            _show(question, next(row for row in rows if row.kind == kind), console)
    plain = {row.kind: row for row in rows if row.name == "plain"}
    speeds = [] if is_exactness else ["tokens/s", "× plain"]
    table = Table("asked for", "decoding", title=title, caption=None if is_exactness else _CAPTION)
    for column in [*speeds, "tokens per\nforward", "drafts\naccepted", "identical\nto plain"]:
        table.add_column(column, justify="right")
    for row in rows:
        its = plain[row.kind]
        if row is its:
            table.add_section()
        speeds = [f"{row.tokens_per_s:.1f}", f"{row.tokens_per_s / its.tokens_per_s:.2f}"]
        kind = row.kind if row is its else ""
        table.add_row(kind, row.name, *([] if is_exactness else speeds), *_figures(row, its))
    console.print(table)
    for row in rows:
        _explain(row, console)
    differ = any(row.identical_to(plain[row.kind]) < len(row.answers) for row in rows)
    console.print(_verdict(differ=differ, is_exactness=is_exactness))
    return int(differ and is_exactness)


def _verdict(*, differ: bool, is_exactness: bool) -> str:
    if not differ:
        return "All texts are identical.\n"
    if is_exactness:
        return "[bold red]Some texts differ from plain decoding.[/]\n"
    why = "in bfloat16, rounding may decide between two tokens that are all but tied"
    return f"Some texts differ from plain decoding: {why}.\n"


def _figures(row: Row, plain: Row) -> list[str]:
    drafted = row.total("num_draft_tokens")
    accepted = row.total("num_accepted_draft_tokens")
    return [
        f"{row.token_count / row.forward_count:.2f}",
        f"{accepted} of {drafted}" if drafted else "–",
        f"{row.identical_to(plain)} of {len(row.answers)}",
    ]


def _explain(row: Row, console: Console) -> None:
    """Print why a row has no drafts, if it could have had drafts."""
    paused = [answer.paused for answer in row.answers if answer.paused is not None]
    if paused and not row.total("num_spec_steps"):
        reason = str(paused[-1]["reason"])
        console.print(f"{row.kind} with {row.name}: no draft, since {_PAUSES.get(reason, reason)}")


def _show(question: dict[str, Any], plain: Row, console: Console) -> None:
    asked = question["messages"][-1]["content"]
    text = plain.answers[0].text.strip()
    if "response_format" in question:
        text = " ".join(text.split())
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]} …"
    console.print(Text(f"> {asked}", style="bold"))
    console.print(Padding(Text(text), (0, 0, 1, 2)))
