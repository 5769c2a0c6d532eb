"""Measures the tokens that one step commits, with given random numbers in place of noise.

Bisection through `accept` itself finds the random numbers at which its result changes. So the
length of a measured interval is the probability that a token is accepted, or drawn. After the
committed tokens the target continues without drafts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import AcceptanceRule, SamplingParams
from outrider.sampling.context import Context
from outrider.sampling.noise import Purpose
from outrider.sampling.sampler import inverse_cdf
from tests.accepting import accept
from verifier_svc.verification import acceptance, rows
from verifier_svc.verification.draft import Draft

Text = tuple[int, ...]
Probs = npt.NDArray[np.float64]
NextProbs = Callable[[Text], Probs]
"""The distribution of the token after a text."""

HALVINGS = 44
POSITION = 7
"""The number of tokens that were committed before the step."""
MOST = 1 - 2.0**-53


@dataclass(frozen=True)
class Scenario:
    """Drafts of one length, sampled from `drafter`.

    Without a drafter, each draft is a separate case, and must not affect the output at all.
    """

    rule: AcceptanceRule
    length: int
    target: NextProbs
    drafter: NextProbs | None

    def drafts(self, vocab: int) -> Iterator[tuple[Text, float]]:
        """Yield every possible draft and its probability."""
        for tokens in itertools.product(range(vocab), repeat=self.length):
            prob = 1.0
            if self.drafter is not None:
                for i, token in enumerate(tokens):
                    prob *= self.drafter(tokens[:i])[token]
            if prob > 0:
                yield tokens, prob


@dataclass
class Trial:
    """A draft of a scenario, and its measured values."""

    scenario: Scenario
    tokens: Text
    prob: float
    """The draft's probability."""
    thresholds: list[float] = field(default_factory=list)
    """A coin below its threshold accepts."""
    by_coins: dict[tuple[bool, ...], int] = field(default_factory=dict)
    """The number of accepted tokens, keyed by which coins accept."""
    counts: dict[int, float] = field(default_factory=dict)
    """The probability of each number of accepted tokens."""
    example: dict[int, Probs] = field(default_factory=dict)
    """Coins that give a number of accepted tokens, [W]."""
    steps: dict[int, Probs] = field(default_factory=dict)
    """Keyed by number of accepted tokens: the largest random number that draws each token, [V]."""

    def next_probs(self, accepted: int) -> Probs:
        """Return the distribution of the token after `accepted` draft tokens."""
        return np.diff(self.steps[accepted], prepend=0.0)


@dataclass
class Coins:
    """The random numbers of a batch, [N, W]: N drafts, W positions that a step can reach."""

    accept: Probs
    draw: Probs
    """The numbers that draw recovered tokens and the target's tokens."""


class Batch:
    """Drafts that are verified in one call with given coins. A trial may occur many times."""

    def __init__(self, trials: Sequence[Trial], patch: pytest.MonkeyPatch) -> None:
        self.trials = trials
        self._patch = patch
        self.width = 1 + max(trial.scenario.length for trial in trials)
        self._drafts = [_draft(i, trial) for i, trial in enumerate(trials)]
        probs = [
            trial.scenario.target(trial.tokens[:n])
            for trial in trials
            for n in range(len(trial.tokens) + 1)
        ]
        with np.errstate(divide="ignore"):
            self._logits = torch.from_numpy(np.log(np.array(probs)))

    def coins(self, value: float) -> Coins:
        return Coins(*(np.full((len(self.trials), self.width), value) for _ in range(2)))

    def verify(self, coins: Coins) -> list[tuple[int, int]]:
        """Return for each trial the number of accepted tokens and the token after them."""
        tables = {Purpose.ACCEPT: coins.accept, Purpose.RECOVER: coins.draw}

        def uniforms(seeds: Probs, positions: Probs, purpose: Purpose, steps: Probs) -> Probs:
            return tables[purpose][seeds.astype(np.int64), positions - POSITION]

        def keys(
            seeds: npt.NDArray[Any], positions: npt.NDArray[np.int64]
        ) -> npt.NDArray[np.int64]:
            return seeds.astype(np.int64) * self.width + positions - POSITION

        def coupled_sample(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            return inverse_cdf(probs, torch.from_numpy(coins.draw.flatten())[keys])

        self._patch.setattr(rows, "uniforms", uniforms)
        self._patch.setattr(rows, "coupled_keys", keys)
        self._patch.setattr(acceptance, "coupled_sample", coupled_sample)
        results = accept(self._logits, self._drafts)
        return [(result.accepted_count, result.next_token) for result in results]

    def bisect(
        self,
        coins: Coins,
        table: Probs,
        column: Sequence[int],
        holds: Callable[[int, int, int], bool],
    ) -> Probs:
        """Find the greatest value of one coin for which `holds` is true, in each trial; return [N].

        The coin is in the trial's `column` of `table`, which is a part of `coins`. `holds` gets the
        trial's number and its result.
        """
        at = np.arange(len(self.trials)), np.array(column)

        def holds_at(values: Probs | float) -> npt.NDArray[np.bool_]:
            table[at] = values
            return np.array([holds(i, *result) for i, result in enumerate(self.verify(coins))])

        never = ~holds_at(0.0)
        always = holds_at(MOST)
        low = np.zeros(len(self.trials))
        high = np.ones(len(self.trials))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            found = holds_at(middle)
            low = np.where(found, middle, low)
            high = np.where(found, high, middle)
        return np.where(never, 0.0, np.where(always, 1.0, low))


def _draft(number: int, trial: Trial) -> Draft:
    scenario = trial.scenario
    tokens = trial.tokens
    distributions = []
    if scenario.drafter is not None:
        for i in range(len(tokens)):
            draft_probs = scenario.drafter(tokens[:i])
            # The ids are in reverse, since their order must not matter.
            ids = np.flatnonzero(draft_probs)[::-1].copy()
            distributions.append(SparseDistribution(ids, draft_probs[ids]))
    rule = scenario.rule if distributions else AcceptanceRule.COUPLED
    context = Context(SamplingParams(), [0] * POSITION, drafted=tokens)
    return Draft(context, number, rule, distributions)


def find_thresholds(trials: Sequence[Trial], patch: pytest.MonkeyPatch) -> None:
    """Find each coin's threshold in sampled drafts: a coin below its threshold accepts."""
    pairs = [
        (trial, i)
        for trial in trials
        if trial.scenario.drafter is not None
        for i in range(len(trial.tokens))
    ]
    if not pairs:
        return
    batch = Batch([trial for trial, _ in pairs], patch)
    coins = batch.coins(MOST)
    for n, (_, i) in enumerate(pairs):
        coins.accept[n, :i] = 0.0
    columns = [i for _, i in pairs]

    def is_accepted(n: int, accepted: int, token: int) -> bool:
        return accepted > columns[n]

    found = batch.bisect(coins, coins.accept, columns, is_accepted)
    for (trial, _), threshold in zip(pairs, found, strict=True):
        trial.thresholds.append(float(threshold))


def find_counts(trials: Sequence[Trial], patch: pytest.MonkeyPatch) -> None:
    """Find the number of accepted tokens for each combination of coins that accept."""
    cases = [
        (trial, sides)
        for trial in trials
        for sides in itertools.product((True, False), repeat=len(trial.thresholds))
    ]
    batch = Batch([trial for trial, _ in cases], patch)
    coins = batch.coins(0.5)
    probs = np.ones(len(cases))
    for n, (trial, sides) in enumerate(cases):
        for i, (accepts, threshold) in enumerate(zip(sides, trial.thresholds, strict=True)):
            if accepts:
                coins.accept[n, i] = threshold / 2
                probs[n] *= threshold
            else:
                coins.accept[n, i] = (1 + threshold) / 2
                probs[n] *= 1 - threshold
    for n, (accepted, _) in enumerate(batch.verify(coins)):
        trial, sides = cases[n]
        trial.by_coins[sides] = accepted
        if probs[n] > 0 and trial.scenario.drafter is not None:
            trial.counts[accepted] = trial.counts.get(accepted, 0.0) + probs[n]
            trial.example[accepted] = coins.accept[n]


def find_next(trials: Sequence[Trial], vocab: int, patch: pytest.MonkeyPatch) -> None:
    """Find where the next token changes with its random number, for each number of accepted tokens.

    Without a drafter's distribution, the target draws at every position, and accepts draft tokens
    as long as they equal the draws.
    """
    longest = max(len(trial.tokens) for trial in trials)
    for count in range(longest + 1):
        set_coupled_counts(trials, count)
        possible = [trial for trial in trials if trial.counts.get(count, 0.0) > 0]
        pairs = [(trial, token) for trial in possible for token in range(vocab)]
        find_steps(pairs, count, vocab, patch)


def set_coupled_counts(trials: Sequence[Trial], count: int) -> None:
    """Set the probability that the target draws the first `count` tokens of a draft."""
    for trial in trials:
        if trial.scenario.drafter is None and len(trial.tokens) >= count:
            prob = trial.counts[count - 1] if count else 1.0
            if prob > 0 and count:
                prob *= float(trial.next_probs(count - 1)[trial.tokens[count - 1]])
            trial.counts[count] = prob


def find_steps(
    pairs: Sequence[tuple[Trial, int]], count: int, vocab: int, patch: pytest.MonkeyPatch
) -> None:
    """Find the largest random number with which each trial draws its token after `count` tokens."""
    batch = Batch([trial for trial, _ in pairs], patch)
    coins = batch.coins(0.5)
    for n, (trial, _) in enumerate(pairs):
        if trial.scenario.drafter is not None:
            coins.accept[n, : len(trial.example[count])] = trial.example[count][: batch.width]
        else:
            for i, token in enumerate(trial.tokens[:count]):
                below = trial.steps[i][token - 1] if token else 0.0
                coins.draw[n, i] = (below + trial.steps[i][token]) / 2

    def up_to(n: int, accepted: int, token: int) -> bool:
        trial, last = pairs[n]
        # If more tokens are accepted, the draw was the draft's token.
        drawn = trial.tokens[count] if accepted > count else token
        return drawn <= last

    found = batch.bisect(coins, coins.draw, [count] * len(pairs), up_to)
    for n, (trial, token) in enumerate(pairs):
        trial.steps.setdefault(count, np.zeros(vocab))[token] = found[n]


def joint_probs(trials: Sequence[Trial], target: NextProbs, vocab: int, length: int) -> Probs:
    """Return the joint distribution of `length` tokens, [V] * length.

    The first tokens come from the step, and the target draws the tokens after them.
    """
    committed: dict[Text, float] = defaultdict(float)
    for trial in trials:
        sampled = trial.scenario.drafter is not None
        for count, prob in trial.counts.items():
            if prob == 0:
                continue
            probs = trial.next_probs(count).copy()
            if not sampled and count < len(trial.tokens):
                # If the draw were this draft token, it would be accepted.
                probs[trial.tokens[count]] = 0.0
            for token in np.flatnonzero(probs):
                committed[(*trial.tokens[:count], int(token))] += trial.prob * prob * probs[token]
    found = np.zeros([vocab] * length)
    for text, prob in committed.items():
        found += prob * _continued(text, target, vocab, length)
    return found


def _continued(text: Text, target: NextProbs, vocab: int, length: int) -> Probs:
    """Return the distribution of `length` tokens that begin with `text`.

    The target draws the tokens after `text`.
    """
    probs = np.zeros([vocab] * length)
    for rest in itertools.product(range(vocab), repeat=length - len(text)):
        whole = (*text, *rest)
        probs[whole] = np.prod([target(whole[:i])[whole[i]] for i in range(len(text), length)])
    return probs


def deviation(scenarios: Sequence[Scenario], vocab: int, patch: pytest.MonkeyPatch) -> float:
    """Return the largest deviation of a joint probability from the target's, over all scenarios.

    All scenarios share a batch.
    """
    trials = [
        [Trial(scenario, *draft) for draft in scenario.drafts(vocab)] for scenario in scenarios
    ]
    together = [trial for some in trials for trial in some]
    find_thresholds(together, patch)
    find_counts(together, patch)
    find_next(together, vocab, patch)
    check_at_random_coins(together, patch)
    length = 1 + max(scenario.length for scenario in scenarios)
    worst = 0.0
    for scenario, some in zip(scenarios, trials, strict=True):
        expected = _continued((), scenario.target, vocab, length)
        groups = [some]
        if scenario.drafter is None:
            groups = [[trial] for trial in some]
        for group in groups:
            found = joint_probs(group, scenario.target, vocab, length)
            worst = max(worst, abs(found - expected).max())
    return worst


def check_at_random_coins(trials: Sequence[Trial], patch: pytest.MonkeyPatch) -> None:
    """Check that results with random coins agree with the separate measurements of the coins."""
    rng = np.random.default_rng(0)
    batch = Batch([trial for trial in trials for _ in range(5)], patch)
    coins = Coins(*(rng.random((len(batch.trials), batch.width)) for _ in range(2)))
    results = batch.verify(coins)
    for n, trial in enumerate(batch.trials):
        count = predicted_count(trial, coins.accept[n], coins.draw[n])
        assert results[n] == (count, drawn_token(trial, count, coins.draw[n]))


def predicted_count(trial: Trial, accept_coins: Probs, draw_coins: Probs) -> int:
    """Return how many tokens of a trial are accepted with these coins."""
    if trial.scenario.drafter is not None:
        sides = [bool(accept_coins[i] < each) for i, each in enumerate(trial.thresholds)]
        return trial.by_coins[tuple(sides)]
    for i, token in enumerate(trial.tokens):
        if i not in trial.steps or drawn_token(trial, i, draw_coins) != token:
            return i
    return len(trial.tokens)


def drawn_token(trial: Trial, count: int, draw_coins: Probs) -> int:
    """Return the token that a trial draws after `count` accepted tokens."""
    return int((trial.steps[count] <= draw_coins[count]).sum())
