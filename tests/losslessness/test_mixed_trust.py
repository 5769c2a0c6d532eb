"""Beside a trusted drafter that samples, untrusted drafters leave no trace in the output.

The untrusted drafter can draw with the verifier's noise. It drafts honestly until the verifier has
measured a high acceptance. From then on it drafts only where its first guess is one chosen token.
If it knew the noise, the noise would decide where it drafts, and sampled drafts would be verified
in all other places. So the output would have that token too often, though no drafter made a false
claim.
"""

from __future__ import annotations

import itertools

import pytest

from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.draft_messages import Opened, StepBatch
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import AcceptanceRule, DraftDistribution
from tests.losslessness.chi_square import compare
from tests.losslessness.guesser import Guesser
from tests.losslessness.small import Probs, near, target_probs
from tests.losslessness.traffic import Traffic

DRAWS = 20_000
SEES = 0.045
HONEST = 500
"""The number of requests for which the untrusted drafter drafts honestly."""
LONGEST = 4
ONE_HOT = DraftDistribution.ONE_HOT
SPARSE = DraftDistribution.SPARSE
COUPLED = DraftDistribution.COUPLED


class Speaking(Guesser):
    """An untrusted drafter that later drafts only if its first guess is the token `spoken`."""

    trusted = False

    def __init__(self, spoken: int) -> None:
        offers = {ONE_HOT, COUPLED}
        lengths = {"shortest": LONGEST, "longest": LONGEST}
        super().__init__("speaking", target_probs, offers, silent=0.0, **lengths)
        self._spoken = spoken
        self.opened: list[Opened] = []

    def _read(self, step: StepBatch) -> None:
        self.opened += step.opened
        super()._read(step)

    def _grow_chain(self, sequence: DraftSequence, count: int, noise: Probs) -> None:
        if len(self.opened) > HONEST and not sequence.guesses:
            first = int((target_probs(tuple(sequence.tokens)) / noise[0]).argmax())
            if first != self._spoken:
                return
        super()._grow_chain(sequence, count, noise)


def drafters(spoken: int) -> tuple[Guesser, Speaking]:
    """Return a trusted drafter that samples, and an untrusted `Speaking` drafter."""
    sampling = Guesser(
        "sampling", near(target_probs), {ONE_HOT, SPARSE}, silent=0.3, shortest=1, longest=LONGEST
    )
    return sampling, Speaking(spoken)


def traffic(rule: AcceptanceRule, *, in_waves: bool = False) -> Traffic:
    policy = DraftTokensPolicy("fixed", LONGEST)
    return Traffic(prompts=((1, 2),), rule=rule, policy=policy, in_waves=in_waves)


@pytest.mark.slow  # a minute each: a bias of this size needs many draws
@pytest.mark.parametrize("rule", [AcceptanceRule.BLOCK, AcceptanceRule.TOKEN_WISE])
@pytest.mark.parametrize("spoken", [2, 3])
def test_an_untrusted_drafter_that_speaks_by_token_changes_no_distribution(
    rule: AcceptanceRule, spoken: int
) -> None:
    sampling, speaking = drafters(spoken)
    load = traffic(rule)
    texts = load.run(HONEST + DRAWS, sampling, speaking)[HONEST:]
    assert sampling.proposed[SPARSE] > DRAWS
    assert sum(speaking.proposed.values()) > 0
    compare(load.observed(texts), load.expected(DRAWS)).must_agree(SEES)


@pytest.mark.slow  # half a minute: a bias of this size needs many draws
def test_a_full_cache_does_not_choose_sampled_tokens_by_what_follows_them() -> None:
    samples = {ONE_HOT, SPARSE}
    stopping = Guesser(
        "stopping",
        near(target_probs),
        samples,
        silent=0.0,
        shortest=5,
        ends=lambda token: token == 2,
    )
    load = Traffic(
        prompts=((1, 2),),
        policy=DraftTokensPolicy("fixed", 5),
        page_count=20,
        page_size=2,
        concurrent=8,
    )
    texts = load.run(10_000, stopping)
    assert load.engine.scheduler.preemption_count > 0
    compare(load.observed(texts), load.expected(10_000)).must_agree(0.06)


@pytest.mark.parametrize("order", list(itertools.permutations(("sampling", "speaking"))))
@pytest.mark.parametrize("late", [False, True])
def test_an_untrusted_drafter_never_learns_the_noise_of_a_request_open_to_samples(
    order: tuple[str, str], late: bool
) -> None:
    """If `late`, the second drafter joins in mid-text, and later the first leaves for a while."""
    sampling, speaking = drafters(2)
    first, second = sorted((sampling, speaking), key=lambda drafter: order.index(drafter.name))
    load = traffic(AcceptanceRule.BLOCK)

    def join_and_leave(tick: int) -> None:
        if tick == 0:
            second.leave()
        elif tick == 3:
            second.join(load.engine)
        elif tick == 6:
            first.leave()
        elif tick == 9:
            first.join(load.engine)

    if late:
        load.events = join_and_leave
    load.run(600, first, second)
    assert speaking.opened
    asked = {(opened.distribution, opened.sampling.seed) for opened in speaking.opened}
    assert asked == {(ONE_HOT, None)}
    assert sampling.proposed[SPARSE] > 0
