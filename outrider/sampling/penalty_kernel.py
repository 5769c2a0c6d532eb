"""Applies penalties on a GPU in one pass over the logits; torch's operators take ten passes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


# The kernel is compiled for the vocabulary's size, which determines how wide loads may be, but not
# for the number of rows, which varies.
@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]  # has no types
def _penalise(  # type: ignore[no-untyped-def]  # pointers and numbers of the kernel's own language
    logits, rows, counts, numbers, vocab_size, row_count, BLOCK: tl.constexpr
):
    """Penalise one block of one row, with the roundings of torch's operators."""
    place = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    at = logits + tl.load(rows + place) * vocab_size + token
    logit = tl.load(at, mask=inside, other=0.0)
    count = tl.load(counts + place * vocab_size + token, mask=inside, other=0)
    repetition = tl.load(numbers + place)
    frequency = tl.load(numbers + row_count + place)
    presence = tl.load(numbers + 2 * row_count + place)
    repeated = tl.where(logit < 0, logit * repetition, tl.div_rn(logit, repetition))
    logit = tl.where(count > 0, repeated, logit)
    # Bit 0 says whether the prompt has the token; the other bits are its count in the output.
    output = count >> 1
    logit -= output.to(tl.float32) * frequency
    logit -= (output > 0).to(tl.float32) * presence
    tl.store(at, logit, mask=inside)


def penalise(
    logits_RV: torch.Tensor,
    rows_P: torch.Tensor,
    counts_PV: torch.Tensor,
    numbers_3P: torch.Tensor,
) -> None:
    """Penalise rows of float32 logits in place, as `Penalties.apply` does, to the last bit.

    `numbers_3P` has repetition, frequency and presence penalties, float32; `counts_PV` are as in
    `TokenCounts.table`.
    """
    row_count, vocab_size = counts_PV.shape
    grid = row_count, triton.cdiv(vocab_size, _BLOCK)
    _penalise[grid](
        logits_RV,
        rows_P,
        counts_PV,
        numbers_3P,
        vocab_size,
        row_count,
        BLOCK=_BLOCK,
        # A fused product and difference would be rounded once; torch rounds both.
        enable_fp_fusion=False,
    )
