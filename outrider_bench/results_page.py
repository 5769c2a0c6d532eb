"""Writes docs/benchmarks.md, and a figures.md beside each results.json of bench/results.

Run it by `make benchmarks-page`. bench/results/README.md describes the files.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from outrider_bench.experiment.spec import first_problem

ROOT = Path(__file__).parents[1]
_RESULTS = Path("bench/results")
_PAGE = Path("docs/benchmarks.md")
_FIGURES = "figures.md"
_COLUMNS = 100
"""Lines are no longer than this, but for those of tables."""


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

    @property
    def anchor(self) -> str:
        """The part of a link that leads to a heading with the title."""
        return re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")

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


def pages(root: Path) -> dict[Path, str]:
    """The texts of docs/benchmarks.md and of every figures.md in the repository at `root`.

    Raises ValueError for a results.json or README.md that bench/results/README.md does not allow.
    """
    paths = sorted((root / _RESULTS).glob("*/results.json"), reverse=True)
    found = {path.parent: load(path) for path in paths}
    lines = [(root / _RESULTS / "page-head.md").read_text().rstrip(), ""]
    lines += [*_aims(found), *_answers(found), *_tables(found)]
    texts = {root / _PAGE: lines}
    for folder, results in found.items():
        texts[folder / _FIGURES] = [*_figures(folder, results)]
    return {path: "\n".join(text).rstrip() + "\n" for path, text in texts.items()}


def _each(found: dict[Path, Results]) -> Iterator[tuple[Path, Result]]:
    for folder, results in found.items():
        for result in results.results:
            yield folder, result


def _link(folder: Path, result: Result) -> str:
    """The address of a result's figures, seen from docs/."""
    return f"../{_RESULTS}/{folder.name}/{_FIGURES}#{result.anchor}"


def _aims(found: dict[Path, Results]) -> Iterator[str]:
    """Yield the table of all aims."""
    yield from ("## Aims", "", "| aim | measured | verdict |", "| --- | --- | --- |")
    for folder, result in _each(found):
        for one in result.aims:
            yield f"| {one.aim} | {one.measured} | [{one.verdict}]({_link(folder, result)}) |"
    yield ""


def _answers(found: dict[Path, Results]) -> Iterator[str]:
    """Yield the table of all questions with their answers."""
    yield from ("## Answers", "", "| | question and answer | folder |", "| --- | --- | --- |")
    for folder, result in _each(found):
        title = f"[{result.title}]({_link(folder, result)})"
        yield f"| {title} | {result.question} {result.answer} | {folder.name} |"
    yield ""


def _tables(found: dict[Path, Results]) -> Iterator[str]:
    """Yield the figures of the results that the page shows in full."""
    for folder, result in _each(found):
        if result.table:
            yield from (f"## [{result.title}]({_link(folder, result)})", "", *_table(result), "")


def _figures(folder: Path, results: Results) -> Iterator[str]:
    """Yield the page of one folder's results.

    Raises ValueError if the folder's README.md does not begin with a title that has the date.
    """
    readme = folder / "README.md"
    title = readme.read_text().partition("\n")[0].removeprefix("# ")
    if not title.startswith(results.date):
        raise ValueError(f"{readme}: must have a title that begins with {results.date}")
    yield from (f"# Figures of {title}", "")
    yield from _wrapped(
        "`make benchmarks-page` writes this page from [results.json](results.json). "
        "[README.md](README.md) describes the machine and the method."
    )
    for result in results.results:
        yield from ("", f"## {result.title}", "")
        yield from _wrapped(" ".join([result.question, result.answer, *result.notes]))
        yield from ("", *_wrapped(_origin(result)), "", *_table(result))


def _origin(result: Result) -> str:
    command = result.command
    if "`" not in command and command != "not recorded":
        command = f"`{command}`"
    return f"Command: {command}; commit: {result.commit}."


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


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
    """Write the pages; returns the exit status."""
    for path, text in pages(ROOT).items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
