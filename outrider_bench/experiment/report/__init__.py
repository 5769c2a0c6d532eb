"""`outrider experiment report`: tables, plots, a page and files of a run's figures."""

from outrider_bench.experiment.report.command import main

__all__ = ["main"]
