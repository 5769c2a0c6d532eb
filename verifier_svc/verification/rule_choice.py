"""Chooses the acceptance rule of each draft. docs/losslessness.md explains the table below.

Under the rules for sampled drafts, a drafter that claims a false distribution can force any token.
So these rules are only for drafters that the operator trusts. What such a drafter draws enters the
output, so these rules are never used for a request with a seed.

A request that accepts sampled drafts is *open to samples*: an exact, sampled request without a
seed, at a verifier with --sampled-drafts. No drafter gets the noise of such a sequence. The length
of a path helps to decide which path is verified, so a drafter that knew the noise could decide, by
drafting or not, whether the next token is drawn with that noise. Whether a request is open to
samples depends only on the request and the verifier's setting, not on the connected drafters or
their roles. So no drafter gets the noise, whether it joins before or after a trusted drafter.

| request            | drafter         | it is asked to            | rule                          |
| ------------------ | --------------- | ------------------------- | ----------------------------- |
| temperature 0      | any             | guess its likeliest token | GREEDY                        |
| open to samples    | trusted, SPARSE | sample and send its probs | BLOCK, or TOKEN_WISE by flag  |
| open to samples    | any other       | guess its likeliest token | COUPLED                       |
| sampled otherwise  | COUPLED         | draw with our noise       | COUPLED                       |
| sampled otherwise  | any other       | guess its likeliest token | COUPLED                       |
| acceptance TYPICAL | any             | as if sampled otherwise   | TYPICAL (lossy)               |
| acceptance RELAXED | any             | as if sampled otherwise   | RELAXED when thinking (lossy) |

The first five rows are about requests with exact acceptance. Under the last two rows, drafters
guess their likeliest tokens if the temperature is 0. With --synthetic-acceptance-rates every draft
is verified by SYNTHETIC.
"""

from __future__ import annotations

from outrider.protocol.messages import Acceptance, AcceptanceRule, DraftDistribution, TokenRequest

# Each lossy Acceptance maps to the AcceptanceRule of the same name.
_LOSSY = {kind: AcceptanceRule[kind.name] for kind in Acceptance if kind is not Acceptance.EXACT}


def choose_distribution(
    request: TokenRequest,
    offered: frozenset[DraftDistribution],
    *,
    sampled_drafts: bool,
    trusted: bool,
) -> DraftDistribution:
    """Return how a drafter is to choose its tokens for a request.

    `offered` are the methods that the drafter supports. `sampled_drafts` is the verifier's setting.
    Where it is on, `trusted` says whether this drafter's distributions count.
    """
    if request.sampling.greedy:
        return DraftDistribution.ONE_HOT
    exact = request.speculation.acceptance is Acceptance.EXACT
    wanted = DraftDistribution.COUPLED
    if sampled_drafts and exact and request.sampling.seed is None:
        # The request is open to samples.
        wanted = DraftDistribution.SPARSE if trusted else DraftDistribution.ONE_HOT
    if wanted not in offered:
        return DraftDistribution.ONE_HOT
    return wanted


def acceptance_rule(
    request: TokenRequest, sampled_rule: AcceptanceRule | None, synthetic: bool
) -> AcceptanceRule:
    """Return the rule for a draft.

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
