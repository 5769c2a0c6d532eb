"""Which commits beside the chain to prepare for: how many other tokens to guess behind each number of accepted ones."""

from __future__ import annotations

# How fast further guesses at one place get less likely: the r of SSD's power law, whose own fits are about 1.
_EXPONENT = 1.0


def fan_out(acceptance: float, depth: int, budget: int) -> list[int]:
    """Branches at each of the `depth` + 1 places, `budget` in all.

    Exactly j of `depth` tokens are accepted with probability a^j (1 - a), all of them with a^depth. Guesses spread so that
    F_j is proportional to that to the power 1 / (1 + r) hit most often, which makes F_j fall as a^(j / (1 + r)) (Saguaro, in SSD,
    arXiv 2603.03251). Rounded by largest remainders.
    """
    a = min(max(acceptance, 0.01), 0.99)
    chances = [a**j * (1 - a) for j in range(depth)] + [a**depth]
    weights = [chance ** (1 / (1 + _EXPONENT)) for chance in chances]
    shares = [budget * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(depth + 1), key=lambda j: counts[j] - shares[j])
    for j in by_remainder[: budget - sum(counts)]:
        counts[j] += 1
    return counts
