"""Chooses the branches to offer beside a chain of guesses, and their number at each place.

A branch guesses the tokens that follow if the verifier accepts the chain up to one place and then
commits another token. docs/drafters.md explains branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafter.draft_sequence import DraftSequence

# The exponent r of SSD's power law: how fast further guesses at one place become less likely. The
# fits in SSD's paper are about 1.
_EXPONENT = 1.0


def fan_out(acceptance: float, depth: int, budget: int) -> list[int]:
    """Spread `budget` branches over the `depth` + 1 places of a draft of `depth` tokens.

    The result has one count for each place. Place j is after the first j tokens of the draft.
    `acceptance`, a, is the probability that a token is accepted if all tokens before it are. Thus
    exactly j tokens are accepted with probability a^j (1 - a), and the whole draft with a^depth.
    The branches are most often right when the count at place j is proportional to that probability
    to the power 1 / (1 + r), so that counts fall as a^(j / (1 + r)) (Saguaro, in SSD, arXiv
    2603.03251).
    Counts are rounded by largest remainders.
    """
    a = min(max(acceptance, 0.01), 0.99)
    probs = [a**j * (1 - a) for j in range(depth)] + [a**depth]
    weights = [prob ** (1 / (1 + _EXPONENT)) for prob in probs]
    shares = [budget * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(depth + 1), key=lambda j: counts[j] - shares[j])
    for j in by_remainder[: budget - sum(counts)]:
        counts[j] += 1
    return counts


@dataclass(slots=True)
class Branch:
    """A branch: the tokens `run` that may follow the first `at` guesses of a chain.

    The first `shared` tokens of `run` are also in earlier branches.
    """

    at: int
    run: Sequence[int]
    confidences: Sequence[float]
    shared: int = 0


def offer_likeliest(sequence: DraftSequence, branches: Sequence[Branch]) -> None:
    """Offer the branches' tokens that are likeliest to be committed, the likeliest first.

    At most `sequence.tree_room` tokens are offered. The probability that a token is committed is
    its cumulative acceptance: the product of its own confidence and the confidences of all tokens
    before it. The product falls along a path, so the likeliest tokens form a tree. This is the rule
    of EAGLE-2 (arXiv 2406.16858).
    """
    room = sequence.tree_room
    if room == 0:
        return
    cumulative_values = _cumulative(sequence, branches)
    ordered = sorted([value for run in cumulative_values for value in run], reverse=True)
    least = ordered[room - 1] if room < len(ordered) else 0.0
    pairs = zip(cumulative_values, branches, strict=True)
    likely = [pair for pair in pairs if pair[0][0] >= least]
    for run, branch in sorted(likely, key=lambda pair: pair[0][0], reverse=True):
        # More tokens may have the value `least` than there is room for.
        count = min(len([value for value in run if value >= least]), room)
        if count == 0:
            break
        room -= count
        count += branch.shared
        sequence.branch(branch.at, branch.run[:count], branch.confidences[:count])


def _cumulative(sequence: DraftSequence, branches: Sequence[Branch]) -> list[list[float]]:
    """Return the cumulative acceptance of each branch's tokens, except the `shared` tokens."""
    reached = [1.0]
    for confidence in sequence.confidences:
        reached.append(reached[-1] * (confidence or sequence.acceptance))
    found: list[list[float]] = []
    for branch in branches:
        cumulative = reached[branch.at]
        run = [cumulative := cumulative * confidence for confidence in branch.confidences]
        found.append(run[branch.shared :])
    return found
