"""Fills a report's tables, for the terminal and the page. Each number names its figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.table import Table as RichTable
from rich.text import Text

from outrider_bench.experiment.report.results import Results, Source, Spread
from outrider_bench.experiment.spec import Cell

MISSING = "–"


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of figures.csv as a column. An empty `way` is that of the line.

    `{event}` in the figure's name becomes the number of the line's event.
    """

    title: str
    figure: str
    digits: int = 1
    way: str = ""
    ranged: bool = False
    """Whether the least and most over the repetitions are shown as well."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A number as text, the median, with the figure and way in figures.csv that it comes from."""

    text: str
    range_text: str = ""
    figure: str = ""
    way: str = ""

    def __str__(self) -> str:
        if self.range_text:
            return f"{self.text} ({self.range_text})"
        return self.text


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: words, then numbers of one cell, source and verifier."""

    heads: list[str]
    cell: str
    source: Source
    verifier: str
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the report. `note` says how to read it."""

    name: str
    title: str
    note: str
    heads: list[str]
    columns: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Subject:
    """The cell, source, way and verifier of a line."""

    heads: list[str]
    cell: Cell
    source: Source
    way: str
    verifier: str
    event: int = 0


def make(
    results: Results, table: Table, columns: Sequence[Column], subjects: Sequence[Subject]
) -> Iterator[Table]:
    """Fill a table and leave out empty columns and lines; yields nothing if all are empty."""
    grid = [[_spread(results, subject, column) for column in columns] for subject in subjects]
    kept = [place for place in range(len(columns)) if any(line[place] for line in grid)]
    lines = []
    for subject, spreads in zip(subjects, grid, strict=True):
        if any(spreads):
            pairs = [(columns[place], spreads[place]) for place in kept]
            entries = [_entry(column, spread, subject) for column, spread in pairs]
            heads = [*subject.heads, subject.source]
            lines.append(Line(heads, subject.cell.key, subject.source, subject.verifier, entries))
    if lines:
        titles = [columns[place].title for place in kept]
        yield Table(table.name, table.title, table.note, [*table.heads, "source"], titles, lines)


def rich_table(table: Table) -> RichTable:
    """The table for the terminal; predicted lines are in italics."""
    shown = RichTable(title=table.title, caption=table.note, title_justify="left")
    shown.caption_justify = "left"
    for head in table.heads:
        shown.add_column(head, overflow="fold")
    for column in table.columns:
        shown.add_column(column, justify="right")
    for line in table.lines:
        style = None
        if line.source == "predicted":
            style = "italic"
        words = [*line.heads, *map(str, line.entries)]
        shown.add_row(*[Text(word) for word in words], style=style)
    return shown


def _spread(results: Results, subject: Subject, column: Column) -> Spread | None:
    way = column.way or subject.way
    figure = column.figure.format(event=subject.event)
    return results.spread(subject.cell, subject.source, way, figure, subject.verifier)


def _entry(column: Column, spread: Spread | None, subject: Subject) -> Entry:
    if spread is None:
        return Entry(MISSING)
    numbers = [f"{value:.{column.digits}f}" for value in (spread.median, spread.least, spread.most)]
    between = ""
    if column.ranged and spread.count > 1:
        between = f"{numbers[1]}–{numbers[2]}"
    figure = column.figure.format(event=subject.event)
    return Entry(numbers[0], between, figure, column.way or subject.way)
