"""How many branches to prepare at each place of a chain of guesses.

A branch guesses the tokens that follow if the verifier accepts the chain up to one place and then
commits another token. docs/drafters.md explains branches.
"""

from __future__ import annotations

# The exponent r of SSD's power law: how fast further guesses at one place become less likely. The
# paper's own fits are about 1.
_EXPONENT = 1.0


def fan_out(acceptance: float, depth: int, budget: int) -> list[int]:
    """Spread `budget` branches over the `depth` + 1 places of a draft of `depth` tokens.

    The result has one count for each place. Place j is behind the first j tokens of the draft.
    `acceptance`, a, is the probability that a token is accepted if those before it are. So exactly
    j tokens are accepted with probability a^j (1 - a), and all of them with a^depth. The hit rate
    is highest when the count at place j is proportional to that probability to the power
    1 / (1 + r), and so falls as a^(j / (1 + r)) (Saguaro, in SSD, arXiv 2603.03251). Counts are
    rounded by largest remainders.
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
