"""Measures the GPU path in steps; runs in small on a CPU."""
