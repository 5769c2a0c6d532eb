"""From logits to tokens: temperature, top-k and top-p for a batch of rows, and counter-based randomness.

Every random number is a pure function of (seed, position, purpose), so the batch a row happens to stand in, preemption and the
order of requests change nothing, and no two purposes ever share noise.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch


class Purpose(IntEnum):
    """What a random number is for; each purpose is an independent stream."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    SAMPLE = 3


_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

    `counter` is [4, N] and `key` [2, N], 32-bit words in uint64; returns [4, N] 32-bit words. The known-answer vectors of the
    Random123 distribution are a test.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniforms(seeds: npt.ArrayLike, positions: npt.ArrayLike, purpose: Purpose) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one for each (seed, position), [N].

    `seeds` are 64-bit; `positions` count a sequence's tokens from 0, the prompt included.
    """
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    key = np.stack([seed & _LOW, seed >> _32])
    purposes = np.full_like(position, int(purpose))
    words = philox4x32(np.stack([position & _LOW, position >> _32, purposes, np.zeros_like(position)]), key)
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    numbers: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers


def target_probs(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor
) -> torch.Tensor:
    """Probabilities [R, V] after temperature, top-k (0 is off) and top-p, each row with its own settings.

    The order and the tie at top-p's edge are those of transformers' logits processors. Rows with temperature 0 come back as if
    it were 1; their token is the argmax, which the caller takes from the logits. Sorting is paid for only by the rows that ask.
    """
    scaled = logits_RV / torch.where(temperature_R > 0, temperature_R, 1.0).unsqueeze(-1)
    truncated = ((top_k_R > 0) | (top_p_R < 1)) & (temperature_R > 0)
    if bool(truncated.any()):
        rows = truncated.nonzero().squeeze(-1)
        scaled[rows] = _truncate(scaled[rows], top_k_R[rows], top_p_R[rows])
    return scaled.softmax(-1)


def _truncate(logits_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Set to -inf what top-k, then top-p, removes."""
    ordered, index = logits_RV.sort(dim=-1, descending=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    limit = torch.where(top_k_R > 0, top_k_R, ordered.shape[-1]).unsqueeze(-1)
    # As transformers: whatever ties with the k-th likeliest stays.
    kth = ordered.gather(-1, (limit - 1).clamp(max=ordered.shape[-1] - 1))
    ordered = ordered.masked_fill((rank >= limit) & (ordered < kth), -torch.inf)
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    drop = (mass_before >= top_p_R.unsqueeze(-1)) & (top_p_R < 1).unsqueeze(-1)
    drop[:, 0] = False
    return torch.empty_like(ordered).scatter_(-1, index, ordered.masked_fill(drop, -torch.inf))


def inverse_cdf(weights_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """The token of each row at `uniform_R` of its cumulative weights, int64 [R]; weights need not be normalised.

    Summed in float64: at a vocabulary of 150k, float32 sums would shift the tail. A token of weight 0 is never returned.
    """
    cumulative = weights_RV.cumsum(-1, dtype=torch.float64)
    point = uniform_R.to(torch.float64).unsqueeze(-1) * cumulative[:, -1:]
    # At 53 bits the product can round up to the total itself, past the last token that has weight.
    point = torch.minimum(point, torch.nextafter(cumulative[:, -1:], torch.zeros_like(point)))
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)
