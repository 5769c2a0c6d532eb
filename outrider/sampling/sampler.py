"""From logits to tokens: temperature and truncation for a batch of rows, and counter-based randomness.

Every random number is a pure function of (seed, position, purpose), so the batch a row happens to stand in, preemption and the
order of requests change nothing, and no two purposes ever share noise. What is drawn for draft tokens that may not stand is a
function of the step as well: a rule may look at all of a draft's tokens and coins, so where it says that none of the last ones
stands, they are no longer random. docs/coupling.md specifies the noise for other languages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outrider.messages import SamplingParams
from outrider.sampling.tensors import on, triton_works

# SplitMix64's constants, as the signed integers that torch computes with.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
# Numbers of noise computed at once; bounds the memory that a large vocabulary takes.
_NOISE_BLOCK = 2**24
# Tokens of a row that are looked at before all are sorted. Nuclei of peaked rows have a few dozen.
_CANDIDATES = 1024


def coupled_exponentials(keys_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard exponential numbers, float64 [R, V]: -log(u) of output number `token` of SplitMix64 seeded with the row's key.

    SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. Its top 52 bits and a half
    make u, which float64 holds exactly: it lies between 2^-53 and 1 - 2^-53, both included, so every number is positive and
    finite. With 53 bits the largest would round to u = 1. -log(-log(u)) would be Gumbel noise.
    """
    state = torch.arange(1, vocab_size + 1, device=keys_R.device).mul_(_GOLDEN) + keys_R.unsqueeze(
        -1
    )
    for shift, factor in zip((30, 27), _MIX, strict=True):
        state.bitwise_xor_((state >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    state.bitwise_xor_((state >> 31).bitwise_and_(2**33 - 1))
    bits = (state >> 12).bitwise_and_(2**52 - 1)
    return bits.double().add_(0.5).mul_(2.0**-52).log_().neg_()


def coupled_sample(probs_RV: torch.Tensor, keys_R: torch.Tensor) -> torch.Tensor:
    """A token for each row, int64 [R]: argmax of log(probability) + Gumbel noise (Gumbel-max; coupling as in arXiv 2408.07978).

    Computed as the race argmax(probability / exponential), the same without a second logarithm. Two parties with the same keys
    and close probabilities draw the same token most of the time: with total variation TV at least (1 - TV) / (1 + TV) of it. A
    token of probability 0 never wins.
    """
    if triton_works(probs_RV.device):
        from outrider.sampling import noise_kernel

        return noise_kernel.coupled_sample(probs_RV, keys_R)
    count = max(1, _NOISE_BLOCK // probs_RV.shape[-1])
    blocks = [
        (
            probs_RV[i : i + count].double()
            / coupled_exponentials(keys_R[i : i + count], probs_RV.shape[-1])
        ).argmax(-1)
        for i in range(0, len(probs_RV), count)
    ]
    return torch.cat(blocks)


def target_probs(logits_RV: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Probabilities [R, V] after temperature, top-k (0 is off), top-p, min-p and typical-p, each row with its own settings.

    The order, and ties at an edge, are those of transformers' logits processors. Rows with temperature 0 come back as if it were
    1 and nothing else set; their token is the argmax, which the caller takes from the logits. Rows pay only for what they ask.
    """
    temperatures = [s.temperature or 1.0 for s in samplings]
    if any(t != 1.0 for t in temperatures):
        logits_RV = logits_RV / on(logits_RV.device, temperatures, logits_RV.dtype).unsqueeze(-1)
    logits_RV = _replaced(logits_RV, samplings, lambda s: s.top_k > 0, _top_k)
    logits_RV = _replaced(logits_RV, samplings, lambda s: s.top_p < 1, _top_p)
    logits_RV = _replaced(logits_RV, samplings, lambda s: s.min_p > 0, _min_p)
    logits_RV = _replaced(logits_RV, samplings, lambda s: s.typical_p < 1, _typical)
    return logits_RV.softmax(-1)


def _replaced(
    logits_RV: torch.Tensor,
    samplings: Sequence[SamplingParams],
    wants: Callable[[SamplingParams], bool],
    truncate: Callable[[torch.Tensor, Sequence[SamplingParams]], torch.Tensor],
) -> torch.Tensor:
    """A copy in which the rows that want it are truncated."""
    rows = [i for i, s in enumerate(samplings) if not s.greedy and wants(s)]
    if not rows:
        return logits_RV
    if len(rows) == len(samplings):
        return truncate(logits_RV, samplings)
    index = on(logits_RV.device, rows)
    return logits_RV.index_copy(0, index, truncate(logits_RV[index], [samplings[i] for i in rows]))


def _top_k(logits_RV: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Keep the k likeliest, and whatever ties with the last of them."""
    counts = [min(s.top_k, logits_RV.shape[-1]) for s in samplings]
    kth = logits_RV.topk(max(counts)).values.gather(-1, _column(logits_RV, counts) - 1)
    return logits_RV.masked_fill(logits_RV < kth, -torch.inf)


def _top_p(logits_RV: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Nucleus sampling (Holtzman et al., arXiv 1904.09751): keep the likeliest up to a mass, the lowest ids of ties at its edge."""
    return _from_candidates(_nucleus, logits_RV, _column(logits_RV, [s.top_p for s in samplings]))


def _min_p(logits_RV: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Keep what has at least this share of the likeliest token's probability."""
    probs = logits_RV.softmax(-1)
    least = _column(logits_RV, [s.min_p for s in samplings]) * probs.amax(-1, keepdim=True)
    return logits_RV.masked_fill(probs < least, -torch.inf)


def _typical(logits_RV: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Locally typical sampling (Meister et al., arXiv 2202.00666): keep what is about as surprising as expected, up to a mass."""
    return _from_candidates(
        _typical_set, logits_RV, _column(logits_RV, [s.typical_p for s in samplings])
    )


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return on(like.device, values).unsqueeze(-1)


def _from_candidates(
    keep: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
    logits_RV: torch.Tensor,
    mass_R1: torch.Tensor,
) -> torch.Tensor:
    """What `keep` leaves of each row, from its first candidates where they are enough, else from all of its tokens."""
    size = logits_RV.shape[-1]
    if size <= _CANDIDATES:
        return keep(logits_RV, mass_R1, size)[0]
    kept_RV, enough_R = keep(logits_RV, mass_R1, _CANDIDATES)
    # On a GPU this waits for the device, once a batch, so as not to sort whole rows of which hardly any needs it.
    rows = (~enough_R).nonzero().squeeze(-1)
    if len(rows):
        kept_RV[rows], _ = keep(logits_RV[rows], mass_R1[rows], size)
    return kept_RV


def _nucleus(
    logits_RV: torch.Tensor, mass_R1: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens' logits up to a mass, else -inf, seen from the first `count`; whether these were enough, bool [R]."""
    ordered, ids = _likeliest(logits_RV, count)
    probs = logits_RV.softmax(-1).gather(-1, ids)
    drop = probs.cumsum(-1) - probs >= mass_R1
    drop[:, 0] = False
    edge_R = ordered.masked_fill(drop, torch.inf).amin(-1)
    kept_RV = torch.full_like(logits_RV, -torch.inf).scatter_(
        -1, ids, ordered.masked_fill(drop, -torch.inf)
    )
    # What ties with the last candidate may be no candidate, and yet the one to keep.
    return kept_RV, drop[:, -1] & (edge_R > ordered[:, -1])


def _likeliest(logits_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and ids of the `count` likeliest tokens in order, those with the lowest ids first among ties."""
    if count == logits_RV.shape[-1]:
        return logits_RV.sort(dim=-1, descending=True, stable=True)
    ids = logits_RV.topk(count, sorted=False).indices.sort(-1).values
    ordered, order = logits_RV.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(-1, order)


def _typical_set(
    logits_RV: torch.Tensor, mass_R1: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_nucleus`, of the tokens whose surprise is nearest to the expected one; whatever ties at the edge stays."""
    log_probs = logits_RV.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(log_probs * probs).nansum(-1, keepdim=True)
    distance = (-log_probs - entropy).abs()
    nearest, ids = distance.topk(count, largest=False)
    cumulative = probs.gather(-1, ids).cumsum(-1)
    last = (cumulative < mass_R1).sum(-1, keepdim=True).clamp(max=count - 1)
    return logits_RV.masked_fill(distance > nearest.gather(-1, last), -torch.inf), cumulative[
        :, -1
    ] >= mass_R1[:, 0]


def inverse_cdf(weights_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """The token of each row at `uniform_R` of its cumulative weights, int64 [R]; weights need not be normalised.

    Summed in float64: at a vocabulary of 150k, float32 sums would shift the tail. A token of weight 0 is never returned.
    """
    cumulative = weights_RV.cumsum(-1, dtype=torch.float64)
    # At most 1 - 2^-53 of the total, which never rounds up to the total itself, past the last token that has weight.
    point = uniform_R.to(torch.float64).unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)
