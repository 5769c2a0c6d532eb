"""From a batch of the scheduler's items and their logits to what is to be committed: the context, rule and noise of each draft."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import isnan

import torch

from outrider.errors import OutriderError, Reason
from outrider.logits import Context
from outrider.messages import AcceptanceRule, Rule, TokenLogprob
from verifier_svc.acceptance import NO_TOKEN, NOT_FINITE, Draft, Outcome, accept
from verifier_svc.logprobs import logprobs
from verifier_svc.scheduler import Item
from verifier_svc.trust import judged_by


@dataclass(slots=True)
class Judgement:
    """An outcome, the rule it came by, and log probabilities of its tokens when the request wants them."""

    outcome: Outcome
    rule: AcceptanceRule
    logprobs: SequenceOf[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Judge:
    """How this verifier judges.

    `sampled_rule` is for drafts that a trusted drafter sampled; `thinking_ids` begin and end the thinking phase, None when the
    model has none; with a `synthetic_rate` drafts stand at that rate whatever the target says.
    """

    sampled_rule: AcceptanceRule = AcceptanceRule.BLOCK
    thinking_ids: tuple[int, int] | None = None
    synthetic_rate: float | None = None

    def judge(self, logits_RV: torch.Tensor, items: SequenceOf[Item]) -> list[Judgement | None]:
        """One for each item, None for a part of a prompt; `logits_RV` has the rows of the others."""
        judged = [item for item in items if item.samples]
        drafts = [self._draft(item) for item in judged]
        outcomes = accept(logits_RV, drafts, self.synthetic_rate)
        told = [Judgement(outcome, draft.rule) for outcome, draft in zip(outcomes, drafts, strict=True)]
        for i, found in _logprobs(logits_RV, judged, outcomes).items():
            told[i].logprobs = found
        if len(judged) == len(items):
            return [*told]
        rest = iter(told)
        return [next(rest) if item.samples else None for item in items]

    def _draft(self, item: Item) -> Draft:
        sequence = item.sequence
        request, path = sequence.request, item.path
        # A distribution counts only from whom it was asked; else it could force a token.
        asked = item.assignment is not None and item.assignment.rule is Rule.SPARSE
        sampled = self.sampled_rule if asked and path.distributions else None
        rule = judged_by(request, sampled, self.synthetic_rate is not None)
        return Draft(
            Context(
                request.sampling,
                sequence.tokens,
                len(request.prompt),
                path.token_ids,
                sequence.end_ids,
                item.mask,
            ),
            sequence.seed,
            rule,
            path.distributions if rule is sampled else (),
            request.speculation,
            self._thinking(sequence.tokens, path.token_ids) if rule is AcceptanceRule.RELAXED else (),
            sequence.stats.forward_count,
        )

    def _thinking(self, text: SequenceOf[int], drafted: SequenceOf[int]) -> list[bool]:
        """For each draft token behind a text, whether it stands in the thinking phase; a phase that the prompt opened counts."""
        if self.thinking_ids is None:
            return [False] * len(drafted)
        begin, end = self.thinking_ids
        inside = next((token == begin for token in reversed(text) if token in (begin, end)), False)
        states = []
        for token in drafted:
            # The end itself is judged exactly: when thinking stops is the target's decision.
            inside = (inside and token != end) or token == begin
            states.append(inside and token != begin)
        return states


def _logprobs(logits_RV: torch.Tensor, items: SequenceOf[Item], outcomes: SequenceOf[Outcome]) -> dict[int, list[TokenLogprob]]:
    """Those of the sequences that want them, by their place among `items`."""
    if not [item for item in items if item.sequence.request.top_logprobs is not None]:
        return {}
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    spans: dict[int, range] = {}
    first = 0
    for i, (item, outcome) in enumerate(zip(items, outcomes, strict=True)):
        count = item.sequence.request.top_logprobs
        if count is not None:
            committed = [*item.path.token_ids[: outcome.accepted_count], max(0, outcome.next_token)]
            spans[i] = range(len(rows), len(rows) + len(committed))
            rows += range(first, first + len(committed))
            tokens += committed
            counts += [count] * len(committed)
        first += len(item.path.token_ids) + 1
    found = logprobs(logits_RV, rows, tokens, counts)
    return {i: found[span.start : span.stop] for i, span in spans.items()}


def why_impossible(judgement: Judgement | None, scored: SequenceOf[TokenLogprob]) -> OutriderError | None:
    """Why a sequence cannot go on: its request leaves no token, or the model's logits are not numbers. None if it can."""
    next_token = 0 if judgement is None else judgement.outcome.next_token
    if next_token == NOT_FINITE or any(isnan(token.logprob) for token in scored):
        message = "the target's logits are not finite (NaN or infinite), so there is no next token; float16 can overflow"
        return OutriderError(Reason.LOGITS_NOT_FINITE, message)
    if next_token == NO_TOKEN:
        message = "banned_token_ids, min_tokens and the grammar together leave no token that could come next"
        return OutriderError(Reason.INVALID_VALUE, message, "banned_token_ids")
    return None
