"""The report of a run: tables, plots, a page and files of its figures."""
