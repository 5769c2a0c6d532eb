"""Measures the GPU path in steps, which also run on a CPU, at small sizes."""
