"""Runs any decoder-only model of `transformers` over a paged KV cache. Knows token ids and pages, not sequences or drafters."""

import os

# Weights and caches on a CPU in huge pages, which the kernel gives to whoever asks: reading all of a model for each token, a
# processor otherwise spends much of its time looking up addresses. Torch reads this when it allocates for the first time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
