"""How published files say what a head computes: one module for each group of dialects."""
