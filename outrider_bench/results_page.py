"""Writes docs/benchmarks.md from the figures in bench/results.

Run it by `make benchmarks-page`. bench/results/README.md describes the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from outrider_bench.experiment.spec import first_problem

ROOT = Path(__file__).parents[1]
_RESULTS = Path("bench/results")
_PAGE = Path("docs/benchmarks.md")


class _Entry(BaseModel):
    """A part of results.json, in which every field is required and known."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Spread(_Entry):
    """The range of the rounds, with their median if it was recorded."""

    median: Decimal | None = None
    low: Decimal
    high: Decimal

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if not self.low <= (self.median or self.low) <= self.high:
            raise ValueError("low, median and high must be in order")
        return self


Value = Spread | Decimal | None
"""A figure; None if it was not measured."""


class Aim(_Entry):
    """An aim, the figure that was measured, and the verdict whether it meets the aim."""

    aim: str
    measured: str
    verdict: str


class Row(_Entry):
    """One way of decoding or one figure, with a value for each further column."""

    name: str
    values: list[Value]


class Result(_Entry):
    """One measurement: what was asked, how it was measured, and the figures."""

    title: str
    question: str
    answer: str
    aims: list[Aim]
    command: str
    commit: str
    table: bool
    columns: list[str]
    rows: list[Row]
    notes: list[str]

    @model_validator(mode="after")
    def _fills_the_columns(self) -> Self:
        for row in self.rows:
            if len(row.values) != len(self.columns) - 1:
                count = f"{len(row.values)} values for {len(self.columns) - 1} columns"
                raise ValueError(f"rows: {row.name!r} has {count}")
        return self


class Results(_Entry):
    """All results of one day on one machine."""

    date: str
    machine: str
    results: list[Result]


def load(path: Path) -> Results:
    """Read a results.json; numbers keep the digits that they are written with.

    Raises ValueError with the file's path, and the field unless the file is not JSON.
    """
    try:
        data = json.loads(path.read_text(), parse_float=Decimal, parse_int=Decimal)
        return Results.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_problem(error)}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def page(root: Path) -> str:
    """The text of docs/benchmarks.md in the repository at `root`.

    Raises ValueError for a results.json or README.md that bench/results/README.md does not allow.
    """
    paths = sorted((root / _RESULTS).glob("*/results.json"), reverse=True)
    found = {path.parent: load(path) for path in paths}
    lines = [(root / _RESULTS / "page-head.md").read_text().rstrip(), ""]
    lines += _summary(found.values())
    for folder, results in found.items():
        lines += _section(folder, results)
    return "\n".join(lines).rstrip() + "\n"


def _summary(found: Iterable[Results]) -> Iterator[str]:
    """Yield the table of all aims."""
    yield from ("## Summary", "", "| aim | measured | |", "| --- | --- | --- |")
    for results in found:
        for result in results.results:
            for one in result.aims:
                yield f"| {one.aim} | {one.measured} | {one.verdict} |"
    yield ""


def _section(folder: Path, results: Results) -> Iterator[str]:
    """Yield the section of one folder: its README's opening, results with tables, then others."""
    title, opening = _opening(folder / "README.md", results)
    link = f"[Data](../{_RESULTS}/{folder.name}/results.json)."
    yield from (f"## {title}", "", f"{opening} {link}", "")
    for result in results.results:
        if result.table:
            yield from (_sentences(result), "", *_table(result), "")
    others = [f"- {_sentences(result)}" for result in results.results if not result.table]
    if others:
        yield from (*others, "")


def _opening(readme: Path, results: Results) -> tuple[str, str]:
    """The title and first paragraph of a folder's README.md, each on one line.

    Raises ValueError if there are no two paragraphs, or the title does not begin with the date.
    """
    title, _, rest = readme.read_text().partition("\n\n")
    title = title.removeprefix("# ")
    opening = rest.partition("\n\n")[0].strip().replace("\n", " ")
    if not opening or not title.startswith(results.date):
        raise ValueError(f"{readme}: must have a title that begins with {results.date}, then text")
    return title, opening


def _sentences(result: Result) -> str:
    """One line with the result's question, answer, notes, command and commit."""
    command = result.command
    if "`" not in command and command != "not recorded":
        command = f"`{command}`"
    notes = " ".join(result.notes)
    text = f"**{result.title}.** {result.question} {result.answer} {notes}".rstrip()
    return f"{text} Command: {command}; commit: {result.commit}."


def _table(result: Result) -> Iterator[str]:
    yield f"| {' | '.join(result.columns)} |"
    yield f"| --- |{' ---: |' * (len(result.columns) - 1)}"
    for row in result.rows:
        yield f"| {' | '.join([row.name, *map(_text, row.values)])} |"


def _text(value: Value) -> str:
    """A figure with its digits, and thousands separated; nothing if it was not measured."""
    if value is None:
        return ""
    if isinstance(value, Decimal):
        return f"{value:,}"
    spread = f"{value.low:,}–{value.high:,}"
    if value.median is None:
        return spread
    return f"{value.median:,} ({spread})"


def main() -> int:
    """Write the page; returns the exit status."""
    (ROOT / _PAGE).write_text(page(ROOT))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
