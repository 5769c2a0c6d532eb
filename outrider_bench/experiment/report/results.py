"""All figures of a run: one row for each cell, decoding mode (`way`) and repetition.

A cell is a combination of settings. Ratios compare rows of one repetition: a machine is faster in
some repetitions than in others, so ratios across repetitions mean less.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import ValidationError

from outrider_bench.experiment.records import COSTS, DRAFTED, PLAIN, Folder, Measurement
from outrider_bench.experiment.report.figures import Figures, figures_of
from outrider_bench.experiment.spec import Cell, Experiment
from outrider_bench.intervals import MOST_OF_ALLOWED, Shown, interval, of_allowed, shown_by
from outrider_bench.yaml_file import first_problem

Source = Literal["measured", "predicted"]
SOURCES: tuple[Source, ...] = ("measured", "predicted")


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repetitions, with the interval of its median."""

    median: float
    low: float
    high: float
    count: int
    predicted: bool = False
    """True for a prediction, which is the same in every repetition."""

    @classmethod
    def of(cls, values: Sequence[float], *, predicted: bool = False) -> Spread:
        """Return the median and its interval by bootstrap."""
        return cls(median(values), *interval(values), len(values), predicted)

    @property
    def shows(self) -> Shown:
        """Is "faster" if the ratio's whole interval is above 1, "slower" if it is below 1, else "".

        One measured repetition shows neither.
        """
        if self.count == 1 and not self.predicted:
            return ""
        return shown_by(self.low, self.high)

    def words(self, digits: int = 2) -> str:
        """Return the median and, if there are several repetitions, its interval."""
        middle, low, high = (f"{v:.{digits}f}" for v in (self.median, self.low, self.high))
        return middle if self.count == 1 else f"{middle} ({low}–{high})"


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one repetition of a decoding mode in a cell."""

    cell: str
    source: Source
    way: str
    repetition: int
    figures: Figures = field(compare=False, hash=False)


@dataclass(slots=True)
class Results:
    """The figures of a run. Cells without any measurement are in `cells`, not in `rows`."""

    folder: Path
    experiment: Experiment
    about: dict[str, Any]
    cells: list[Cell]
    measurements: dict[tuple[str, Source], list[tuple[int, Measurement]]]
    rows: list[Row] = field(default_factory=list)

    def found(self) -> list[tuple[Cell, Source]]:
        """Return cells with results, each with its source in tables: measured, else predicted."""
        known = [[s for s in SOURCES if (cell.key, s) in self.measurements] for cell in self.cells]
        return [(cell, of[0]) for cell, of in zip(self.cells, known, strict=True) if of]

    def values(self, cell: Cell, source: Source, way: str, figure: str) -> list[float]:
        """Return the values of a figure, one for each repetition that has the figure."""
        wanted = (cell.key, source, way)
        return [
            row.figures[figure]
            for row in self.rows
            if (row.cell, row.source, row.way) == wanted and figure in row.figures
        ]

    def spread(self, cell: Cell, source: Source, way: str, figure: str) -> Spread | None:
        """Return a figure over the repetitions; None if no repetition has it."""
        values = self.values(cell, source, way, figure)
        return Spread.of(values, predicted=source == "predicted") if values else None

    def is_disturbed(self, cell: Cell, source: Source) -> bool:
        """True if the speed over plain decoding exceeds what the tokens per forward allow."""
        share = self.spread(cell, source, DRAFTED, "times_plain_of_allowed")
        return share is not None and share.median > MOST_OF_ALLOWED

    @property
    def costs(self) -> str:
        """The costs behind predictions, and how they were measured; "" if unknown."""
        file = self.folder / COSTS
        return str(json.loads(file.read_text())) if file.is_file() else ""


def read(folder: Folder) -> Results:
    """Read a run's folder.

    Raises ValueError for a folder without run.json, for an experiment that does not fit the
    schema, and for a run without any measurement. The error names the file or folder, and the
    wrong field if there is one.
    """
    file = folder.path / "run.json"
    try:
        about = folder.about()
        experiment = Experiment.model_validate(about["experiment"])
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}, so this is no run's folder") from error
    except KeyError as error:
        raise ValueError(f"{file}: the field {error} is missing") from error
    except ValidationError as error:
        raise ValueError(f"{file}: experiment.{first_problem(error)}") from error
    measurements: dict[tuple[str, Source], list[tuple[int, Measurement]]] = {}
    for cell in experiment.cells():
        for source in SOURCES:
            found = list(folder.measurements(cell.key, predicted=source == "predicted"))
            if found:
                measurements[cell.key, source] = found
    if not measurements:
        raise ValueError(f"{folder.path}: no cell of the experiment has a measurement yet")
    results = Results(folder.path, experiment, about, experiment.cells(), measurements)
    for cell in results.cells:
        results.rows += _rows(cell, measurements)
    _add_ratios(results)
    return results


def _rows(
    cell: Cell, measurements: dict[tuple[str, Source], list[tuple[int, Measurement]]]
) -> Iterator[Row]:
    for source in SOURCES:
        for repetition, measured in measurements.get((cell.key, source), []):
            yield Row(cell.key, source, measured.way, repetition, figures_of(measured))


def _add_ratios(results: Results) -> None:
    """Add `times_plain`, and its share of the possible speed, to the rows of drafted decoding."""
    rows = {row: row.figures for row in results.rows}
    for row in results.rows:
        plain = rows.get(replace(row, way=PLAIN), {})
        if row.way != DRAFTED or not plain.get("tokens_per_s"):
            continue
        ratio = row.figures["tokens_per_s"] / plain["tokens_per_s"]
        row.figures["times_plain"] = ratio
        tokens = row.figures.get("tokens_per_forward")
        if tokens:
            share = of_allowed(ratio, tokens, plain.get("tokens_per_forward", 1.0))
            row.figures["times_plain_of_allowed"] = share


def words(value: Any) -> str:
    """Return a value of a sweep, as tables show it."""
    return " + ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def point_words(point: Mapping[str, Any]) -> str:
    """Return a cell's values in words, such as `model, round_trip_ms 20, mbit_s 100`."""
    shown = [
        words(value) if path == "use" else f"{path.rpartition('.')[2]} {words(value)}"
        for path, value in point.items()
    ]
    return ", ".join(shown) or "the experiment"
