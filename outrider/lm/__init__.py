"""Runs any decoder-only model of `transformers` over a paged KV cache.

Knows token ids and pages, not sequences or drafters.
"""
