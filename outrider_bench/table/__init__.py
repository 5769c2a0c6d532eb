"""`outrider lab table`: every way of drafting on one published model, by kind of prompt."""
