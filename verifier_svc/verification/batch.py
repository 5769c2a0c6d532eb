"""Verifies a batch: gives each draft its context, rule and noise, and collects the results."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import isnan
from typing import Protocol

import torch

from outrider.errors import OutriderError, Reason
from outrider.protocol.messages import AcceptanceRule, DraftDistribution, TokenLogprob
from outrider.sampling.logits import Context
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.verification.acceptance import accept
from verifier_svc.verification.draft import NO_TOKEN, NOT_FINITE, AcceptResult, Draft
from verifier_svc.verification.logprobs import logprobs, split_scored
from verifier_svc.verification.rule_choice import acceptance_rule

_NOT_FINITE = (
    "the target's logits are not finite (NaN or infinite), so there is no next token;"
    " float16 can overflow"
)
_NO_TOKEN = (
    "banned_token_ids, min_tokens and the grammar together leave no token that could come next"
)


@dataclass(slots=True)
class Verified:
    """The result of a forward for one scheduled sequence."""

    result: AcceptResult | None = None
    """None behind a chunk of a prompt that is not its last."""
    rule: AcceptanceRule = AcceptanceRule.COUPLED
    """The rule that gave `result`."""
    logprobs: SequenceOf[TokenLogprob] = ()
    """Those of the accepted tokens and the next one, if the request wants them."""
    prompt_logprobs: SequenceOf[TokenLogprob] = ()
    """Those of the prompt tokens that were scheduled to be scored."""


class Verification(Protocol):
    """Verifies drafts: `DraftVerifier` by logits, the simulator's target by texts of its own."""

    @property
    def thinking_ids(self) -> tuple[int, int] | None:
        """The tokens that begin and end the thinking phase; None if the model has none."""

    def verify(
        self,
        logits_RV: torch.Tensor,
        batch: SequenceOf[ScheduledSequence],
    ) -> list[Verified | OutriderError]:
        """For each sequence, the tokens to commit or the reason why it cannot go on."""


@dataclass(frozen=True, slots=True)
class DraftVerifier:
    """Verifies the drafts of a batch by the target's logits."""

    sampled_rule: AcceptanceRule = AcceptanceRule.BLOCK
    """The rule for drafts that a trusted drafter sampled."""
    thinking_ids: tuple[int, int] | None = None
    """The tokens that begin and end the thinking phase; None if the model has none."""
    synthetic_rate: float | None = None
    """If set, draft tokens are accepted at this rate whatever the target says."""

    def verify(
        self,
        logits_RV: torch.Tensor,
        batch: SequenceOf[ScheduledSequence],
    ) -> list[Verified | OutriderError]:
        """For each sequence, the tokens to commit or the reason why it cannot go on.

        `logits_RV` has `logit_count` rows of each sequence, one after the other.
        """
        logits_RV, scores = split_scored(logits_RV, batch)
        sampling = [scheduled for scheduled in batch if scheduled.samples]
        accepted = self._accept(logits_RV, sampling)
        verified = accepted
        if len(sampling) < len(batch):
            rest = iter(accepted)
            verified = [next(rest) if scheduled.samples else Verified() for scheduled in batch]
        for i, prompt_logprobs in scores.items():
            verified[i].prompt_logprobs = prompt_logprobs
        return [_error(each) or each for each in verified]

    def _accept(
        self,
        logits_RV: torch.Tensor,
        sampling: SequenceOf[ScheduledSequence],
    ) -> list[Verified]:
        """Verify the sequences for which a token is drawn; `logits_RV` has their rows alone."""
        drafts = [self._draft(scheduled) for scheduled in sampling]
        results = accept(logits_RV, drafts, self.synthetic_rate)
        pairs = zip(results, drafts, strict=True)
        verified = [Verified(result, draft.rule) for result, draft in pairs]
        for i, found in _logprobs(logits_RV, sampling, results).items():
            verified[i].logprobs = found
        return verified

    def _draft(self, scheduled: ScheduledSequence) -> Draft:
        sequence = scheduled.sequence
        request = sequence.request
        tree = scheduled.draft
        assignment = scheduled.assignment
        # A distribution counts only if the drafter was asked for it: a false one can force a token.
        sampled = None
        asked = assignment is not None and assignment.distribution is DraftDistribution.SPARSE
        if asked and tree.distributions:
            sampled = self.sampled_rule
        rule = acceptance_rule(request, sampled, self.synthetic_rate is not None)
        thinking: SequenceOf[bool] = ()
        if rule is AcceptanceRule.RELAXED:
            thinking = self._thinking(sequence.tokens, tree.token_ids, tree.parents)
        context = Context(
            request.sampling,
            sequence.tokens,
            len(request.prompt),
            tree.token_ids,
            sequence.end_ids,
            scheduled.mask,
            tree.parents,
        )
        return Draft(
            context,
            sequence.seed,
            rule,
            tree.distributions if rule is sampled else (),
            request.speculation,
            thinking,
        )

    def _thinking(
        self, text: SequenceOf[int], drafted: SequenceOf[int], parents: SequenceOf[int] = ()
    ) -> list[bool]:
        """For each token drafted behind a text, whether it is in the thinking phase.

        The prompt may have begun that phase. `parents` are as in `protocol.token_tree`.
        """
        if self.thinking_ids is None:
            return [False] * len(drafted)
        begin, end = self.thinking_ids
        inside = next((token == begin for token in reversed(text) if token in (begin, end)), False)
        states = []
        inside_rows = [inside]
        for token, parent in zip(drafted, parents or range(len(drafted)), strict=True):
            # The end token is verified exactly: the target decides when thinking stops.
            inside = (inside_rows[parent] and token != end) or token == begin
            inside_rows.append(inside)
            states.append(inside and token != begin)
        return states


def _logprobs(
    logits_RV: torch.Tensor, batch: SequenceOf[ScheduledSequence], results: SequenceOf[AcceptResult]
) -> dict[int, list[TokenLogprob]]:
    """Log probabilities of the sequences that want them, by place in the batch."""
    wanting = [each for each in batch if each.sequence.request.top_logprobs is not None]
    if not wanting:
        return {}
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    spans: dict[int, range] = {}
    first = 0
    for i, (scheduled, result) in enumerate(zip(batch, results, strict=True)):
        count = scheduled.sequence.request.top_logprobs
        if count is not None:
            path = result.rows
            spans[i] = range(len(rows), len(rows) + len(path) + 1)
            rows += [first, *[first + row for row in path]]
            tokens += [scheduled.draft.token_ids[row - 1] for row in path]
            tokens.append(max(0, result.next_token))
            counts += [count] * (len(path) + 1)
        first += len(scheduled.draft.token_ids) + 1
    found = logprobs(logits_RV, rows, tokens, counts)
    return {i: found[span.start : span.stop] for i, span in spans.items()}


def _error(verified: Verified) -> OutriderError | None:
    """The error of a sequence that cannot go on: no token is allowed, or a logit is not finite."""
    next_token = 0
    if verified.result is not None:
        next_token = verified.result.next_token
    if next_token >= 0 and not verified.prompt_logprobs:
        return None
    if next_token == NOT_FINITE or any(isnan(token.logprob) for token in verified.prompt_logprobs):
        return OutriderError(Reason.LOGITS_NOT_FINITE, _NOT_FINITE)
    if next_token == NO_TOKEN:
        return OutriderError(Reason.INVALID_VALUE, _NO_TOKEN, "banned_token_ids")
    return None
