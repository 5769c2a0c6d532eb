"""Chooses the acceptance rule of each draft. docs/losslessness.md explains the table.

A drafter that claims a false distribution can force any token under the rules for sampled drafts.
So these rules are only for drafters that the operator trusts; and since what such a drafter draws
enters the output, never for a request with a seed.

A request that accepts sampled drafts is *open to samples*: an exact, sampled request without a
seed, at a verifier that trusts its drafters. No drafter gets the noise of such a sequence. The
length of a run decides which drafter's path is verified, so a drafter that knew the noise could
decide, by drafting or not, whether the next token is drawn with it. This depends on the request and
the verifier's flag alone, not on the connected drafters, so it also holds for a drafter that joins
later.

| request            | drafter can   | it is asked to              | rule                          |
| ------------------ | ------------- | --------------------------- | ----------------------------- |
| temperature 0      | anything      | propose its likeliest token | GREEDY                        |
| open to samples    | SPARSE        | sample, and send its probs  | BLOCK, or TOKEN_WISE by flag  |
| open to samples    | anything else | propose its likeliest token | COUPLED                       |
| sampled otherwise  | COUPLED       | draw with our noise         | COUPLED                       |
| sampled otherwise  | anything else | propose its likeliest token | COUPLED                       |
| acceptance TYPICAL | anything      | as if sampled otherwise     | TYPICAL (lossy)               |
| acceptance RELAXED | anything      | as if sampled otherwise     | RELAXED when thinking (lossy) |

With --synthetic-acceptance-rate every draft is verified by SYNTHETIC.
"""

from __future__ import annotations

from outrider.messages import Acceptance, AcceptanceRule, DraftDistribution, TokenRequest

# The rule of a lossy acceptance has its name.
_LOSSY = {kind: AcceptanceRule[kind.name] for kind in Acceptance if kind is not Acceptance.EXACT}


def choose_distribution(
    request: TokenRequest, offered: frozenset[DraftDistribution], trusted: bool
) -> DraftDistribution:
    """How a drafter is to choose its tokens for a request.

    `offered` are the ways that it can; `trusted` is the verifier's flag.
    """
    if request.sampling.greedy:
        return DraftDistribution.ONE_HOT
    exact = request.speculation.acceptance is Acceptance.EXACT
    wanted = DraftDistribution.COUPLED
    if trusted and exact and request.sampling.seed is None:
        wanted = DraftDistribution.SPARSE  # the request is open to samples
    if wanted not in offered:
        return DraftDistribution.ONE_HOT
    return wanted


def acceptance_rule(
    request: TokenRequest, sampled_rule: AcceptanceRule | None, synthetic: bool
) -> AcceptanceRule:
    """The rule for a draft.

    `sampled_rule` is the rule for sampled drafts, None if this draft has no distributions.
    """
    if synthetic:
        return AcceptanceRule.SYNTHETIC
    acceptance = request.speculation.acceptance
    if acceptance is not Acceptance.EXACT:
        return _LOSSY[acceptance]
    if request.sampling.greedy:
        return AcceptanceRule.GREEDY
    return sampled_rule or AcceptanceRule.COUPLED
