"""Benchmarks that print what docs/benchmarks.md records."""
