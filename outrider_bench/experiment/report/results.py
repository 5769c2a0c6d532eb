"""All figures of a run: one row for each cell, way, repetition and verifier.

Ratios are taken within one repetition: a machine is faster in some repetitions than in others, so
ratios across repetitions mean less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import ValidationError

from outrider_bench.experiment.records import DRAFTED, PLAIN, Folder, Measurement
from outrider_bench.experiment.report.figures import (
    Figures,
    measurement_figures,
    sample_figures,
)
from outrider_bench.experiment.spec import Cell, Experiment, first_problem

ALL = "all"
"""The verifier of a row of all verifiers together."""

Source = Literal["measured", "predicted"]
SOURCES: tuple[Source, ...] = ("measured", "predicted")


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repetitions."""

    median: float
    least: float
    most: float
    count: int

    def words(self, digits: int = 2) -> str:
        """The median, with the range of several repetitions."""
        middle, least, most = (f"{v:.{digits}f}" for v in (self.median, self.least, self.most))
        return middle if self.count == 1 else f"{middle} ({least}–{most})"


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one verifier, or of all, in one repetition of a way in a cell."""

    cell: str
    source: Source
    way: str
    repetition: int
    verifier: str
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
        """The cells that have results, with the source of each, see `source_of`."""
        pairs = [(cell, self.source_of(cell)) for cell in self.cells]
        return [(cell, source) for cell, source in pairs if source is not None]

    def source_of(self, cell: Cell) -> Source | None:
        """The source of a cell's figures in tables: measurement, else prediction, else None."""
        known = [source for source in SOURCES if (cell.key, source) in self.measurements]
        return next(iter(known), None)

    def events(self, cell: Cell, source: Source) -> list[dict[str, Any]]:
        """The events during a cell's drafted decoding, in order of time."""
        found = self.measurements.get((cell.key, source), [])
        played = [measured.events for _, measured in found if measured.way == DRAFTED]
        most = max(played, key=len, default=[])
        return sorted(most, key=lambda event: float(event["at"]))

    def values(
        self, cell: Cell, source: Source, way: str, figure: str, verifier: str = ALL
    ) -> list[float]:
        """A figure of each repetition that has it."""
        wanted = (cell.key, source, way, verifier)
        return [
            row.figures[figure]
            for row in self.rows
            if (row.cell, row.source, row.way, row.verifier) == wanted and figure in row.figures
        ]

    def spread(
        self, cell: Cell, source: Source, way: str, figure: str, verifier: str = ALL
    ) -> Spread | None:
        """A figure over the repetitions; None if no repetition has it."""
        values = self.values(cell, source, way, figure, verifier)
        return Spread(median(values), min(values), max(values), len(values)) if values else None

    def baseline_of(self, cell: Cell) -> Cell | None:
        """The baseline cell to compare `cell` with.

        It agrees with `cell` on all paths that the baseline does not fix. Without such a cell it is
        the only baseline cell, if there is one.
        """
        bases = [other for other in self.cells if other.is_baseline]
        wanted = {**cell.point, **self.experiment.baseline}
        alike = [base for base in bases if base.point == wanted]
        return next(iter(alike or (bases if len(bases) == 1 else [])), None)


def read(folder: Folder) -> Results:
    """Read a run's folder.

    Raises ValueError that names the file and field for a folder without run.json, for an
    experiment that does not fit the schema, and for a run without any measurement.
    """
    file = folder.path / "run.json"
    try:
        about = folder.about()
        experiment = Experiment.model_validate(about["experiment"])
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
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
    in_turn = cell.experiment.workload.verifiers == "in-turn"
    for source in SOURCES:
        for repetition, measured in measurements.get((cell.key, source), []):
            whole = measurement_figures(measured, in_turn=in_turn)
            yield Row(cell.key, source, measured.way, repetition, ALL, whole)
            for number, sample in enumerate(measured.samples, 1):
                figures = sample_figures(sample)
                yield Row(cell.key, source, measured.way, repetition, str(number), figures)


def _add_ratios(results: Results) -> None:
    """Add `times_plain` and `times_baseline` to the rows."""
    rows = {row: row.figures for row in results.rows}
    loads: dict[str, list[str]] = {}
    for cell in results.cells:
        loads.setdefault(load_of(cell), []).append(cell.key)
    for cell in results.cells:
        base = results.baseline_of(cell)
        for row in (row for row in results.rows if row.cell == cell.key and row.way != PLAIN):
            # Links and drafters do not change plain decoding. A cell without a figure of it takes
            # the median of the cells with the same target and workload.
            own, *alike = [
                rows.get(replace(row, way=PLAIN, cell=key), {}).get("tokens_per_s")
                for key in (cell.key, *loads[load_of(cell)])
            ]
            known = [rate for rate in alike if rate]
            plain = own or (median(known) if known else None)
            if plain:
                row.figures["times_plain"] = row.figures["tokens_per_s"] / plain
            if base is not None and row.way == DRAFTED:
                rate = rows.get(replace(row, cell=base.key), {}).get("tokens_per_s")
                if rate:
                    row.figures["times_baseline"] = row.figures["tokens_per_s"] / rate


def load_of(cell: Cell) -> str:
    """A key of target and workload, equal for cells with the same plain decoding."""
    return cell.experiment.model_dump_json(include={"target", "workload"})
