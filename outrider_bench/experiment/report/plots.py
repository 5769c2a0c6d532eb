"""Chooses a report's plots by the experiment's sweep and figures."""

from __future__ import annotations

from outrider_bench.experiment.report.cell_plots import heat_maps, speed_bars, split_pictures
from outrider_bench.experiment.report.compare import Validation
from outrider_bench.experiment.report.drawing import Picture
from outrider_bench.experiment.report.line_plots import break_even_pictures, speed_pictures
from outrider_bench.experiment.report.other_plots import (
    time_pictures,
    turn_pictures,
    validation_pictures,
)
from outrider_bench.experiment.report.results import Results


def pictures(results: Results, validation: Validation | None) -> list[Picture]:
    """All plots that the run has figures for, in the order of the page."""
    lines = list(speed_pictures(results))
    return [
        *(lines or speed_bars(results)),
        *break_even_pictures(results),
        *heat_maps(results),
        *turn_pictures(results),
        *time_pictures(results),
        *split_pictures(results),
        *validation_pictures(validation),
    ]
