"""Accepts or rejects draft tokens, for a whole batch at once.

This module works with logits, drafts and noise, not with sequences, pages or streams.

The rules GREEDY (at temperature 0) and COUPLED (at higher temperatures) are in this file. Both find
the target's own token at every position, and accept a draft token that equals it. For GREEDY this
is the likeliest token; COUPLED draws it with noise that depends only on seed and position. Nothing
of the draft enters the output, so a seed gives the same text with any drafter.

- GREEDY: `_greedy_results` on the host; `_OwnTokens` if another draft of the batch needs
  probabilities.
- COUPLED: `_OwnTokens`.
- TOKEN_WISE and BLOCK, for sampled drafts of trusted drafters: `_SampledDrafts` lays the drafts
  out, and the rules are in `rules/sampled_drafts.py`.
- TYPICAL and RELAXED: `_LossyTokens`, and `rules/lossy.py`.
- SYNTHETIC, for benchmarks: `Acceptance`.

`rule_choice.py` chooses each draft's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.protocol.messages import AcceptanceRule, SpeculationOptions
from outrider.sampling.context import Mask
from outrider.sampling.logits import Adjustments
from outrider.sampling.noise import Purpose
from outrider.sampling.penalties import TokenCounts
from outrider.sampling.sampler import TargetProbs, coupled_sample, inverse_cdf, note_short
from outrider.sampling.tensors import Staged, Staging, argmax, fetch
from verifier_svc.verification.draft import NO_TOKEN, NOT_FINITE, AcceptResult, Draft
from verifier_svc.verification.rows import Rows, tree_result
from verifier_svc.verification.rules.lossy import LOSSY_RULES
from verifier_svc.verification.rules.sampled_drafts import SAMPLED_RULES, SparseDrafts

# Larger logits overflow float32 when they are divided by 1e-5, the lowest sampling temperature.
_LARGEST_LOGIT = 1e33

Beside = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Takes the token that may be committed after each row, int64 [R]; returns tensors that are fetched
with the results."""


class Acceptance:
    """Accepts or rejects every draft of a batch.

    The host lays the batch out without the logits, so a GPU may still compute the forward. One copy
    then goes to the device before the logits are there, and one copy comes back.
    """

    def __init__(
        self,
        drafts: Sequence[Draft],
        staging: Staging,
        counts: TokenCounts,
        synthetic_rates: Sequence[float] = (),
    ) -> None:
        """With `synthetic_rates`, drafts are accepted at these rates whatever the target says.

        A draft's tokens up to position i are all accepted with the probability of rate i. Of a
        tree, only first children are then accepted. Only benchmarks need these rates. `counts` has
        the number of times that each token occurs in the sequences' texts. Raises ValueError for a
        tree that was sampled.
        """
        self._drafts = drafts
        self._is_synthetic = bool(synthetic_rates)
        self._adjustments = Adjustments([draft.context for draft in drafts], staging, counts)
        self._rows: Rows | None = None
        self._own_tokens: _OwnTokens | None = None
        self._synthetic_R: Staged | None = None
        needs_probs = [draft for draft in drafts if draft.needs_probs]
        if not drafts or (not synthetic_rates and not needs_probs):
            return  # every rule is GREEDY and needs only each row's likeliest token
        self._rows = Rows(drafts, staging)
        if needs_probs:
            self._own_tokens = _OwnTokens(self._rows, staging)
        if synthetic_rates:
            positions_R = np.minimum(self._rows.depths, len(synthetic_rates) - 1)
            chances_R = _chances(synthetic_rates)[positions_R]
            self._synthetic_R = staging.add(self._rows.uniform(Purpose.ACCEPT) < chances_R)

    def results(
        self,
        logits_RV: torch.Tensor,
        masks: Sequence[Mask | None],
        beside: Beside | None = None,
    ) -> tuple[list[AcceptResult], list[np.ndarray]]:
        """Return each draft's result, and the tensors of `beside`, with one wait for the device.

        `logits_RV` are the model's logits in float32, sequence by sequence. R is the sum of (draft
        length + 1) over all sequences. `masks` has the grammar mask of each sequence, as in
        `Context`. If truncation has to sort whole rows, the method waits for the device again.
        """
        if not self._drafts and beside is None:
            return [], []
        whole: dict[int, list[int]] = {}
        while True:
            decided = self._decide(logits_RV, masks, whole)
            results = decided.results
            besides = () if beside is None else beside(decided.committed_R)
            found = fetch([*results, *decided.sufficed.values(), *besides])
            sufficed = zip(decided.sufficed, found[len(results) :], strict=False)
            if not note_short(whole, sufficed):
                return self._read(found), found[len(found) - len(besides) :]

    def _read(self, found: Sequence[np.ndarray]) -> list[AcceptResult]:
        """Return the results; `found` begins with the tensors of `_Decided.results`."""
        if self._rows is None:
            return _greedy_results(found[0].tolist(), self._drafts)
        return self._rows.results(found[0], found[1], has_siblings=not self._is_synthetic)

    def _decide(
        self,
        logits_RV: torch.Tensor,
        masks: Sequence[Mask | None],
        whole: Mapping[int, Sequence[int]],
    ) -> _Decided:
        raw_RV = logits_RV
        logits_RV = self._adjustments.apply(raw_RV, masks)
        tokens_R = argmax(logits_RV)
        # The argmax of a row that holds NaN is the NaN.
        peaks_R = logits_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1)
        raw_peaks_R = peaks_R
        if logits_RV is not raw_RV:
            raw_peaks_R = raw_RV.amax(-1)
        rows = self._rows
        if rows is None:
            return _Decided(_with_errors(tokens_R, peaks_R, raw_peaks_R))
        sufficed: dict[int, torch.Tensor] = {}
        if self._own_tokens is None:
            matches_R = tokens_R == rows.draft_R.tensor
        else:
            matches_R, sufficed = self._own_tokens.accept(logits_RV, tokens_R, whole)
        if self._synthetic_R is not None:
            matches_R = self._synthetic_R.tensor & rows.drafted_R.tensor
        tokens_R = _with_errors(tokens_R, peaks_R, raw_peaks_R)
        matches_R &= tokens_R >= 0
        return _Decided(tokens_R, matches_R, rows.draft_R.tensor, sufficed)


@dataclass(frozen=True, slots=True)
class _Decided:
    """The device's decisions about R rows."""

    tokens_R: torch.Tensor
    """The target's own tokens; negative for a row that has none."""
    matches_R: torch.Tensor | None = None
    """For each row, whether its draft token is accepted. None if the only rule is equality with
    `tokens_R`, which the host then checks."""
    draft_R: torch.Tensor | None = None
    sufficed: dict[int, torch.Tensor] = field(default_factory=dict)
    """Like the second result of `TargetProbs.probs`."""

    @property
    def results(self) -> list[torch.Tensor]:
        """The tensors that hold the results."""
        return [self.tokens_R] if self.matches_R is None else [self.tokens_R, self.matches_R]

    @property
    def committed_R(self) -> torch.Tensor:
        """The token that follows each row if the row is committed; 0 for a row without a token."""
        if self.matches_R is None or self.draft_R is None:
            return self.tokens_R.clamp(min=0)
        return torch.where(self.matches_R, self.draft_R, self.tokens_R).clamp(min=0)


def _with_errors(
    tokens_R: torch.Tensor, peaks_R: torch.Tensor, raw_peaks_R: torch.Tensor
) -> torch.Tensor:
    """Return the tokens, with NOT_FINITE or NO_TOKEN for rows that have no token.

    `peaks_R` are the rows' largest logits after the request's settings are applied. `raw_peaks_R`
    are the largest logits before that; it is the same tensor as `peaks_R` if no row changed. A row
    with a NaN or +inf has it as its largest logit, and a row of nothing but -inf has -inf. Single
    -inf entries are legal.
    """
    finite_R = raw_peaks_R.abs() < _LARGEST_LOGIT
    if raw_peaks_R is not peaks_R:
        tokens_R = torch.where(peaks_R.isneginf(), NO_TOKEN, tokens_R)
    return torch.where(finite_R, tokens_R, NOT_FINITE)


def _greedy_results(tokens: list[int], drafts: Sequence[Draft]) -> list[AcceptResult]:
    """Return the results if every draft's rule is GREEDY; `tokens` has each row's likeliest token.

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


class _OwnTokens:
    """Draws the target's own tokens: the rules GREEDY and COUPLED.

    Afterwards the object applies the rules that look at probabilities, each rule to its own drafts.
    """

    def __init__(self, rows: Rows, staging: Staging) -> None:
        needed = rows.where(lambda draft: draft.needs_probs)
        settings = [rows.of_row[row].context.sampling for row in needed]
        self._draft_R = rows.draft_R
        self._at_N: Staged | None = None
        if len(needed) < len(rows.of_row):
            self._at_N = staging.add(needed, np.int64)
        self._probs = TargetProbs(settings, staging)
        self._keys_N = staging.add(rows.keys(needed))
        self._greedy_N: Staged | None = None
        if any(sampling.greedy for sampling in settings):
            self._greedy_N = staging.add([sampling.greedy for sampling in settings])
        places = {row: n for n, row in enumerate(needed)}
        self._judges: list[_SampledDrafts | _LossyTokens] = []
        for rule in {draft.rule for draft in rows.drafts}:
            if rule in SAMPLED_RULES:
                picked = [
                    (first, draft)
                    for first, draft in rows
                    if draft.rule is rule
                    and draft.distributions
                    and not draft.context.sampling.greedy
                ]
                if picked:
                    self._judges.append(_SampledDrafts(rule, picked, rows, places, staging))
            elif rule in LOSSY_RULES:
                judged = _judged(rule, rows)
                if judged:
                    self._judges.append(_LossyTokens(rule, judged, rows, places, staging))

    def accept(
        self,
        logits_RV: torch.Tensor,
        tokens_R: torch.Tensor,
        whole: Mapping[int, Sequence[int]],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Return two results: which rows' draft tokens are accepted, and what truncation lacked.

        The first result is bool [R]; the second is the last result of `TargetProbs.probs`.

        `tokens_R` has the rows' argmax; the method overwrites it with the target's own tokens.
        """
        logits_NV = logits_RV
        if self._at_N is not None:
            logits_NV = logits_RV[self._at_N.tensor]
        probs_NV, sufficed = self._probs.probs(logits_NV, whole)
        # Only rows that `_with_errors` marks hold NaN.
        probs_NV = probs_NV.nan_to_num(0.0)
        drawn_N = coupled_sample(probs_NV, self._keys_N.tensor)
        if self._greedy_N is not None:
            likeliest_N = tokens_R if self._at_N is None else tokens_R[self._at_N.tensor]
            drawn_N = torch.where(self._greedy_N.tensor, likeliest_N, drawn_N)
        if self._at_N is None:
            tokens_R.copy_(drawn_N)
        else:
            tokens_R[self._at_N.tensor] = drawn_N
        matches_R = tokens_R == self._draft_R.tensor
        for judge in self._judges:
            judge.accept(probs_NV, tokens_R, matches_R)
        return matches_R, sufficed


class _SampledDrafts:
    """Sampled drafts laid out for a rule.

    B drafts of at most K tokens, S tokens in all, each drawn from at most E alternatives.
    """

    def __init__(
        self,
        rule: AcceptanceRule,
        picked: Sequence[tuple[int, Draft]],
        rows: Rows,
        places: Mapping[int, int],
        staging: Staging,
    ) -> None:
        """`picked` has drafts with their first rows; `places` maps rows to places in `probs_NV`.

        Raises ValueError for a tree.
        """
        if any(draft.context.parents for _, draft in picked):
            raise ValueError("a sampled draft must be a chain")
        self._rule = SAMPLED_RULES[rule]
        lengths = [len(draft.context.drafted) for _, draft in picked]
        flat = [
            row
            for (first, _), n in zip(picked, lengths, strict=True)
            for row in range(first, first + n)
        ]
        self._draft_R = rows.draft_R
        self._rows_S = staging.add(flat, np.int64)
        self._at_S = staging.add([places[row] for row in flat], np.int64)
        self._first_B = staging.add([first for first, _ in picked], np.int64)
        self._lengths_B = staging.add(lengths, np.int64)
        self._start_B = staging.add(np.cumsum([0, *lengths[:-1]]), np.int64)
        # Indices are computed on the host: indices from a mask on the device would need a round
        # trip.
        real_BK = np.arange(max(lengths)) < np.array(lengths)[:, None]
        self._shape = real_BK.shape
        self._places = [staging.add(index) for index in np.nonzero(real_BK)]
        self._ids_BKE, self._draft_BKE = rows.padded_distributions(
            [draft for _, draft in picked], max(lengths)
        )
        self._coins_S = staging.add(rows.uniform(Purpose.ACCEPT)[flat])
        self._uniform_R = staging.add(rows.uniform(Purpose.RECOVER))

    def accept(
        self, probs_NV: torch.Tensor, tokens_R: torch.Tensor, matches_R: torch.Tensor
    ) -> None:
        """Write the rule's decisions into the rows of the drafts.

        If a draft is not accepted whole, draw the next token from the residual.
        """
        target_SV = probs_NV[self._at_S.tensor].double()
        drafts = self._sparse(target_SV)
        prefixes = self._rule(drafts)
        accepted_B = prefixes.accepted_B
        of_draft_S, place_S = (place.tensor for place in self._places)
        matches_R[self._rows_S.tensor] = place_S < accepted_B[of_draft_S]
        # A draft that is accepted whole keeps the bonus token of its last row. The host cannot tell
        # which drafts these are, so a token is drawn for them too, at their last position.
        cut_B = torch.minimum(accepted_B, drafts.lengths_B - 1)
        end_B = self._first_B.tensor + accepted_B
        left = self._residual(target_SV, cut_B, prefixes.scale_B)
        recovered_B = inverse_cdf(left, self._uniform_R.tensor[end_B])
        is_short_B = accepted_B < drafts.lengths_B
        tokens_R[end_B] = torch.where(is_short_B, recovered_B, tokens_R[end_B])

    def _sparse(self, target_SV: torch.Tensor) -> SparseDrafts:
        places = tuple(place.tensor for place in self._places)
        own_S = self._draft_R.tensor[self._rows_S.tensor].unsqueeze(-1)
        ids_SE = self._ids_BKE.tensor[places]
        draft_SE = self._draft_BKE.tensor[places]
        # Padding has the id 0. The target may give this id some probability, which must count as 0.
        target_SE = target_SV.gather(-1, ids_SE) * (draft_SE > 0)
        return SparseDrafts(
            lengths_B=self._lengths_B.tensor,
            draft_BK=self._spread((draft_SE * (ids_SE == own_S)).sum(-1)),
            target_BK=self._spread(target_SV.gather(-1, own_S).squeeze(-1)),
            draft_BKE=self._draft_BKE.tensor,
            target_BKE=self._spread(target_SE),
            uniform_BK=self._spread(self._coins_S.tensor),
        )

    def _spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """Return the values [S, ...] as [B, K, ...], padded with zeros."""
        shape = (*self._shape, *values_S.shape[1:])
        out = torch.zeros(shape, dtype=values_S.dtype, device=values_S.device)
        out[tuple(place.tensor for place in self._places)] = values_S
        return out

    def _residual(
        self, target_SV: torch.Tensor, cut_B: torch.Tensor, scale_B: torch.Tensor
    ) -> torch.Tensor:
        """Return max(0, scale * target - draft) at position `cut_B` of each draft, [B, V]."""
        target_BV = target_SV[self._start_B.tensor + cut_B]
        all_B = torch.arange(len(cut_B), device=cut_B.device)
        ids_BE = self._ids_BKE.tensor[all_B, cut_B]
        draft_BE = self._draft_BKE.tensor[all_B, cut_B]
        left_BV = target_BV * scale_B.unsqueeze(-1)
        left_BV.scatter_add_(-1, ids_BE, -draft_BE).clamp_(min=0)
        # Equal distributions leave no residual. Then only rounding can reject a token, and the
        # target itself is the right distribution.
        return torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, target_BV)


class _LossyTokens:
    """The draft tokens that a lossy rule judges."""

    def __init__(
        self,
        rule: AcceptanceRule,
        judged: Sequence[tuple[int, SpeculationOptions]],
        rows: Rows,
        places: Mapping[int, int],
        staging: Staging,
    ) -> None:
        """`judged` has the tokens' rows and settings; `places` are rows' places in `probs_NV`."""
        self._rule = LOSSY_RULES[rule]
        self._draft_R = rows.draft_R
        self._rows_J = staging.add([row for row, _ in judged], np.int64)
        self._at_J = staging.add([places[row] for row, _ in judged], np.int64)
        settings = [self._rule.settings(options) for _, options in judged]
        self._settings = [staging.add(each, np.float32) for each in zip(*settings, strict=True)]

    def accept(
        self, probs_NV: torch.Tensor, tokens_R: torch.Tensor, matches_R: torch.Tensor
    ) -> None:
        """Accept the tokens that the rule allows, besides those that the exact rule accepts."""
        at = self._rows_J.tensor
        settings = [staged.tensor for staged in self._settings]
        allowed_J = self._rule.judge(
            probs_NV[self._at_J.tensor], self._draft_R.tensor[at], *settings
        )
        matches_R[at] = matches_R[at] | allowed_J


def _judged(rule: AcceptanceRule, rows: Rows) -> list[tuple[int, SpeculationOptions]]:
    """Return the rows whose draft tokens a lossy rule judges, with their requests' settings."""
    found: list[tuple[int, SpeculationOptions]] = []
    for first, draft in rows:
        if draft.rule is rule:
            judged = draft.judged
            if draft.thinking:
                judged = [(row, i) for row, i in judged if draft.thinking[i]]
            found += [(first + row, draft.options) for row, _ in judged]
    return found


def _chances(rates: Sequence[float]) -> np.ndarray:
    """Return the probability that each position's token is accepted if all tokens before it were.

    Each rate is the probability that all tokens up to a position are accepted. The last probability
    that is returned holds for all later positions too.
    """
    before = (1.0, *rates[:-1])
    return np.array([rate / (last or 1.0) for rate, last in zip(rates, before, strict=True)])
