"""The table in Markdown, from a run's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from outrider_bench.intervals import paired_interval, shown_by
from outrider_bench.table.rows import PLAIN, Row, Turn

_ALL = "all"
_POSITIONS = 4
_MARKS = {"faster": " ▲", "slower": " ▼", "": ""}


def markdown(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """Return the table of a run; `about` is its record.

    A turn that was interrupted before plain decoding's answer does not count.
    """
    begun = {row.turn for row in rows if row.mode == PLAIN}
    rows = [row for row in rows if row.turn in begun]
    return "\n".join([*_head(about), *_speeds(rows), *_guesses(rows), *_texts(rows)]) + "\n"


def _head(about: dict[str, Any]) -> Iterator[str]:
    machine, settings = about["machine"], about["settings"]
    yield f"# {settings['target']}, by kind of prompt and decoding mode"
    yield ""
    where = f"{len(machine['cores'])} cores of {machine['processor']}"
    yield f"{about['began']}, commit {about['commit']}, {where}. Command: `{about['command']}`"
    yield ""
    for line in (*about["warnings"], *(f"Left out: {each}." for each in about["missing"])):
        yield f"- {line}"


def _speeds(rows: Sequence[Row]) -> Iterator[str]:
    asked = [row for row in rows if not row.always]
    cells = dict.fromkeys((row.turn.batch, row.turn.temperature) for row in asked)
    for batch, temperature in cells:
        own = [
            row for row in asked if (row.turn.batch, row.turn.temperature) == (batch, temperature)
        ]
        yield f"\n## Batch {batch}, temperature {temperature:g}\n"
        yield (
            "A cell has × plain (95 % interval) · tokens per forward; "
            "the cells of plain have tokens/s.\n"
        )
        plain = {row.turn: row for row in own if row.mode == PLAIN}
        yield from _grid(own, partial(_speed, plain))


def _speed(plain: Mapping[Turn, Row], some: Sequence[Row]) -> str:
    """Return a mode's table entry: its speed over the plain rows of the same turns."""
    pairs = [(r.tokens, r.seconds, plain[r.turn].tokens, plain[r.turn].seconds) for r in some]
    amount, time, plain_amount, plain_time = map(sum, zip(*pairs, strict=True))
    if some[0].mode == PLAIN:
        return f"{amount / time:.1f}"
    shown, mark = "", ""
    if len(pairs) > 1:
        low, high = paired_interval(pairs)
        shown, mark = f" ({low:.2f}–{high:.2f})", _MARKS[shown_by(low, high)]
    per_forward = sum(row.tokens for row in some) / sum(row.forwards for row in some)
    return f"{amount / time * plain_time / plain_amount:.2f}{shown}{mark} · {per_forward:.2f}"


def _guesses(rows: Sequence[Row]) -> Iterator[str]:
    """Yield tables of rows with a draft in every step: `always` rows, and all rows of peers."""
    always = {row.mode for row in rows if row.always}
    own = [row for row in rows if row.turn.batch == 1 and row.mode != PLAIN]
    own = [row for row in own if row.always or row.mode not in always]
    for temperature in dict.fromkeys(row.turn.temperature for row in own):
        yield f"\n## Every step drafted, batch 1, temperature {temperature:g}\n"
        yield (
            "A cell has tokens per forward: "
            "shares of drafts whose token at position 1, 2, … was accepted.\n"
        )
        yield from _grid([row for row in own if row.turn.temperature == temperature], _guessed)


def _guessed(some: Sequence[Row]) -> str:
    forwards = sum(row.forwards for row in some)
    drafts = sum(row.drafts for row in some)
    shown = f"{sum(row.tokens for row in some) / forwards:.2f}"
    if not drafts:
        return shown
    longest = min(_POSITIONS, max(len(row.accepted) for row in some))
    counts = [
        sum(row.accepted[place] for row in some if place < len(row.accepted))
        for place in range(longest)
    ]
    return f"{shown}: " + " ".join(f"{count / drafts:.2f}".lstrip("0") for count in counts)


def _texts(rows: Sequence[Row]) -> Iterator[str]:
    greedy = [row for row in rows if row.turn.temperature == 0.0]
    plain = {row.turn: row.texts for row in greedy if row.mode == PLAIN}

    def equal(some: Sequence[Row]) -> str:
        pairs = [pair for row in some for pair in zip(row.texts, plain[row.turn], strict=True)]
        return f"{sum(ours == its for ours, its in pairs)} of {len(pairs)}"

    if greedy:
        yield "\n## Greedy texts equal to plain decoding's\n"
        yield from _grid([row for row in greedy if row.mode != PLAIN], equal)


def _grid(rows: Sequence[Row], cell: Callable[[Sequence[Row]], str]) -> Iterator[str]:
    """Write a table with a row for each decoding mode and a column for each kind of prompt.

    A mode that does not answer some kinds has no total.
    """
    names = dict.fromkeys(row.mode for row in sorted(rows, key=lambda row: row.mode != PLAIN))
    kinds = [*dict.fromkeys(row.turn.kind for row in rows)]
    yield f"| mode | {' | '.join([*kinds, _ALL])} |"
    yield f"| --- |{' ---: |' * (len(kinds) + 1)}"
    for name in names:
        own = [row for row in rows if row.mode == name]
        by_kind = [[row for row in own if row.turn.kind == kind] for kind in kinds]
        cells = [cell(some) if some else "–" for some in by_kind]
        cells.append(cell(own) if all(by_kind) else "–")
        yield f"| {name} | {' | '.join(cells)} |"
