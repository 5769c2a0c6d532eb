"""Lays out a batch of drafts as rows of logits, with their noise, and reads off the results.

All this happens on the host. The layout needs no logits, so it can be made while a GPU is still
computing the forward; `Staging` holds what the device needs of the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from outrider.sampling.context import Context
from outrider.sampling.noise import Purpose, coupled_keys, uniforms
from outrider.sampling.tensors import Staged, Staging
from verifier_svc.verification.draft import NO_TOKEN, AcceptResult, Draft
from verifier_svc.verification.tree_walk import walk

_NO_DRAFT = -3


def tree_result(
    context: Context, tokens: list[int], own: list[int], accepts_first: Sequence[bool] = ()
) -> AcceptResult:
    """Return the result of a tree; `own` and `accepts_first` are as in `walk`.

    `tokens` has for each row the token to commit next if the walk ends at this row.
    """
    path = walk(context.drafted, context.parents, own, accepts_first)
    last = path[-1] if path else 0
    # Row numbers rise along a path. So if the last row's number equals the path's length, the path
    # has exactly the rows from 1 to this number.
    if last == len(path):
        return AcceptResult(len(path), tokens[last])
    return AcceptResult(len(path), tokens[last], path)


class Rows:
    """The layout of a batch: the R rows of logits of B sequences, one sequence after the other.

    Iterates over (first row, draft).
    """

    def __init__(self, drafts: Sequence[Draft], staging: Staging) -> None:
        self.drafts = drafts
        self._staging = staging
        self._counts_B = np.array([draft.context.row_count for draft in drafts])
        self._first_B = np.cumsum(self._counts_B) - self._counts_B
        # The last row of each sequence has no draft token to match.
        drafted = np.array(
            [token for draft in drafts for token in (*draft.context.drafted, _NO_DRAFT)]
        )
        self._trees = [(b, draft) for b, draft in enumerate(drafts) if draft.context.parents]
        for b, draft in self._trees:
            first = self._first_B[b]
            drafted[first : first + draft.context.row_count] = _NO_DRAFT
            for row, i in draft.judged:
                drafted[first + row] = draft.context.drafted[i]
        self.draft_R = staging.add(drafted, np.int64)
        self.drafted_R = staging.add(drafted != _NO_DRAFT)

    def __iter__(self) -> Iterator[tuple[int, Draft]]:
        return zip(self._first_B.tolist(), self.drafts, strict=True)

    @cached_property
    def of_row(self) -> list[Draft]:
        """Each row's draft."""
        return [draft for draft in self.drafts for _ in range(draft.context.row_count)]

    def where(self, wanted: Callable[[Draft], bool]) -> list[int]:
        """Return the rows of the drafts that are `wanted`."""
        wanted_R: np.ndarray = np.repeat([wanted(draft) for draft in self.drafts], self._counts_B)
        found: list[int] = np.flatnonzero(wanted_R).tolist()
        return found

    @cached_property
    def depths(self) -> np.ndarray:
        """The number of draft tokens before each row's token, on the row's own path; [R]."""
        first_R: np.ndarray = np.repeat(self._first_B, self._counts_B)
        depths: np.ndarray = np.arange(len(first_R)) - first_R
        for b, draft in self._trees:
            first = self._first_B[b]
            depths[first : first + draft.context.row_count] = draft.context.depths
        return depths

    @cached_property
    def _seeds_and_positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Each row's seed, and the position of its token; [R] each."""
        seeds_B = np.array([draft.seed for draft in self.drafts], np.uint64)
        seeds: np.ndarray = np.repeat(seeds_B, self._counts_B)
        lengths_B = [len(draft.context.tokens) for draft in self.drafts]
        return seeds, np.repeat(lengths_B, self._counts_B) + self.depths

    def uniform(self, purpose: Purpose) -> np.ndarray:
        """Return each row's random number for the purpose, float64 [R].

        The number depends on the committed length too, so that no number is used at two steps.
        """
        lengths = [len(draft.context.tokens) for draft in self.drafts]
        steps: np.ndarray = np.repeat(lengths, self._counts_B)
        return uniforms(*self._seeds_and_positions, purpose, steps)

    def keys(self, rows: Sequence[int]) -> np.ndarray:
        """Return the keys of the coupled noise for these rows, int64."""
        keys: np.ndarray = coupled_keys(*self._seeds_and_positions)[rows]
        return keys

    def padded_distributions(self, drafts: Sequence[Draft], longest: int) -> tuple[Staged, Staged]:
        """Return ids and probabilities [B, K, E] of sampled drafts, both padded with 0."""
        width = max(each.token_ids.size for draft in drafts for each in draft.distributions)
        ids = np.zeros((len(drafts), longest, width), np.int64)
        probs = np.zeros((len(drafts), longest, width), np.float64)
        for b, draft in enumerate(drafts):
            for k, each in enumerate(draft.distributions):
                ids[b, k, : each.token_ids.size] = each.token_ids
                probs[b, k, : each.token_ids.size] = each.probabilities
        return self._staging.add(ids), self._staging.add(probs)

    def results(
        self, tokens_R: np.ndarray, matches_R: np.ndarray, *, has_siblings: bool
    ) -> list[AcceptResult]:
        """Return the result of each sequence.

        Accepted tokens end at a sequence's first row without a match. That row's token is the
        sequence's next token. In a tree with `has_siblings`, the walk goes on from a row without a
        match if another child equals the row's token.
        """
        misses = np.flatnonzero(matches_R == 0)
        end_B = misses[np.searchsorted(misses, self._first_B)]
        counts = (end_B - self._first_B).tolist()
        pairs = zip(counts, tokens_R[end_B].tolist(), strict=True)
        found = [AcceptResult(count, token) for count, token in pairs]
        for b, draft in self._trees:
            end = self._first_B[b] + self._counts_B[b]
            tokens: list[int] = tokens_R[self._first_B[b] : end].tolist()
            matches: list[bool] = (matches_R[self._first_B[b] : end] != 0).tolist()
            own = tokens
            if not has_siblings:
                own = [NO_TOKEN] * len(tokens)
            found[b] = tree_result(draft.context, tokens, own, matches)
        return found
