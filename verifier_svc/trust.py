"""Which rule judges which drafts: the one table (docs/losslessness.md has it for people).

A drafter that claims a false distribution can force any token under the rules for sampled drafts, so those are only for drafters
that the operator trusts; and since what they draw enters the output, never for a request with a seed.

| request            | drafter can                  | it is asked to          | its drafts are judged by         |
| ------------------ | ---------------------------- | ----------------------- | -------------------------------- |
| temperature 0      | anything                     | propose its likeliest   | GREEDY                           |
| sampled, no seed   | SPARSE, and is trusted       | sample, and say from what | BLOCK (or TOKEN_WISE, by flag) |
| sampled            | COUPLED                      | draw with our noise     | COUPLED                          |
| sampled            | neither                      | propose its likeliest   | COUPLED                          |
| acceptance TYPICAL | as above, but never SPARSE   | as above                | TYPICAL, which is lossy          |
| acceptance RELAXED | as above, but never SPARSE   | as above                | RELAXED in the thinking phase, which is lossy |

With --synthetic-acceptance-rate every draft is judged by SYNTHETIC.
"""

from __future__ import annotations

from outrider.messages import Acceptance, AcceptanceRule, Rule, TokenRequest

_LOSSY = {Acceptance.TYPICAL: AcceptanceRule.TYPICAL, Acceptance.RELAXED: AcceptanceRule.RELAXED}


def how_to_propose(request: TokenRequest, offered: frozenset[Rule], trusted: bool) -> Rule:
    """What a drafter that offers these ways is asked to do for a request."""
    if request.sampling.greedy:
        return Rule.ONE_HOT
    exact = request.speculation.acceptance is Acceptance.EXACT
    if trusted and exact and request.sampling.seed is None and Rule.SPARSE in offered:
        return Rule.SPARSE
    return Rule.COUPLED if Rule.COUPLED in offered else Rule.ONE_HOT


def judged_by(request: TokenRequest, sampled_rule: AcceptanceRule | None, synthetic: bool) -> AcceptanceRule:
    """The rule for a draft; `sampled_rule` is that for sampled drafts, None when this one brings no distributions."""
    if synthetic:
        return AcceptanceRule.SYNTHETIC
    acceptance = request.speculation.acceptance
    if acceptance is not Acceptance.EXACT:
        return _LOSSY[acceptance]
    if request.sampling.greedy:
        return AcceptanceRule.GREEDY
    return sampled_rule or AcceptanceRule.COUPLED
