"""Accepts or rejects draft tokens, for a whole batch at once.

Knows logits, drafts and noise; not sequences, pages or streams.

The rules GREEDY (at temperature 0) and COUPLED (above) draw the target's own token at every
position, with noise that depends on seed and position alone. They accept a draft token that equals
it. Nothing of the draft enters the output, so a seed gives the same text with any drafter. The
rules for sampled drafts of trusted drafters, and the lossy ones, are in
`verifier_svc.verification.rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.protocol.messages import AcceptanceRule, SpeculationOptions
from outrider.sampling.logits import adjust
from outrider.sampling.noise import Purpose
from outrider.sampling.sampler import coupled_sample, inverse_cdf, target_probs
from outrider.sampling.tensors import on
from verifier_svc.verification.draft import NO_TOKEN, NOT_FINITE, AcceptResult, Draft
from verifier_svc.verification.rows import Rows, tree_result
from verifier_svc.verification.rules.lossy import LOSSY_RULES
from verifier_svc.verification.rules.sampled import SAMPLED_RULES, SparseDrafts

# Larger logits overflow float32 when divided by the lowest temperature that samples, 1e-5.
_LARGEST_LOGIT = 1e33


def accept(
    logits_RV: torch.Tensor, drafts: Sequence[Draft], synthetic_rate: float | None = None
) -> list[AcceptResult]:
    """Accept or reject every draft of a batch in a few tensor operations and one copy back.

    `logits_RV` are the model's, float32, with R = sum of (draft length + 1), sequence by sequence.
    With a `synthetic_rate`, draft tokens are accepted at that rate whatever the target says, which
    only benchmarks need; of a tree, first children alone. Raises ValueError for a tree that was
    sampled.
    """
    if not drafts:
        return []
    raw_RV = logits_RV
    logits_RV = adjust(raw_RV, [draft.context for draft in drafts])
    tokens_R = logits_RV.argmax(-1)
    # The argmax of a row that holds NaN is the NaN.
    peaks_R = logits_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1)
    raw_peaks_R = peaks_R
    if logits_RV is not raw_RV:
        raw_peaks_R = raw_RV.amax(-1)
    if synthetic_rate is None and not any(draft.needs_probs for draft in drafts):
        return _greedy(_with_errors(tokens_R, peaks_R, raw_peaks_R).tolist(), drafts)
    rows = Rows(drafts, logits_RV.device)
    matches_R = _accept_rows(logits_RV, rows, tokens_R)
    if synthetic_rate is not None:
        matches_R = rows.tensor(rows.uniform(Purpose.ACCEPT) < synthetic_rate) & rows.drafted_R
    tokens_R = _with_errors(tokens_R, peaks_R, raw_peaks_R)
    matches_R &= tokens_R >= 0
    tokens, matches = torch.stack([tokens_R, matches_R]).cpu().numpy()
    return rows.results(tokens, matches, has_siblings=synthetic_rate is None)


def _with_errors(
    tokens_R: torch.Tensor, peaks_R: torch.Tensor, raw_peaks_R: torch.Tensor
) -> torch.Tensor:
    """The tokens, with NOT_FINITE or NO_TOKEN for rows that have none.

    `peaks_R` are the rows' largest logits after the request's settings are applied; `raw_peaks_R`
    those before, the same tensor if no row changed. A row with a NaN or +inf has it as its largest
    logit, and a row of nothing but -inf has -inf. Single -inf entries are legal.
    """
    finite_R = raw_peaks_R.abs() < _LARGEST_LOGIT
    if raw_peaks_R is not peaks_R:
        tokens_R = torch.where(peaks_R.isneginf(), NO_TOKEN, tokens_R)
    return torch.where(finite_R, tokens_R, NOT_FINITE)


def _greedy(tokens: list[int], drafts: Sequence[Draft]) -> list[AcceptResult]:
    """Results if every draft's rule is GREEDY; `tokens` has the target's likeliest of each row.

    Runs on the host, which takes less time than laying out tensors.
    """
    results = []
    first = 0
    for draft in drafts:
        end = first
        if draft.context.parents:
            own = tokens[first : first + draft.context.row_count]
            results.append(tree_result(draft.context, own, own))
        else:
            for token in draft.context.drafted:
                if token != tokens[end]:
                    break
                end += 1
            results.append(AcceptResult(end - first, tokens[end]))
        first += len(draft.context.drafted) + 1
    return results


def _accept_rows(logits_RV: torch.Tensor, rows: Rows, tokens_R: torch.Tensor) -> torch.Tensor:
    """Which rows' draft tokens are accepted, bool [R].

    `tokens_R` comes in as the rows' argmax, and goes out as the target's own tokens.
    """
    needed = rows.where(lambda draft: draft.needs_probs)
    if not needed:
        return tokens_R == rows.draft_R
    at_N = rows.tensor(np.array(needed))
    settings = [rows.of_row[row].context.sampling for row in needed]
    logits_NV = logits_RV
    if len(needed) < len(logits_RV):
        logits_NV = logits_RV[at_N]
    probs_NV = target_probs(logits_NV, settings)
    # NaN is in rows that `_with_errors` marks.
    probs_NV = probs_NV.nan_to_num(0.0)
    sampled_N = coupled_sample(probs_NV, rows.keys(needed))
    greedy_N = rows.tensor(np.array([sampling.greedy for sampling in settings]))
    tokens_R[at_N] = torch.where(greedy_N, tokens_R[at_N], sampled_N)
    matches_R = tokens_R == rows.draft_R
    probs = _Probs(probs_NV, {row: n for n, row in enumerate(needed)})
    for rule in {draft.rule for draft in rows.drafts}:
        if rule in SAMPLED_RULES:
            _accept_sampled(rule, probs, rows, tokens_R, matches_R)
        elif rule in LOSSY_RULES:
            _accept_lossy(rule, probs, rows, matches_R)
    return matches_R


@dataclass(frozen=True, slots=True)
class _Probs:
    """Target probabilities of some rows of the batch."""

    values_NV: torch.Tensor
    index: dict[int, int]
    """The place n of each of these rows."""

    def at(self, rows: Sequence[int]) -> torch.Tensor:
        """Those of `rows`, [len(rows), V]."""
        return self.values_NV[on(self.values_NV.device, [self.index[row] for row in rows])]


def _accept_sampled(
    rule: AcceptanceRule,
    probs: _Probs,
    rows: Rows,
    tokens_R: torch.Tensor,
    matches_R: torch.Tensor,
) -> None:
    """Overwrite the rows of sampled drafts.

    If a draft is not accepted whole, draw the next token from the residual.
    """
    picked = [
        (first, d)
        for first, d in rows
        if d.rule is rule and d.distributions and not d.context.sampling.greedy
    ]
    if not picked:
        return
    sampled = _Sampled(picked, probs, rows)
    prefixes = SAMPLED_RULES[rule](sampled.drafts)
    accepted_B = prefixes.accepted_B
    lengths_B = sampled.drafts.lengths_B
    of_draft_S, place_S = sampled.places
    matches_R[sampled.rows_S] = place_S < accepted_B[of_draft_S]
    # A draft that is accepted whole keeps the bonus token of its last row.
    short = (accepted_B < lengths_B).nonzero().squeeze(-1)
    if len(short):
        end_R = sampled.first_B[short] + accepted_B[short]
        residual = sampled.residual(short, accepted_B[short], prefixes.scale_B[short])
        tokens_R[end_R] = inverse_cdf(residual, rows.tensor(rows.uniform(Purpose.RECOVER))[end_R])


class _Sampled:
    """Sampled drafts laid out for a rule.

    B drafts of at most K tokens, S tokens in all, each drawn from at most E alternatives.
    """

    def __init__(self, picked: Sequence[tuple[int, Draft]], probs: _Probs, rows: Rows) -> None:
        if any(draft.context.parents for _, draft in picked):
            raise ValueError("a sampled draft must be a chain")
        lengths = [len(draft.context.drafted) for _, draft in picked]
        flat = [
            row
            for (first, _), n in zip(picked, lengths, strict=True)
            for row in range(first, first + n)
        ]
        self.rows_S = rows.tensor(np.array(flat))
        self.first_B = rows.tensor(np.array([first for first, _ in picked]))
        # Indices are computed on the host: those of a mask on the device would need a round trip.
        real_BK = np.arange(max(lengths)) < np.array(lengths)[:, None]
        self._shape = real_BK.shape
        self.places = tuple(rows.tensor(index) for index in np.nonzero(real_BK))
        self._start_B = rows.tensor(np.cumsum([0, *lengths[:-1]]))
        self._target_SV = probs.at(flat).double()
        self._ids_BKE, self._draft_BKE = rows.padded_distributions(
            [draft for _, draft in picked], max(lengths)
        )
        own_S = rows.draft_R[self.rows_S].unsqueeze(-1)
        ids_SE = self._ids_BKE[self.places]
        draft_SE = self._draft_BKE[self.places]
        # Padding must have probability 0, although its id 0 may have some.
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
        """The values [S, ...] as [B, K, ...], padded with zeros."""
        shape = (*self._shape, *values_S.shape[1:])
        out = torch.zeros(shape, dtype=values_S.dtype, device=values_S.device)
        out[self.places] = values_S
        return out

    def residual(self, which: torch.Tensor, cut: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """max(0, scale * target - draft) at position `cut` of drafts `which`, [len(which), V]."""
        target = self._target_SV[self._start_B[which] + cut]
        left = target * scale.unsqueeze(-1)
        left.scatter_add_(-1, self._ids_BKE[which, cut], -self._draft_BKE[which, cut]).clamp_(min=0)
        # Equal distributions leave no residual. Then only rounding can reject a token, and the
        # target itself is the right distribution.
        return torch.where(left.sum(-1, keepdim=True) > 0, left, target)


def _accept_lossy(rule: AcceptanceRule, probs: _Probs, rows: Rows, matches_R: torch.Tensor) -> None:
    """Accept the tokens that the lossy rule allows, besides those that the exact rule accepts."""
    flat: list[int] = []
    options: list[SpeculationOptions] = []
    for first, draft in rows:
        if draft.rule is rule:
            judged = draft.judged
            if draft.thinking:
                judged = [(row, i) for row, i in judged if draft.thinking[i]]
            flat += [first + row for row, _ in judged]
            options += [draft.options] * len(judged)
    if not flat:
        return
    at = rows.tensor(np.array(flat))
    matches_R[at] |= LOSSY_RULES[rule](probs.at(flat), rows.draft_R[at], options)
