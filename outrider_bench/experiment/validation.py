"""Prediction beside measurement."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from rich.table import Table
from rich.text import Text

from outrider_bench.experiment.records import Folder
from outrider_bench.experiment.report.results import point_words, read


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """tokens/s of a way in a cell: medians over the repetitions of each source."""

    label: str
    way: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The prediction's error as a share of the measurement; positive if it is too fast."""
        return self.predicted / self.measured - 1.0


def validation(folder: Folder) -> list[ValidationRow]:
    """Predicted beside measured tokens/s of a run.

    Raises ValueError if no cell of the folder has both.
    """
    results = read(folder)
    rows = []
    ways = dict.fromkeys(row.way for row in results.rows)
    for cell in results.cells:
        for way in ways:
            measured = results.spread(cell, "measured", way, "tokens_per_s")
            predicted = results.spread(cell, "predicted", way, "tokens_per_s")
            if measured and predicted:
                label = point_words(cell.point)
                rows.append(ValidationRow(label, way, measured.median, predicted.median))
    if not rows:
        raise ValueError(f"{folder.path}: no cell has both a measurement and a prediction")
    return rows


def validation_table(rows: list[ValidationRow]) -> Table:
    """Predicted beside measured tokens/s by cell and way, with the error in percent."""
    table = Table(title="Predicted and measured, tokens/s", title_justify="left")
    errors = [abs(100 * row.error) for row in rows]
    table.caption = f"Error in the median {median(errors):.1f} %, worst {max(errors):.1f} %"
    for head in ("cell", "way", "measured", "predicted", "error, %"):
        table.add_column(head)
    for row in rows:
        numbers = (f"{row.measured:.1f}", f"{row.predicted:.1f}", f"{100 * row.error:+.1f}")
        table.add_row(Text(row.label), row.way, *numbers)
    return table
