"""Prediction beside measurement. Knows no pictures."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from outrider_bench.experiment.report.labels import point_words
from outrider_bench.experiment.report.results import Results


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """tokens/s of a way in a cell: medians over the repetitions of each source."""

    cell: str
    label: str
    way: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The prediction's error as a share of the measurement; positive if it is too fast."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Validation:
    """All cells and ways that were both measured and predicted; errors are shares, without sign."""

    rows: list[ValidationRow]
    median_error: float
    worst_error: float


def compare(results: Results) -> Validation | None:
    """Compare tokens/s wherever a run has both sources; None if it nowhere has."""
    rows = []
    ways = dict.fromkeys(row.way for row in results.rows)
    for cell in results.cells:
        for way in ways:
            measured = results.spread(cell, "measured", way, "tokens_per_s")
            predicted = results.spread(cell, "predicted", way, "tokens_per_s")
            if measured and predicted:
                label = point_words(cell.point)
                rows.append(ValidationRow(cell.key, label, way, measured.median, predicted.median))
    if not rows:
        return None
    errors = [abs(row.error) for row in rows]
    return Validation(rows, median(errors), max(errors))
