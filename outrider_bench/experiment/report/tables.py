"""The tables of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from outrider_bench.experiment.records import DRAFTED, OURS, PLAIN
from outrider_bench.experiment.report.figures import LOOKUPS, PHASES, POSITIONS, groups_of
from outrider_bench.experiment.report.results import Results, Source, words
from outrider_bench.experiment.spec import Cell


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the report. `note` says how to read the table."""

    title: str
    note: str
    columns: list[str]
    lines: list[list[str]]


@dataclass(frozen=True, slots=True)
class _Column:
    """A column that shows a figure of figures.csv. An empty `way` means the line's mode.

    `{group}` in the figure's name is replaced by the line's group (see `_Subject`).
    """

    title: str
    figure: str
    digits: int = 2
    way: str = ""
    ranged: bool = False
    """True if the interval of the median is shown as well."""
    source: Source | None = None
    """The source of the figures; None is the line's source."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """The subject of a line of the table: a cell, the source, and maybe a mode or a group.

    A group is a drafter family or a kind of prompt.
    """

    head: str
    cell: Cell
    source: Source
    way: str = ""
    group: str = ""


LATENCIES = {
    f"{name}_p{percentile}_ms": f"{name.upper()} p{percentile}, ms"
    for name in ("tpot", "ttft")
    for percentile in (50, 99)
}
ACCEPTANCE = {
    "acceptance": "acceptance rate",
    "accepted_length": "acceptance length",
    **{f"accepted_at_{i}": f"at {i}" for i in POSITIONS},
}
PHASE_TIMES = {f"step_{phase}_ms": phase for phase in PHASES}
NEXT_DRAFTS = {f"lookup_{result}": result for result in LOOKUPS}
"""Maps a figure to its column's title, as the three dictionaries above do.
`outrider lab simulate` uses all four.
"""
_SPEED = [
    _Column("plain, tokens/s", "tokens_per_s", 1, PLAIN, ranged=True),
    _Column("drafted, tokens/s", "tokens_per_s", 1, DRAFTED, ranged=True),
    _Column("× plain", "times_plain", 2, DRAFTED, ranged=True),
    _Column("predicted", "times_plain", 2, DRAFTED, source="predicted"),
]
_LATENCY = [
    _Column(f"{way}: {title}", figure, 1, way)
    for figure, title in LATENCIES.items()
    for way in OURS
]
_DRAFTS = [
    _Column("verified drafts", "drafts", 0, DRAFTED),
    _Column("acceptance rate", "acceptance", 2, DRAFTED),
    _Column("acceptance length", "accepted_length", 2, DRAFTED),
    _Column("tokens per forward", "tokens_per_forward", 2, DRAFTED),
    *(_Column(title, figure, 2, DRAFTED) for figure, title in NEXT_DRAFTS.items()),
    _Column("wasted drafts per token", "wasted_per_token", 2, DRAFTED),
]
_ACCEPTANCE = [
    _Column("verified drafts", "{group}drafts", 0, DRAFTED),
    *(_Column(title, f"{{group}}{figure}", 2, DRAFTED) for figure, title in ACCEPTANCE.items()),
]
_STEP = [
    _Column("step", "step_ms"),
    *(_Column(title, figure) for figure, title in PHASE_TIMES.items()),
    _Column("of limit", "of_limit"),
]
_NOTES = {
    "Speed": "As in all tables, medians of the repetitions; here with their 95 % interval, by "
    "bootstrap over the repetitions. Ratios are taken within each repetition. A disturbed ratio "
    "exceeds what its tokens per forward allow.",
    "Latency": "TPOT is the time per output token of a request, TTFT its time to the first token.",
    "Drafts": "Verified drafts of a repetition: few drafts give rough rates. Acceptance rate: "
    "accepted of verified draft tokens. Acceptance length: 1 + accepted tokens per draft. Chain, "
    "branch, late, miss: shares of commits by the next draft's state. Wasted: draft tokens dropped "
    "for each output token.",
    "Acceptance by position and kind": "Over all drafts, over the drafts of a family, and over the "
    "drafts for a kind of prompt. At a position: the share of drafts whose token there was "
    "accepted, as vLLM counts.",
    "Where the time of a step went, ms": "Means by phase, from the verifier's counters. Of limit: "
    "the time of isolated forwards over that of decoding steps, waits included; 1 is no overhead.",
}


def tables(results: Results) -> Iterator[Table]:
    """Yield all tables that the run has figures for."""
    cells = [_Subject("", cell, source) for cell, source in results.found()]
    ways = [replace(subject, head=w, way=w) for subject in cells for w in OURS]
    groups = [
        replace(subject, head=group.replace("_", " ", 1) or "all", group=group and f"{group}_")
        for subject in cells
        for group in ("", *groups_of(name for row in results.rows for name in row.figures))
    ]
    for title, columns, subjects in zip(
        _NOTES,
        (_SPEED, _LATENCY, _DRAFTS, _ACCEPTANCE, _STEP),
        (cells, cells, cells, groups, ways),
        strict=True,
    ):
        yield from _filled(results, title, columns, subjects)


def _filled(
    results: Results, title: str, columns: Sequence[_Column], subjects: Sequence[_Subject]
) -> Iterator[Table]:
    """Yield the table without empty columns and lines; nothing if all are empty."""
    grid = [[_text(results, subject, column) for column in columns] for subject in subjects]
    kept = [place for place in range(len(columns)) if any(line[place] for line in grid)]
    lines = []
    for subject, texts in zip(subjects, grid, strict=True):
        if any(texts):
            point = [words(value) for value in subject.cell.point.values()]
            head = [subject.head] if subject.head else []
            lines.append([*point, *head, subject.source, *(texts[place] or "–" for place in kept)])
    if lines:
        head = ["of"] if subjects[0].head else []
        shown = [columns[place].title for place in kept]
        heads = [*results.experiment.sweep, *head, "source", *shown]
        yield Table(title, _NOTES[title], heads, lines)


def _text(results: Results, subject: _Subject, column: _Column) -> str:
    figure = column.figure.format(group=subject.group)
    way = column.way or subject.way
    source = column.source or subject.source
    spread = results.spread(subject.cell, source, way, figure)
    if spread is None or column.source == subject.source:
        return ""
    text = spread.words(column.digits) if column.ranged else f"{spread.median:.{column.digits}f}"
    is_disturbed = results.is_disturbed(subject.cell, source)
    return f"{text} disturbed" if figure == "times_plain" and is_disturbed else text
