"""Verifies a batch: gives each draft its context, rule and noise, and collects the results."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from math import isnan
from typing import Protocol

import numpy as np
import torch

from outrider.errors import OutriderError, Reason
from outrider.protocol.messages import AcceptanceRule, DraftDistribution, TokenLogprob
from outrider.sampling.context import Context
from outrider.sampling.penalties import TokenCounts
from outrider.sampling.tensors import Staged, Staging
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.verification.acceptance import Acceptance
from verifier_svc.verification.draft import NO_TOKEN, NOT_FINITE, AcceptResult, Draft
from verifier_svc.verification.logprobs import Logprobs
from verifier_svc.verification.rule_choice import acceptance_rule

_CPU = torch.device("cpu")
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
    """None after a chunk of a prompt, unless it is the prompt's last chunk."""
    rule: AcceptanceRule = AcceptanceRule.COUPLED
    """The acceptance rule that gave `result`."""
    logprobs: SequenceOf[TokenLogprob] = ()
    """Log probabilities of the accepted tokens and of the next token, if the request wants them."""
    prompt_logprobs: SequenceOf[TokenLogprob] = ()
    """Log probabilities of the prompt tokens that were scheduled to be scored."""


Verify = Callable[[torch.Tensor, SequenceOf[ScheduledSequence]], list[Verified | OutriderError]]
"""Takes a batch's logits, with `logit_count` rows of each sequence one after the other, and the
batch with the masks of its grammars. Returns for each sequence the tokens to commit, or the error
that leaves nothing to commit."""


class Verification(Protocol):
    """Verifies drafts: `DraftVerifier` by logits, the simulator's target by given texts."""

    @property
    def thinking_ids(self) -> tuple[int, int] | None:
        """The tokens that begin and end the thinking phase; None if the model has none."""

    def lay_out(self, batch: SequenceOf[ScheduledSequence]) -> Verify:
        """Prepare what verifying needs besides the logits, which a GPU may compute meanwhile."""


@dataclass(frozen=True, slots=True)
class DraftVerifier:
    """Verifies the drafts of a batch by the target's logits. One engine uses it."""

    sampled_rule: AcceptanceRule = AcceptanceRule.BLOCK
    """The rule for drafts that a trusted drafter sampled."""
    thinking_ids: tuple[int, int] | None = None
    """The tokens that begin and end the thinking phase; None if the model has none."""
    synthetic_rates: SequenceOf[float] = ()
    """If not empty, drafts are accepted at these rates, see `Acceptance`."""
    device: torch.device = _CPU
    """The device of the logits."""
    counts: TokenCounts = field(default_factory=TokenCounts)

    def lay_out(self, batch: SequenceOf[ScheduledSequence]) -> Verify:
        """Lay a batch out on the host, and send to the device what verifying needs, in one copy."""
        staging = Staging(self.device)
        drafts = [self._draft(scheduled) for scheduled in batch if scheduled.samples]
        acceptance = Acceptance(drafts, staging, self.counts, self.synthetic_rates)
        rules = [draft.rule for draft in drafts]
        wanting = [
            scheduled
            for scheduled in batch
            if scheduled.scored
            or (scheduled.samples and scheduled.sequence.request.top_logprobs is not None)
        ]
        logprobs = Logprobs(batch, staging) if wanting else None
        drawn = None
        if any(scheduled.scored for scheduled in wanting):
            drawn = staging.add(_drawn(batch), np.int64)
        staging.send()
        return _LaidOut(acceptance, rules, logprobs, drawn).verify

    def _draft(self, scheduled: ScheduledSequence) -> Draft:
        sequence = scheduled.sequence
        request = sequence.request
        tree = scheduled.draft
        assignment = scheduled.assignment
        # A distribution counts only if the drafter was asked for it, because a false distribution
        # can force a token.
        sampled = None
        asked = assignment is not None and assignment.distribution is DraftDistribution.SPARSE
        if asked and tree.distributions:
            sampled = self.sampled_rule
        rule = acceptance_rule(request, sampled, bool(self.synthetic_rates))
        thinking: SequenceOf[bool] = ()
        if rule is AcceptanceRule.RELAXED:
            thinking = self._thinking(sequence.tokens, tree.token_ids, tree.parents)
        context = Context(
            request.sampling,
            sequence.tokens,
            len(request.prompt),
            tree.token_ids,
            sequence.end_ids,
            parents=tree.parents,
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
        """Return for each token drafted after a text whether it is in the thinking phase.

        The thinking phase may have started in the prompt. `parents` are as in
        `protocol.token_tree`.
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


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """A batch that can be verified as soon as its logits are there."""

    acceptance: Acceptance
    """The acceptance of the sequences for which a token is drawn."""
    rules: SequenceOf[AcceptanceRule]
    """The rules of these sequences' drafts."""
    logprobs: Logprobs | None
    """The log probabilities that requests of the batch want; None if they want none."""
    drawn_R: Staged | None
    """The logits rows from which tokens are drawn; None if these are all rows."""

    def verify(
        self, logits_RV: torch.Tensor, batch: SequenceOf[ScheduledSequence]
    ) -> list[Verified | OutriderError]:
        """Verify the batch as `Verify` requires, with one wait for the device."""
        drawn_RV = logits_RV if self.drawn_R is None else logits_RV[self.drawn_R.tensor]
        masks = [scheduled.mask for scheduled in batch if scheduled.samples]
        beside = None
        if self.logprobs is not None:
            beside = partial(self.logprobs.tensors, logits_RV)
        results, found = self.acceptance.results(drawn_RV, masks, beside)
        pairs = zip(results, self.rules, strict=True)
        verified = [Verified(result, rule) for result, rule in pairs]
        if len(verified) < len(batch):
            rest = iter(verified)
            verified = [next(rest) if scheduled.samples else Verified() for scheduled in batch]
        if self.logprobs is not None:
            for i, logprobs in self.logprobs.of_committed(found, results).items():
                verified[i].logprobs = logprobs
            for i, logprobs in self.logprobs.of_prompts(found).items():
                verified[i].prompt_logprobs = logprobs
        return [_error(each) or each for each in verified]


def _drawn(batch: SequenceOf[ScheduledSequence]) -> list[int]:
    """Return the logits rows from which tokens are drawn: all but rows that score a prompt."""
    rows: list[int] = []
    first = 0
    for scheduled in batch:
        rows += range(first + len(scheduled.scored), first + scheduled.logit_count)
        first += scheduled.logit_count
    return rows


def _error(verified: Verified) -> OutriderError | None:
    """Return an error if the sequence has no allowed next token, or its logits are not finite."""
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
