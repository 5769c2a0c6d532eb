"""Turns logits into tokens: temperature, truncation and sampling for a batch of rows.

Every random number is a pure function of (seed, position, purpose) and, for draft tokens and
acceptance coins, of a step number. Batch composition, preemption and the order of requests
therefore change no random number, and no two purposes share noise. The reason for the step number:
an acceptance rule may look at all tokens and coins of a draft, so the random numbers of a rejected
draft must not be used again. docs/protocol.md specifies the noise for other languages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import torch

from outrider.protocol.messages import SamplingParams
from outrider.sampling.tensors import Staged, Staging, argmax, fetch, on, triton_works

# SplitMix64's constants as signed integers, since torch has no full uint64 arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
# The number of random numbers computed at once; it bounds the memory for a large vocabulary.
_NOISE_BLOCK = 2**24
# Truncation first looks at `_CANDIDATES` tokens of a row, and sorts the whole row only if they do
# not suffice. The nucleus of a peaked row has a few dozen tokens.
_CANDIDATES = 1024


def coupled_exponentials(keys_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return standard exponential numbers -log(u), float64 [R, V].

    Minus their logarithm is Gumbel noise. u comes from output number `token` of SplitMix64 seeded
    with the row's key (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014): the output's top 52 bits plus a half, times 2^-52. Float64 holds u exactly, and u
    lies in [2^-53, 1 - 2^-53], so every exponential number is positive and finite. With 53 random
    bits the largest u would round to 1.
    """
    steps_V = torch.arange(1, vocab_size + 1, device=keys_R.device).mul_(_GOLDEN)
    state = steps_V + keys_R.unsqueeze(-1)
    for shift, factor in zip((30, 27), _MIX, strict=True):
        state.bitwise_xor_((state >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    state.bitwise_xor_((state >> 31).bitwise_and_(2**33 - 1))
    bits = (state >> 12).bitwise_and_(2**52 - 1)
    return bits.double().add_(0.5).mul_(2.0**-52).log_().neg_()


def coupled_sample(probs_RV: torch.Tensor, keys_R: torch.Tensor) -> torch.Tensor:
    """Sample a token for each row, int64 [R]: argmax of log(probability) + Gumbel noise.

    The method is the Gumbel-max coupling of arXiv 2408.07978, computed as argmax(probability /
    exponential), which saves a logarithm. Two parties with the same keys draw the same token with
    probability at least (1 - TV) / (1 + TV), where TV is the total variation distance of their
    distributions. A token of probability 0 is never drawn.
    """
    if triton_works(probs_RV.device):
        from outrider.sampling import noise_kernel

        return noise_kernel.coupled_sample(probs_RV, keys_R)
    vocab_size = probs_RV.shape[-1]
    row_count = max(1, _NOISE_BLOCK // vocab_size)
    blocks = torch.split(probs_RV, row_count)
    tokens = []
    for probs, keys in zip(blocks, torch.split(keys_R, row_count), strict=True):
        scores = probs.double() / coupled_exponentials(keys, vocab_size)
        tokens.append(argmax(scores))
    return torch.cat(tokens)


def coupled_top(
    probs_RV: torch.Tensor, keys_R: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank tokens in the order in which `coupled_sample` prefers them; return tokens and shares.

    Tokens are int64 [R, K], and shares float64 [R, K]. K is `count`, or V if that is less. A
    token's share is its part of the sum of probability / exponential over all tokens: the softmax
    of the perturbed logits. The share estimates the probability that another party with these keys
    and similar probabilities draws the token.
    """
    size = probs_RV.shape[-1]
    tokens, shares = [], []
    row_count = max(1, _NOISE_BLOCK // size)
    for probs, keys in zip(
        torch.split(probs_RV, row_count), torch.split(keys_R, row_count), strict=True
    ):
        scores = probs.double() / coupled_exponentials(keys, size)
        top = scores.topk(min(count, size))
        tokens.append(top.indices)
        shares.append(top.values / scores.sum(-1, keepdim=True))
    return torch.cat(tokens), torch.cat(shares)


def target_probs(logits_RV: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Return probabilities [R, V] of rows with these settings, as `TargetProbs` computes them."""
    staging = Staging(logits_RV.device)
    settings = TargetProbs(samplings, staging)
    staging.send()
    whole: dict[int, list[int]] = {}
    while True:
        probs_RV, sufficed = settings.probs(logits_RV, whole)
        if not note_short(whole, zip(sufficed, fetch(list(sufficed.values())), strict=True)):
            return probs_RV


class TargetProbs:
    """The sampling settings of R rows, laid out before the logits exist."""

    def __init__(self, samplings: Sequence[SamplingParams], staging: Staging) -> None:
        """`samplings` has each row's settings."""
        self._temperatures: Staged | None = None
        temperatures = [s.temperature or 1.0 for s in samplings]
        if any(t != 1.0 for t in temperatures):
            self._temperatures = _column(temperatures, staging)
        sampled = [(i, s) for i, s in enumerate(samplings) if not s.greedy]
        counts = [(i, s.top_k) for i, s in sampled if s.top_k > 0]
        top_k = partial(_top_k, max((count for _, count in counts), default=0))
        numbers: list[tuple[_Truncate | _Candidates, Sequence[tuple[int, float]]]] = [
            (top_k, counts),
            (_Candidates(_nucleus), [(i, s.top_p) for i, s in sampled if s.top_p < 1]),
            (_min_p, [(i, s.min_p) for i, s in sampled if s.min_p > 0]),
            (_Candidates(_typical_set), [(i, s.typical_p) for i, s in sampled if s.typical_p < 1]),
        ]
        self._steps = [
            _Step.of(truncate, pairs, len(samplings), staging)
            for truncate, pairs in numbers
            if pairs
        ]

    def probs(
        self, logits_RV: torch.Tensor, whole: Mapping[int, Sequence[int]]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Return probabilities [R, V] after temperature and truncation.

        The steps are temperature, top-k, top-p, min-p and typical-p, in this order. The order and
        the treatment of ties are as in transformers' logits processors. A greedy row (temperature
        0) gets its plain softmax; the caller takes the row's token, the argmax, from the logits.
        Each step runs only for rows that use it.

        Top-p and typical-p look at only `_CANDIDATES` tokens of a row. `whole` maps a step's number
        to those of the step's rows, counted within the step, in which it looks at all tokens. The
        second result maps the number of each of these two steps to a bool for each of its rows:
        True if the candidates sufficed. If they did not suffice for a row outside `whole`, the
        probabilities are wrong, so the caller calls again with the rows that `note_short` adds to
        `whole`.
        """
        if self._temperatures is not None:
            logits_RV = logits_RV / self._temperatures.tensor
        sufficed: dict[int, torch.Tensor] = {}
        for number, step in enumerate(self._steps):
            logits_RV, enough_R = step.apply(logits_RV, whole.get(number, ()))
            if enough_R is not None:
                sufficed[number] = enough_R
        return logits_RV.softmax(-1), sufficed


def note_short(whole: dict[int, list[int]], sufficed: Iterable[tuple[int, np.ndarray]]) -> bool:
    """Add to `whole` the rows whose candidates did not suffice; return True if any row is new.

    A row that is already in `whole` may be short of candidates again; it does not count as new.
    """
    are_new = False
    for step, enough_R in sufficed:
        short = np.flatnonzero(enough_R == 0).tolist()
        known = whole.setdefault(step, [])
        new = sorted(set(short).difference(known))
        known += new
        are_new = are_new or bool(new)
    return are_new


_Truncate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Truncates logits [R, V] with each row's setting [R, 1]."""
_Keep = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Truncates logits [R, V] with each row's setting [R, 1], looking at the given number of tokens in
each row. Also returns whether this number sufficed, bool [R]."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """A truncation that looks at `_CANDIDATES` tokens of most rows, and at all tokens of a few."""

    keep: _Keep

    def truncate(
        self, logits_RV: torch.Tensor, settings_R1: torch.Tensor, whole: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return truncated logits, and whether each row's candidates sufficed.

        The second result is None if the vocabulary has at most `_CANDIDATES` tokens.
        """
        size = logits_RV.shape[-1]
        if size <= _CANDIDATES:
            return self.keep(logits_RV, settings_R1, size)[0], None
        kept_RV, enough_R = self.keep(logits_RV, settings_R1, _CANDIDATES)
        if whole:
            rows = on(logits_RV.device, whole, torch.long)
            kept_RV[rows], _ = self.keep(logits_RV[rows], settings_R1[rows], size)
        return kept_RV, enough_R


@dataclass(frozen=True, slots=True)
class _Step:
    """A truncation that applies to some rows."""

    truncate: _Truncate | _Candidates
    rows: Staged | None
    """The rows; None for all."""
    column: Staged
    """The setting of each of these rows, as a column."""

    @classmethod
    def of(
        cls,
        truncate: _Truncate | _Candidates,
        settings: Sequence[tuple[int, float]],
        row_count: int,
        staging: Staging,
    ) -> Self:
        """Return the step for some of `row_count` rows.

        `settings` has each row's number and setting.
        """
        rows, values = zip(*settings, strict=True)
        staged = None
        if len(rows) < row_count:
            staged = staging.add(rows, np.int64)
        return cls(truncate, staged, _column(values, staging))

    def apply(
        self, logits_RV: torch.Tensor, whole: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return all rows' logits, with the step's rows truncated.

        The second result is as in `_Candidates.truncate`.
        """
        rows = self.rows
        some_RV = logits_RV if rows is None else logits_RV[rows.tensor]
        enough_R: torch.Tensor | None = None
        if isinstance(self.truncate, _Candidates):
            some_RV, enough_R = self.truncate.truncate(some_RV, self.column.tensor, whole)
        else:
            some_RV = self.truncate(some_RV, self.column.tensor)
        if rows is not None:
            some_RV = logits_RV.index_copy(0, rows.tensor, some_RV)
        return some_RV, enough_R


def _column(values: Sequence[float], staging: Staging) -> Staged:
    return staging.add(np.array(values, np.float32)[:, np.newaxis])


def _top_k(most: int, logits_RV: torch.Tensor, counts_R1: torch.Tensor) -> torch.Tensor:
    """Keep the k likeliest tokens, and ties with the last of them; `most` is the largest k."""
    size = logits_RV.shape[-1]
    counts_R1 = counts_R1.long().clamp(max=size)
    kth = logits_RV.topk(min(most, size)).values.gather(-1, counts_R1 - 1)
    return logits_RV.masked_fill(logits_RV < kth, -torch.inf)


def _min_p(logits_RV: torch.Tensor, shares_R1: torch.Tensor) -> torch.Tensor:
    """Keep tokens with at least `min_p` times the likeliest token's probability."""
    probs = logits_RV.softmax(-1)
    return logits_RV.masked_fill(probs < shares_R1 * probs.amax(-1, keepdim=True), -torch.inf)


def _nucleus(
    logits_RV: torch.Tensor, mass_R1: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [R, V] with -inf outside of the nucleus.

    The nucleus has the likeliest tokens up to a probability mass (Holtzman et al., arXiv
    1904.09751); it is looked for among the `count` likeliest tokens. If tokens tie at its edge, the
    lowest ids stay. Also returns whether `count` tokens were enough, bool [R].
    """
    ordered, ids = _likeliest(logits_RV, count)
    probs = logits_RV.softmax(-1).gather(-1, ids)
    drop = probs.cumsum(-1) - probs >= mass_R1
    drop[:, 0] = False
    edge_R = ordered.masked_fill(drop, torch.inf).amin(-1)
    kept = ordered.masked_fill(drop, -torch.inf)
    kept_RV = torch.full_like(logits_RV, -torch.inf).scatter_(-1, ids, kept)
    # If the nucleus ends in a tie with the last candidate, tokens outside the candidates may tie
    # too, and the lowest ids of all of them would have to stay.
    return kept_RV, drop[:, -1] & (edge_R > ordered[:, -1])


def _likeliest(logits_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and ids [R, count] of the likeliest tokens in order.

    Among equal logits, lower ids come first.
    """
    if count == logits_RV.shape[-1]:
        return logits_RV.sort(dim=-1, descending=True, stable=True)
    ids = logits_RV.topk(count, sorted=False).indices.sort(-1).values
    ordered, order = logits_RV.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(-1, order)


def _typical_set(
    logits_RV: torch.Tensor, mass_R1: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `_nucleus`, for locally typical sampling (Meister et al., arXiv 2202.00666).

    This sampling takes the tokens whose surprise is closest to the entropy. Tokens that tie with
    the last of them stay too.
    """
    log_probs = logits_RV.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(log_probs * probs).nansum(-1, keepdim=True)
    distance = (-log_probs - entropy).abs()
    nearest, ids = distance.topk(count, largest=False)
    cumulative = probs.gather(-1, ids).cumsum(-1)
    last = (cumulative < mass_R1).sum(-1, keepdim=True).clamp(max=count - 1)
    kept_RV = logits_RV.masked_fill(distance > nearest.gather(-1, last), -torch.inf)
    return kept_RV, cumulative[:, -1] >= mass_R1[:, 0]


def inverse_cdf(weights_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """Return each row's token at the fraction `uniform_R` of its cumulative weights, int64 [R].

    Weights need not be normalised. The weights are summed in float64, because with a vocabulary of
    150k, float32 sums would shift the tail. A token of weight 0 is never returned.
    """
    cumulative = weights_RV.cumsum(-1, dtype=torch.float64)
    # `uniform_R` is at most 1 - 2^-53, so the product never rounds up to the total, which would
    # select a token after the last token with weight.
    point = uniform_R.to(torch.float64).unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)
