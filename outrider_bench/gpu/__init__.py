"""Measures the GPU path in steps; runs at small size on a CPU."""
