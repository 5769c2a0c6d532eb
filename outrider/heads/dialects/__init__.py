"""Readers for the files of published heads, one module for each group of dialects."""
