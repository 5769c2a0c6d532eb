"""`outrider experiment report`: tables, plots, a page and files of a run's figures."""

from outrider_bench.experiment.report.command import main, validation, validation_table
from outrider_bench.experiment.report.compare import Validation

__all__ = ["Validation", "main", "validation", "validation_table"]
