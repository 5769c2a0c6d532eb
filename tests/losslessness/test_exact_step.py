"""One step commits the target's joint distribution, exactly to 1e-9, with nothing sampled.

Every draft over a small vocabulary is verified. The joint distribution of as many tokens as the
longest step commits must equal the target's distribution.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from outrider.protocol.messages import AcceptanceRule
from tests.losslessness.exact_step import NextProbs, Probs, Scenario, Text, deviation

TOLERANCE = 1e-9
BLOCK = AcceptanceRule.BLOCK
TOKEN_WISE = AcceptanceRule.TOKEN_WISE
COUPLED = AcceptanceRule.COUPLED


def target(vocab: int, seed: int, *, zeros: int = 0, peak: float = 0.8) -> NextProbs:
    """Return a different distribution after each text; `zeros` tokens have probability 0."""

    @cache
    def probs(text: Text) -> Probs:
        rng = np.random.default_rng([seed, len(text), *text])
        found = rng.dirichlet(np.full(vocab, peak))
        found[rng.permutation(vocab)[:zeros]] = 0.0
        normalised: Probs = found / found.sum()
        return normalised

    return probs


def drafter(to: NextProbs, vocab: int, seed: int, kind: str) -> NextProbs:
    """Return distributions to draft from: unlike the target's, near them, or equal.

    A `sparse` distribution has one entry more than that of the position before, or a single entry
    if that one has all `vocab` entries.
    """
    other = target(vocab, 1000 + seed)

    @cache
    def draft_probs(text: Text) -> Probs:
        if kind == "equal":
            return to(text)
        found = other(text)
        if kind == "near":
            found = 0.8 * to(text) + 0.2 * found
        if kind == "sparse":
            kept = 1 + (len(text) + seed) % vocab
            found = np.where(found >= np.sort(found)[-kept], found, 0.0)
        # Rounded as on the wire.
        normalised: Probs = (found / found.sum()).astype(np.float32).astype(np.float64)
        return normalised / normalised.sum()

    return draft_probs


KINDS = ("unlike", "near", "sparse", "equal")


def mixed(rule: AcceptanceRule, vocab: int, longest: int, seed: int, zeros: int) -> list[Scenario]:
    """Return drafts of all lengths and kinds in one batch, padded to one length.

    The last two scenarios have no distributions.
    """
    found = []
    for i, length in enumerate([longest, *range(longest)]):
        to = target(vocab, seed + i, zeros=zeros)
        kinds = KINDS if length else KINDS[:1]
        found += [Scenario(rule, length, to, drafter(to, vocab, seed + i, kind)) for kind in kinds]
    return [*found, Scenario(COUPLED, longest, to, None), Scenario(COUPLED, 1, to, None)]


CASES = [
    pytest.param(
        rule,
        vocab,
        longest,
        zeros,
        id=f"{rule.name.lower()}-{vocab}-{longest}-{zeros}",
        marks=[pytest.mark.slow] * slow,
    )
    for slow, sizes in ((False, ((3, 2), (3, 3))), (True, ((5, 2), (4, 3), (3, 4))))
    for vocab, longest in sizes
    for rule in (BLOCK, TOKEN_WISE)
    for zeros in (0, 1)
]


@pytest.mark.parametrize(("rule", "vocab", "longest", "zeros"), CASES)
def test_a_step_commits_the_targets_joint_distribution(
    rule: AcceptanceRule, vocab: int, longest: int, zeros: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenarios = mixed(rule, vocab, longest, 10 * longest + zeros, zeros)
    assert deviation(scenarios, vocab, monkeypatch) < TOLERANCE
