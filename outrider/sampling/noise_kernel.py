"""Draws with coupled noise on a GPU in one pass over the probabilities.

docs/protocol.md specifies the noise. With torch's operators such a draw takes fourteen passes over
64-bit numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=["vocab_size"], do_not_specialize_on_alignment=["keys"]
)
def _race(  # type: ignore[no-untyped-def]  # pointers and numbers of the kernel's own language
    probs, keys, best, tokens, vocab_size, BLOCK: tl.constexpr
):
    """Find the token with the largest probability / exponential in one block of one row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    probability = tl.load(probs + row * vocab_size + token, mask=inside, other=0.0).to(tl.float64)
    # SplitMix64's output number `token`, seeded with the row's key.
    state = tl.load(keys + row).to(tl.uint64) + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    uniform = ((state >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
    # A NaN scores 0, so that a row of NaNs still yields a token of the vocabulary.
    run = tl.where(inside, tl.where(probability > 0, probability / -tl.log(uniform), 0.0), -1.0)
    value, index = tl.max(run, 0, return_indices=True)
    at = row * tl.num_programs(1) + block
    tl.store(best + at, value)
    tl.store(tokens + at, (block * BLOCK + index).to(tl.int64))


def coupled_sample(probs_RV: torch.Tensor, keys_R: torch.Tensor) -> torch.Tensor:
    """Draw as `outrider.sampling.sampler.coupled_sample` does, up to a logarithm's last bit."""
    row_count, vocab_size = probs_RV.shape
    best = probs_RV.new_empty(row_count, triton.cdiv(vocab_size, _BLOCK), dtype=torch.float64)
    tokens = torch.empty_like(best, dtype=torch.int64)
    _race[best.shape](probs_RV.contiguous(), keys_R, best, tokens, vocab_size, BLOCK=_BLOCK)
    return tokens.gather(-1, best.argmax(-1, keepdim=True)).squeeze(-1)
