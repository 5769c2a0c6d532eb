"""Which draft tokens stand, for a whole batch at once. Knows logits, drafts and noise; not sequences, pages or streams.

One-hot drafts are judged by sampling the target's own token at every position and accepting while the draft equals it: the
acceptance probability is target(draft) and the token after a miss follows norm(max(0, target - one_hot)), which is the rejection
rule for a one-hot draft, and since nothing of the draft enters the sampled token, a seed gives the same text with any drafter.
Sparse drafts take the rejection rule itself (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.messages import SamplingParams, SparseDistribution
from outrider.sampling import Purpose, inverse_cdf, target_probs, uniforms


@dataclass(frozen=True, slots=True)
class Draft:
    """One sequence's share of a batch: its logits rows are those after the last committed token and after each draft token.

    `position` is the index in the sequence of the token that the first row decides. `distributions` is empty for a one-hot
    draft, else one for each draft token: what that token was really sampled from.
    """

    sampling: SamplingParams
    seed: int
    position: int
    token_ids: Sequence[int] = ()
    distributions: Sequence[SparseDistribution] = field(default=())


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many draft tokens of a sequence were accepted, and the recovered, bonus or plain token that follows them."""

    accepted_count: int
    next_token: int


def accept(logits_RV: torch.Tensor, drafts: Sequence[Draft]) -> list[Outcome]:
    """Judge every draft of a batch in a few tensor operations and one copy back.

    `logits_RV` is float32 with R = sum of (draft length + 1), sequence by sequence.
    """
    if not drafts:
        return []
    tokens_R = logits_RV.argmax(-1)
    if len(drafts) == len(logits_RV) and all(draft.sampling.greedy for draft in drafts):
        return [Outcome(0, token) for token in tokens_R.tolist()]  # plain greedy decoding, which all else must not slow down
    rows = _Rows(drafts, logits_RV.device)
    if not rows.all_greedy:
        probs_RV = target_probs(logits_RV, rows.temperature_R, rows.top_k_R, rows.top_p_R)
        sampled_R = inverse_cdf(probs_RV, rows.uniform(Purpose.SAMPLE))
        tokens_R = torch.where(rows.temperature_R > 0, sampled_R, tokens_R)
        if rows.sparse:
            matches_R = tokens_R == rows.tensor(rows.draft_R)
            _judge_sparse(probs_RV, rows, tokens_R, matches_R)
            return rows.outcomes(*torch.stack([tokens_R, matches_R]).cpu().numpy())
    tokens = tokens_R.cpu().numpy()
    return rows.outcomes(tokens, tokens == rows.draft_R)


def _judge_sparse(probs_RV: torch.Tensor, rows: _Rows, tokens_R: torch.Tensor, matches_R: torch.Tensor) -> None:
    """Overwrite `matches_R` and `tokens_R` at the sparse rows: accept with min(1, target/draft), else draw from the residual."""
    at_S, ids_SE, draft_probs_SE = rows.sparse_tensors()
    target_SV = probs_RV[at_S].double()
    draft_S = rows.tensor(rows.draft_R)[at_S].unsqueeze(-1)
    draft_prob_S = (draft_probs_SE * (ids_SE == draft_S)).sum(-1)
    target_prob_S = target_SV.gather(-1, draft_S).squeeze(-1)
    matches_R[at_S] = rows.uniform(Purpose.ACCEPT)[at_S] * draft_prob_S < target_prob_S
    residual_SV = target_SV.scatter_add(-1, ids_SE, -draft_probs_SE).clamp_(min=0)
    # Equal distributions leave no residual; then nothing can be rejected but by rounding, and the target itself is right.
    residual_SV = torch.where(residual_SV.sum(-1, keepdim=True) > 0, residual_SV, target_SV)
    tokens_R[at_S] = inverse_cdf(residual_SV, rows.uniform(Purpose.RECOVER)[at_S])


class _Rows:
    """The batch laid out as arrays: R logits rows of B sequences."""

    def __init__(self, drafts: Sequence[Draft], device: torch.device) -> None:
        self._device = device
        self._counts_B = np.array([len(draft.token_ids) + 1 for draft in drafts])
        self._first_B = np.cumsum(self._counts_B) - self._counts_B
        # -1 after each draft's last token: the bonus row has nothing to match.
        self.draft_R = np.array([token for draft in drafts for token in (*draft.token_ids, -1)])
        self.all_greedy = all(draft.sampling.greedy for draft in drafts)
        if not self.all_greedy:
            self._lay_out_sampling(drafts, self._first_B)

    def outcomes(self, tokens_R: np.ndarray, matches_R: np.ndarray) -> list[Outcome]:
        """Each sequence's accepted tokens end at its first row without a match, whose token is the next one."""
        misses = np.flatnonzero(matches_R == 0)
        end_B = misses[np.searchsorted(misses, self._first_B)]
        return [Outcome(*pair) for pair in zip((end_B - self._first_B).tolist(), tokens_R[end_B].tolist(), strict=True)]

    def _lay_out_sampling(self, drafts: Sequence[Draft], first_B: np.ndarray) -> None:
        samplings = [draft.sampling for draft in drafts]
        self.temperature_R = self._spread([s.temperature for s in samplings], np.float32)
        self.top_k_R = self._spread([s.top_k for s in samplings], np.int64)
        self.top_p_R = self._spread([s.top_p for s in samplings], np.float32)
        self._seed_R = np.repeat(np.array([draft.seed for draft in drafts], np.uint64), self._counts_B)
        offset_R = np.arange(len(self._seed_R)) - np.repeat(first_B, self._counts_B)
        self._position_R = np.repeat([draft.position for draft in drafts], self._counts_B) + offset_R
        # Temperature 0 makes the target one-hot: a sampled draft is then right exactly when it is the argmax.
        self.sparse = [
            (int(first) + i, distribution)
            for first, draft in zip(first_B, drafts, strict=True)
            if not draft.sampling.greedy
            for i, distribution in enumerate(draft.distributions)
        ]

    def uniform(self, purpose: Purpose) -> torch.Tensor:
        """float64 [R], each row's own number for the purpose."""
        return self.tensor(uniforms(self._seed_R, self._position_R, purpose))

    def sparse_tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row numbers [S], ids [S, E] and probabilities [S, E] of the sparse drafts, padded with (id 0, probability 0)."""
        width = max(distribution.token_ids.size for _, distribution in self.sparse)
        ids_SE = np.zeros((len(self.sparse), width), np.int64)
        probs_SE = np.zeros((len(self.sparse), width), np.float64)
        for i, (_, distribution) in enumerate(self.sparse):
            ids_SE[i, : distribution.token_ids.size] = distribution.token_ids
            probs_SE[i, : distribution.token_ids.size] = distribution.probabilities
        return self.tensor(np.array([row for row, _ in self.sparse])), self.tensor(ids_SE), self.tensor(probs_SE)

    def _spread(self, values_B: Sequence[float], dtype: type[np.generic]) -> torch.Tensor:
        return self.tensor(np.repeat(np.array(values_B, dtype), self._counts_B))

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """On the logits' device."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)
