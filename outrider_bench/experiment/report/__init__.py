"""The report of a run: sentences, tables, a plot and a CSV of its figures."""
