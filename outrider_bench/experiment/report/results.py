"""All figures of a run: one row for each cell, way, repetition and verifier. Reads no files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from outrider_bench.experiment.records import DRAFTED, Measurement
from outrider_bench.experiment.report.figures import Figures
from outrider_bench.experiment.spec import Cell, Experiment

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

    @classmethod
    def of(cls, values: list[float]) -> Spread | None:
        """None without values."""
        if not values:
            return None
        return cls(median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one verifier, or of all, in one repetition of a way in a cell."""

    cell: str
    source: Source
    way: str
    repetition: int
    verifier: str
    figures: Figures


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
        return Spread.of(self.values(cell, source, way, figure, verifier))
