"""Divides a GPU's memory among weights, the largest step with its graphs, and the KV cache.

The largest step is run and measured before the cache exists, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.protocol.messages import SamplingParams
from outrider.protocol.token_tree import MAX_TREE_TOKENS
from outrider.sampling.context import Context
from outrider.sampling.logits import adjust
from outrider.sampling.sampler import coupled_sample, target_probs

# The memory of a graph besides its tensors. An H200 took 5 to 10 MiB for each of 48 graphs.
_GRAPH_BYTES = 10 * 2**20
# The memory of CUDA in a process besides torch's tensors: a guess, not measured on a GPU.
_CONTEXT_BYTES = 2**29
# The settings that take the most memory: penalties count tokens, and top-p sorts candidates.
_SAMPLING = SamplingParams(0.7, top_k=50, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1)


def cache_bytes(total: int, free: int, own: int, step: int, share: float) -> int:
    """Return the bytes that are left for the KV cache, negative if there are too few.

    This process may use a `share` of the card's `total` bytes. The process already holds `own`
    bytes of its share, and keeps `step` bytes for its largest step. The cache gets at most the
    card's `free` bytes minus `step`.
    """
    return min(int(total * share) - own - _CONTEXT_BYTES, free) - step


@torch.inference_mode()
def largest_step_bytes(forward: Callable[[], torch.Tensor], graph_count: int) -> int:
    """Measure the memory of the largest step beside the weights and the cache.

    `forward` runs the largest forward and returns its logits [T, V]. The graphs keep the memory of
    their largest forward and of the logits in float32. Forwards without a graph need other memory,
    and so does sampling; they follow one another, so only the larger of the two counts.
    """
    forward_bytes, logits_TV = _peak_bytes(forward)
    logits_TV = logits_TV.float()
    sampling_bytes, _ = _peak_bytes(lambda: _sample(logits_TV))
    graph_bytes = forward_bytes + logits_TV.nbytes + graph_count * _GRAPH_BYTES
    return graph_bytes + max(forward_bytes, sampling_bytes)


def _sample(logits_TV: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row, with as many rows for each sequence as the largest tree needs."""
    rows = len(logits_TV)
    counts = [
        min(1 + MAX_TREE_TOKENS, rows - first) for first in range(0, rows, 1 + MAX_TREE_TOKENS)
    ]
    contexts = [Context(_SAMPLING, [0], 1, [0] * (count - 1)) for count in counts]
    probs_TV = target_probs(adjust(logits_TV, contexts), [_SAMPLING] * rows)
    keys_T = torch.zeros(rows, dtype=torch.int64, device=logits_TV.device)
    return coupled_sample(probs_TV, keys_T)


def _peak_bytes(run: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Run a function; return the peak of allocated bytes meanwhile, and the result."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    return torch.cuda.max_memory_allocated() - before, result
