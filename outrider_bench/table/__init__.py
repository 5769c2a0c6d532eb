"""`outrider lab table`: all drafting methods on one published model, for each kind of prompt."""
