"""Reads a run's folder into the figures of its report."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from outrider_bench.experiment.records import Folder, Measurement
from outrider_bench.experiment.report.figures import measurement_figures, sample_figures
from outrider_bench.experiment.report.ratios import add_ratios
from outrider_bench.experiment.report.results import ALL, SOURCES, Results, Row, Source
from outrider_bench.experiment.spec import Cell, Experiment, first_problem


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
    add_ratios(results)
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
