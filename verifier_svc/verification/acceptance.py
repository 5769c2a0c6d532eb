"""Which draft tokens stand, for a whole batch at once. Knows logits, drafts and noise; not sequences, pages or streams.

Unless a sampled draft comes from a trusted drafter, the target's own token is drawn at every position, with noise that depends on
seed and position alone, and a draft token stands if it is the same: nothing of the draft enters the output, so a seed gives the
same text with any drafter. That is GREEDY at temperature 0 and COUPLED above. The rules proper are in
`verifier_svc.verification.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from outrider.messages import AcceptanceRule, SparseDistribution, SpeculationOptions
from outrider.sampling.logits import Context, adjust
from outrider.sampling.noise import Purpose, coupled_keys, uniforms
from outrider.sampling.sampler import coupled_sample, inverse_cdf, target_probs
from outrider.sampling.tensors import on
from verifier_svc.verification.rules import block, lossy, token_wise
from verifier_svc.verification.rules.sparse import AcceptedPrefixes, SparseDrafts

_SAMPLED_RULES: dict[AcceptanceRule, Callable[[SparseDrafts], AcceptedPrefixes]] = {
    AcceptanceRule.TOKEN_WISE: token_wise.accept,
    AcceptanceRule.BLOCK: block.accept,
}
NO_TOKEN = -1
"""In place of a token where the request's bans and grammar allow none."""
NOT_FINITE = -2
"""In place of a token where the model's logits hold NaN, +inf, or nothing but -inf."""
_NO_DRAFT = -3
# Divided by the lowest temperature that samples, 1e-5, larger logits overflow float32.
_LARGEST_LOGIT = 1e33


@dataclass(slots=True)
class Draft:
    """One sequence's share of a batch: its logits rows are those after the last committed token and after each draft token.

    `distributions` is empty, or for the rules TOKEN_WISE and BLOCK one for each draft token: what that token was really sampled
    from. `options` holds the lossy rules' settings; `thinking` says for each draft token whether RELAXED may apply to it.
    """

    context: Context
    seed: int
    rule: AcceptanceRule = AcceptanceRule.COUPLED
    distributions: Sequence[SparseDistribution] = ()
    options: SpeculationOptions = field(default_factory=SpeculationOptions)
    thinking: Sequence[bool] = ()
    step: int = 0
    """Drafts of the sequence that were verified before, so that no coin is used twice."""

    @property
    def needs_probs(self) -> bool:
        return not self.context.sampling.greedy or self.rule in (
            AcceptanceRule.TYPICAL,
            AcceptanceRule.RELAXED,
        )


@dataclass(slots=True)
class AcceptResult:
    """How many draft tokens of a sequence were accepted, and the recovered, bonus or plain token that follows them.

    `next_token` is NO_TOKEN when the request's bans and grammar leave none, NOT_FINITE when the model's logits are not numbers.
    """

    accepted_count: int
    next_token: int


def accept(
    logits_RV: torch.Tensor, drafts: Sequence[Draft], synthetic_rate: float | None = None
) -> list[AcceptResult]:
    """Accept or reject every draft of a batch in a few tensor operations and one copy back.

    `logits_RV` is float32 with R = sum of (draft length + 1), sequence by sequence, as the model gave them. With a
    `synthetic_rate` draft tokens stand at that rate whatever the target says, which is of use for benchmarks alone.
    """
    if not drafts:
        return []
    raw_RV, logits_RV = logits_RV, adjust(logits_RV, [draft.context for draft in drafts])
    tokens_R = logits_RV.argmax(-1)
    # The argmax of a row that holds NaN is the NaN.
    peaks_R = logits_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1)
    raw_peaks_R = None if logits_RV is raw_RV else raw_RV.amax(-1)
    if synthetic_rate is None and not any(draft.needs_probs for draft in drafts):
        return _greedy(_with_errors(tokens_R, peaks_R, raw_peaks_R).tolist(), drafts)
    rows = _Rows(drafts, logits_RV.device)
    matches_R = _accept_rows(logits_RV, rows, tokens_R)
    if synthetic_rate is not None:
        matches_R = rows.tensor(rows.uniform(Purpose.ACCEPT) < synthetic_rate) & rows.drafted_R
    tokens_R = _with_errors(tokens_R, peaks_R, raw_peaks_R)
    matches_R &= tokens_R >= 0
    return rows.results(*torch.stack([tokens_R, matches_R]).cpu().numpy())


def _with_errors(
    tokens_R: torch.Tensor, peaks_R: torch.Tensor, raw_peaks_R: torch.Tensor | None
) -> torch.Tensor:
    """The tokens, with NOT_FINITE or NO_TOKEN where a row has none; its largest logit says which.

    `peaks_R` are the largest logits after the request's settings, `raw_peaks_R` those before, None where they are the same. One NaN
    or +inf is its row's largest logit, and so is -inf where there is nothing else; single -inf entries are legal.
    """
    finite_R = (peaks_R if raw_peaks_R is None else raw_peaks_R).abs() < _LARGEST_LOGIT
    if raw_peaks_R is not None:
        tokens_R = torch.where(peaks_R.isneginf(), NO_TOKEN, tokens_R)
    return torch.where(finite_R, tokens_R, NOT_FINITE)


def _greedy(tokens: list[int], drafts: Sequence[Draft]) -> list[AcceptResult]:
    """Results where the target's own token is the likeliest one; done on the host, sooner than tensors would be laid out."""
    results, first = [], 0
    for draft in drafts:
        end = first
        for token in draft.context.drafted:
            if token != tokens[end]:
                break
            end += 1
        results.append(AcceptResult(end - first, tokens[end]))
        first += len(draft.context.drafted) + 1
    return results


def _accept_rows(logits_RV: torch.Tensor, rows: _Rows, tokens_R: torch.Tensor) -> torch.Tensor:
    """Which rows' draft tokens stand, bool [R]; `tokens_R`, the argmax, becomes each row's token."""
    needed = rows.where(lambda draft: draft.needs_probs)
    if not needed:
        return tokens_R == rows.draft_R
    whole = len(needed) == len(logits_RV)
    at_N = rows.tensor(np.array(needed))
    probs_NV = target_probs(
        logits_RV if whole else logits_RV[at_N],
        [rows.of_row[row].context.sampling for row in needed],
    )
    probs_NV = probs_NV.nan_to_num(0.0)  # rows that `_with_errors` marks
    sampled_N = coupled_sample(probs_NV, rows.keys(needed))
    greedy_N = rows.tensor(np.array([rows.of_row[row].context.sampling.greedy for row in needed]))
    tokens_R[at_N] = torch.where(greedy_N, tokens_R[at_N], sampled_N)
    matches_R = tokens_R == rows.draft_R
    probs = _Probs(probs_NV, {row: n for n, row in enumerate(needed)})
    for rule in {draft.rule for draft in rows.drafts}:
        if rule in _SAMPLED_RULES:
            _accept_sampled(_SAMPLED_RULES[rule], rule, probs, rows, tokens_R, matches_R)
        elif rule in (AcceptanceRule.TYPICAL, AcceptanceRule.RELAXED):
            _accept_lossy(rule, probs, rows, matches_R)
    return matches_R


@dataclass(frozen=True, slots=True)
class _Probs:
    """Target probabilities of some rows, and where each row's are."""

    values_NV: torch.Tensor
    index: dict[int, int]

    def at(self, rows: Sequence[int]) -> torch.Tensor:
        return self.values_NV[on(self.values_NV.device, [self.index[row] for row in rows])]


def _accept_sampled(
    accept_prefixes: Callable[[SparseDrafts], AcceptedPrefixes],
    rule: AcceptanceRule,
    probs: _Probs,
    rows: _Rows,
    tokens_R: torch.Tensor,
    matches_R: torch.Tensor,
) -> None:
    """Overwrite the rows of sampled drafts; where one is not accepted whole, the next token is drawn from the residual."""
    picked = [
        (first, d)
        for first, d in rows
        if d.rule is rule and d.distributions and not d.context.sampling.greedy
    ]
    if not picked:
        return
    sampled = _Sampled(picked, probs, rows)
    prefixes = accept_prefixes(sampled.drafts)
    accepted_B, lengths_B = prefixes.accepted_B, sampled.drafts.lengths_B
    of_draft_S, place_S = sampled.places
    matches_R[sampled.rows_S] = place_S < accepted_B[of_draft_S]
    # A draft that is accepted whole keeps the bonus token that its last row has already.
    short = (accepted_B < lengths_B).nonzero().squeeze(-1)
    if len(short):
        end_R = sampled.first_B[short] + accepted_B[short]
        residual = sampled.residual(short, accepted_B[short], prefixes.scale_B[short])
        tokens_R[end_R] = inverse_cdf(residual, rows.tensor(rows.uniform(Purpose.RECOVER))[end_R])


class _Sampled:
    """Sampled drafts laid out for a rule: B drafts of at most K tokens, S tokens in all, each with at most E alternatives."""

    def __init__(self, picked: Sequence[tuple[int, Draft]], probs: _Probs, rows: _Rows) -> None:
        lengths = [len(draft.context.drafted) for _, draft in picked]
        flat = [
            row
            for (first, _), n in zip(picked, lengths, strict=True)
            for row in range(first, first + n)
        ]
        self.rows_S = rows.tensor(np.array(flat))
        self.first_B = rows.tensor(np.array([first for first, _ in picked]))
        # Indices from the host: a mask's own would have to be asked of the device.
        real_BK = np.arange(max(lengths)) < np.array(lengths)[:, None]
        self._shape = real_BK.shape
        self.places = tuple(rows.tensor(index) for index in np.nonzero(real_BK))
        self._start_B = rows.tensor(np.cumsum([0, *lengths[:-1]]))
        self._target_SV = probs.at(flat).double()
        self._ids_BKE, self._draft_BKE = rows.padded_distributions(
            [draft for _, draft in picked], max(lengths)
        )
        own_S = rows.draft_R[self.rows_S].unsqueeze(-1)
        ids_SE, draft_SE = self._ids_BKE[self.places], self._draft_BKE[self.places]
        # Padding has probability 0, whatever the target thinks of its id.
        target_SE = self._target_SV.gather(-1, ids_SE) * (draft_SE > 0)
        self.drafts = SparseDrafts(
            lengths_B=rows.tensor(np.array(lengths)),
            draft_BK=self._spread((draft_SE * (ids_SE == own_S)).sum(-1)),
            target_BK=self._spread(self._target_SV.gather(-1, own_S).squeeze(-1)),
            draft_BKE=self._draft_BKE,
            target_BKE=self._spread(target_SE),
            uniform_BK=self._spread(rows.tensor(rows.uniform(Purpose.ACCEPT)[flat])),
        )

    def _spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """[B, K, ...], padded with zeros."""
        out = torch.zeros(
            *self._shape, *values_S.shape[1:], dtype=values_S.dtype, device=values_S.device
        )
        out[self.places] = values_S
        return out

    def residual(self, which: torch.Tensor, cut: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """max(0, scale * target - draft) at position `cut` of the drafts `which`, [len(which), V]."""
        target = self._target_SV[self._start_B[which] + cut]
        left = target * scale.unsqueeze(-1)
        left.scatter_add_(-1, self._ids_BKE[which, cut], -self._draft_BKE[which, cut]).clamp_(min=0)
        # Equal distributions leave no residual; then nothing can be rejected but by rounding, and the target itself is right.
        return torch.where(left.sum(-1, keepdim=True) > 0, left, target)


def _accept_lossy(
    rule: AcceptanceRule, probs: _Probs, rows: _Rows, matches_R: torch.Tensor
) -> None:
    """Let draft tokens stand that the lossy rule allows; the others go as under the exact rule."""
    flat, options = [], []
    for first, draft in rows:
        if draft.rule is rule:
            allowed = (
                draft.thinking
                if rule is AcceptanceRule.RELAXED
                else [True] * len(draft.context.drafted)
            )
            flat += [first + i for i, yes in enumerate(allowed) if yes]
            options += [draft.options for yes in allowed if yes]
    if not flat:
        return
    at = rows.tensor(np.array(flat))
    probs_NV, draft_N = probs.at(flat), rows.draft_R[at]
    if rule is AcceptanceRule.TYPICAL:
        stands = lossy.typical(
            probs_NV,
            draft_N,
            rows.tensor(np.array([o.typical_epsilon for o in options], np.float32)),
        )
    else:
        topk = rows.tensor(np.array([o.relaxed_topk for o in options]))
        stands = lossy.relaxed(
            probs_NV,
            draft_N,
            topk,
            rows.tensor(np.array([o.relaxed_delta for o in options], np.float32)),
        )
    matches_R[at] |= stands


class _Rows:
    """The batch laid out: R logits rows of B sequences, one after the other. Iterates over (first row, draft)."""

    def __init__(self, drafts: Sequence[Draft], device: torch.device) -> None:
        self.drafts = drafts
        self._device = device
        self._counts_B = np.array([draft.context.row_count for draft in drafts])
        self._first_B = np.cumsum(self._counts_B) - self._counts_B
        # The last row of each sequence has nothing to match.
        drafted = np.array(
            [token for draft in drafts for token in (*draft.context.drafted, _NO_DRAFT)]
        )
        self.draft_R = self.tensor(drafted)
        self.drafted_R = self.tensor(drafted != _NO_DRAFT)

    def __iter__(self) -> Iterator[tuple[int, Draft]]:
        return zip(self._first_B.tolist(), self.drafts, strict=True)

    @cached_property
    def of_row(self) -> list[Draft]:
        """Each row's draft."""
        return [draft for draft in self.drafts for _ in range(draft.context.row_count)]

    def where(self, wanted: Callable[[Draft], bool]) -> list[int]:
        """The rows of the drafts that are wanted."""
        found: list[int] = np.flatnonzero(
            np.repeat([wanted(draft) for draft in self.drafts], self._counts_B)
        ).tolist()
        return found

    def _seeds_and_positions(self) -> tuple[np.ndarray, np.ndarray]:
        seeds: np.ndarray = np.repeat(
            np.array([draft.seed for draft in self.drafts], np.uint64), self._counts_B
        )
        offsets = np.arange(len(seeds)) - np.repeat(self._first_B, self._counts_B)
        return seeds, np.repeat(
            [len(draft.context.tokens) for draft in self.drafts], self._counts_B
        ) + offsets

    def uniform(self, purpose: Purpose) -> np.ndarray:
        """float64 [R], each row's own number for the purpose."""
        steps: np.ndarray = np.repeat([draft.step for draft in self.drafts], self._counts_B)
        return uniforms(*self._seeds_and_positions(), purpose, steps)

    def keys(self, rows: Sequence[int]) -> torch.Tensor:
        """Where the coupled noise of some rows begins."""
        return self.tensor(coupled_keys(*self._seeds_and_positions())[rows])

    def padded_distributions(
        self, drafts: Sequence[Draft], longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and probabilities [B, K, E] of sampled drafts, padded with (id 0, probability 0)."""
        width = max(
            distribution.token_ids.size for draft in drafts for distribution in draft.distributions
        )
        ids = np.zeros((len(drafts), longest, width), np.int64)
        probs = np.zeros((len(drafts), longest, width), np.float64)
        for b, draft in enumerate(drafts):
            for k, distribution in enumerate(draft.distributions):
                ids[b, k, : distribution.token_ids.size] = distribution.token_ids
                probs[b, k, : distribution.token_ids.size] = distribution.probabilities
        return self.tensor(ids), self.tensor(probs)

    def results(self, tokens_R: np.ndarray, matches_R: np.ndarray) -> list[AcceptResult]:
        """Each sequence's accepted tokens end at its first row without a match, whose token is the next one."""
        misses = np.flatnonzero(matches_R == 0)
        end_B = misses[np.searchsorted(misses, self._first_B)]
        return [
            AcceptResult(*pair)
            for pair in zip((end_B - self._first_B).tolist(), tokens_R[end_B].tolist(), strict=True)
        ]

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """On the logits' device."""
        return on(self._device, array)
