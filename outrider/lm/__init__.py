"""Runs decoder-only models of `transformers` over a paged KV cache.

Works on token ids and pages; sequences and drafters belong to the services.
"""
