"""`outrider experiment report`: tables, plots, a page and files of a run's figures."""

from bench.experiment.report.command import main, validation, validation_table
from bench.experiment.report.compare import Validation

__all__ = ["Validation", "main", "validation", "validation_table"]
