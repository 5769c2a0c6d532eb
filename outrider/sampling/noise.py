"""Counter-based randomness: a random number is a pure function of (seed, position, purpose, step).

docs/protocol.md specifies the noise for other languages. This module needs only numpy, so that
drafters can draw without torch.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Purpose(IntEnum):
    """The use of a random number. Each purpose has an independent stream of numbers."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    COUPLED = 3


# Philox4x32's multipliers and Weyl constants.
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

# SplitMix64's constants.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def philox4x32(
    counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Compute Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

    `counter` is [4, N], `key` [2, N], and the result [4, N]. All are 32-bit words in uint64. A test
    compares this function with the known-answer vectors of the library Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0 = (product1 >> _32) ^ c1 ^ k0
        c1 = product1 & _LOW
        c2 = (product0 >> _32) ^ c3 ^ k1
        c3 = product0 & _LOW
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3])


def _words(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, purpose: Purpose, steps: npt.ArrayLike = 0
) -> npt.NDArray[np.uint64]:
    """Return four random 32-bit words [4, N] for each (seed, position, step)."""
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    key = np.stack([seed & _LOW, seed >> _32])
    purposes = np.full_like(position, int(purpose))
    step = np.broadcast_to(np.asarray(steps, dtype=np.uint64), position.shape)
    return philox4x32(np.stack([position & _LOW, position >> _32, purposes, step]), key)


def uniforms(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, purpose: Purpose, steps: npt.ArrayLike = 0
) -> npt.NDArray[np.float64]:
    """Return uniform numbers in [0, 1), float64 [N], for each (seed, position, step).

    Each number has 53 random bits. `seeds` have 64 bits; `positions` count a sequence's tokens from
    0, prompt included; `steps` are below 2^32.
    """
    words = _words(seeds, positions, purpose, steps)
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    numbers: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers


def coupled_keys(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return SplitMix64's seed for the coupled noise of each (seed, position), int64 [N]."""
    words = _words(seeds, positions, Purpose.COUPLED)
    keys: npt.NDArray[np.int64] = (words[0] | words[1] << _32).view(np.int64)
    return keys


def coupled_draw(probs_V: npt.ArrayLike, seed: int, position: int) -> int:
    """Return the token that the verifier draws from probabilities [V] for this seed and position.

    Computes argmax(probability / exponential), as `outrider.sampling.sampler.coupled_sample` does;
    the lowest id wins a tie. With probabilities close to the verifier's, a drafter draws the same
    token most of the time. `seed` has 64 bits; `position` counts the sequence's tokens from 0,
    prompt included.
    """
    probs = np.asarray(probs_V, dtype=np.float64)
    key = coupled_keys([seed], [position]).view(np.uint64)[0]
    state = np.arange(1, len(probs) + 1, dtype=np.uint64) * _GOLDEN + key
    for shift, factor in zip((30, 27), _MIX, strict=True):
        state = (state ^ (state >> np.uint64(shift))) * factor
    state ^= state >> np.uint64(31)
    exponentials = -np.log(((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)
    return int((probs / exponentials).argmax())
