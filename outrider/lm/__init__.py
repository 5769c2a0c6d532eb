"""Runs decoder-only models of `transformers` over a paged KV cache.

Works on token ids and pages; sequences and drafters belong to the services.
"""

import os

# Put weights and caches on a CPU into huge pages. With small pages, reading a whole model for each
# token spends much of the time on address translation. Torch reads this variable when it allocates
# for the first time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
