"""The law of one step, exactly: what is committed has the target's distribution to 1e-9, with nothing sampled.

Every draft over a small vocabulary is judged. The coins that decide about it are found by bisection through `accept` itself, so
an acceptance probability is the length of an interval that was measured, and so is the probability of a token that is drawn.
Whatever a step commits, the target goes on behind it; the joint law of so many tokens as the longest step commits is compared
with the target's own. A scenario knows drafts and what is committed, no more, so that it could offer trees as well as chains.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch

from outrider.messages import AcceptanceRule, SamplingParams, SparseDistribution
from outrider.sampling.logits import Context
from outrider.sampling.noise import Purpose
from outrider.sampling.sampler import inverse_cdf
from verifier_svc.verification import acceptance
from verifier_svc.verification.acceptance import Draft, accept

Text = tuple[int, ...]
Law = npt.NDArray[np.float64]
Laws = Callable[[Text], Law]
"""The distribution of the token behind a text."""

TOLERANCE = 1e-9
HALVINGS = 44
POSITION = 7
"""Tokens that were committed before the step."""
MOST = 1 - 2.0**-53
BLOCK, TOKEN_WISE, COUPLED = AcceptanceRule.BLOCK, AcceptanceRule.TOKEN_WISE, AcceptanceRule.COUPLED


@dataclass(frozen=True)
class Scenario:
    """Drafts of one length: sampled from `drafter`, or without it each text by itself, which must not matter at all."""

    rule: AcceptanceRule
    length: int
    target: Laws
    drafter: Laws | None

    def drafts(self, vocab: int) -> Iterator[tuple[Text, float]]:
        """Every draft there can be, and how likely it is."""
        for tokens in itertools.product(range(vocab), repeat=self.length):
            chance = 1.0
            for i, token in enumerate(tokens if self.drafter is not None else ()):
                chance *= self.drafter(tokens[:i])[token]  # type: ignore[misc]
            if chance > 0:
                yield tokens, chance


@dataclass
class Trial:
    """A draft of a scenario, and what is found out about it."""

    scenario: Scenario
    tokens: Text
    chance: float
    thresholds: list[float] = field(default_factory=list)
    """Below its threshold a coin stands."""
    fallen: dict[tuple[bool, ...], int] = field(default_factory=dict)
    """How many tokens are accepted when these coins stand and the others do not."""
    counts: dict[int, float] = field(default_factory=dict)
    """How likely so many are."""
    example: dict[int, Law] = field(default_factory=dict)
    """Coins with which they are, [W]."""
    steps: dict[int, Law] = field(default_factory=dict)
    """Behind so many accepted ones, up to which number each token is drawn, [V]."""

    def next_law(self, accepted: int) -> Law:
        return np.diff(self.steps[accepted], prepend=0.0)


@dataclass
class Coins:
    """Numbers in place of noise, each [N, W]: for the N drafts of a batch, at each of the W positions that a step can reach."""

    accept: Law
    draw: Law
    """For recovered tokens, and for the target's own."""


class Batch:
    """The drafts of some trials, judged in one call, with coins instead of noise; a trial may be there many times."""

    def __init__(self, trials: Sequence[Trial], patch: pytest.MonkeyPatch) -> None:
        self.trials, self._patch = trials, patch
        self.width = 1 + max(trial.scenario.length for trial in trials)
        self._drafts = [_draft(i, trial) for i, trial in enumerate(trials)]
        rows = [
            trial.scenario.target(trial.tokens[:n])
            for trial in trials
            for n in range(len(trial.tokens) + 1)
        ]
        with np.errstate(divide="ignore"):
            self._logits = torch.from_numpy(np.log(np.array(rows)))

    def coins(self, value: float) -> Coins:
        return Coins(*(np.full((len(self.trials), self.width), value) for _ in range(2)))

    def judge(self, coins: Coins) -> list[tuple[int, int]]:
        """Tokens that are accepted, and the one behind them, of each trial."""
        tables = {Purpose.ACCEPT: coins.accept, Purpose.RECOVER: coins.draw}

        def uniforms(seeds: Law, positions: Law, purpose: Purpose, steps: Law) -> Law:
            return tables[purpose][seeds.astype(np.int64), positions - POSITION]

        def keys(seeds: Law, positions: Law) -> npt.NDArray[np.int64]:
            return seeds.astype(np.int64) * self.width + positions - POSITION

        def coupled_sample(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            return inverse_cdf(probs, torch.from_numpy(coins.draw.flatten())[keys])

        self._patch.setattr(acceptance, "uniforms", uniforms)
        self._patch.setattr(acceptance, "coupled_keys", keys)
        self._patch.setattr(acceptance, "coupled_sample", coupled_sample)
        return [
            (outcome.accepted_count, outcome.next_token)
            for outcome in accept(self._logits, self._drafts)
        ]

    def bisect(
        self,
        coins: Coins,
        table: Law,
        column: Sequence[int],
        holds: Callable[[int, int, int], bool],
    ) -> Law:
        """For each trial, up to which value of its coin in a column of `table`, a part of `coins`, something holds; [N]."""
        at = np.arange(len(self.trials)), np.array(column)

        def holds_at(values: Law | float) -> npt.NDArray[np.bool_]:
            table[at] = values
            return np.array([holds(i, *outcome) for i, outcome in enumerate(self.judge(coins))])

        never, always = ~holds_at(0.0), holds_at(MOST)
        low, high = np.zeros(len(self.trials)), np.ones(len(self.trials))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            found = holds_at(middle)
            low, high = np.where(found, middle, low), np.where(found, high, middle)
        return np.where(never, 0.0, np.where(always, 1.0, low))


def _draft(number: int, trial: Trial) -> Draft:
    scenario, tokens = trial.scenario, trial.tokens
    laws = (
        [scenario.drafter(tokens[:i]) for i in range(len(tokens))]
        if scenario.drafter is not None
        else []
    )
    distributions = []
    for law in laws:
        ids = np.flatnonzero(law)[::-1].copy()  # in no order that means anything
        distributions.append(SparseDistribution(ids, law[ids]))
    rule = scenario.rule if distributions else COUPLED
    return Draft(
        Context(SamplingParams(), [0] * POSITION, drafted=tokens), number, rule, distributions
    )


def find_thresholds(trials: Sequence[Trial], patch: pytest.MonkeyPatch) -> None:
    """Of the coin of each token of sampled drafts, those before it standing and those after it not."""
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
    found = batch.bisect(
        coins, coins.accept, columns, lambda n, accepted, token: accepted > columns[n]
    )
    for (trial, _), threshold in zip(pairs, found, strict=True):
        trial.thresholds.append(float(threshold))


def find_counts(trials: Sequence[Trial], patch: pytest.MonkeyPatch) -> None:
    """How many tokens stand for each way in which the coins can fall."""
    cases = [
        (trial, sides)
        for trial in trials
        for sides in itertools.product((True, False), repeat=len(trial.thresholds))
    ]
    batch = Batch([trial for trial, _ in cases], patch)
    coins, chances = batch.coins(0.5), np.ones(len(cases))
    for n, (trial, sides) in enumerate(cases):
        for i, (stands, threshold) in enumerate(zip(sides, trial.thresholds, strict=True)):
            coins.accept[n, i] = threshold / 2 if stands else (1 + threshold) / 2
            chances[n] *= threshold if stands else 1 - threshold
    for n, ((trial, sides), (accepted, _)) in enumerate(
        zip(cases, batch.judge(coins), strict=True)
    ):
        trial.fallen[sides] = accepted
        if chances[n] > 0 and trial.scenario.drafter is not None:
            trial.counts[accepted] = trial.counts.get(accepted, 0.0) + chances[n]
            trial.example[accepted] = coins.accept[n]


def find_next(trials: Sequence[Trial], vocab: int, patch: pytest.MonkeyPatch) -> None:
    """Where the number that draws the next token passes from one to another, for each count that there can be.

    Without a drafter's distribution the target draws at every position, and the draft stands as far as it is what was drawn.
    """
    longest = max(len(trial.tokens) for trial in trials)
    for count in range(longest + 1):
        for trial in trials:
            if trial.scenario.drafter is None and len(trial.tokens) >= count:
                chance = trial.counts[count - 1] if count else 1.0
                if chance > 0 and count:
                    chance *= float(trial.next_law(count - 1)[trial.tokens[count - 1]])
                trial.counts[count] = chance
        pairs = [
            (trial, token)
            for trial in trials
            if trial.counts.get(count, 0.0) > 0
            for token in range(vocab)
        ]
        batch = Batch([trial for trial, _ in pairs], patch)
        coins = batch.coins(0.5)
        for n, (trial, _) in enumerate(pairs):
            if trial.scenario.drafter is not None:
                coins.accept[n, : len(trial.example[count])] = trial.example[count][: batch.width]
            else:
                for i, token in enumerate(trial.tokens[:count]):
                    below = trial.steps[i][token - 1] if token else 0.0
                    coins.draw[n, i] = (below + trial.steps[i][token]) / 2
        columns = [count] * len(pairs)

        def up_to(
            n: int,
            accepted: int,
            token: int,
            count: int = count,
            pairs: list[tuple[Trial, int]] = pairs,
        ) -> bool:
            # Past the count the draft's own token was drawn.
            drawn = pairs[n][0].tokens[count] if accepted > count else token
            return drawn <= pairs[n][1]

        found = batch.bisect(coins, coins.draw, columns, up_to)
        for n, (trial, token) in enumerate(pairs):
            trial.steps.setdefault(count, np.zeros(vocab))[token] = found[n]


def joint_law(trials: Sequence[Trial], target: Laws, vocab: int, length: int) -> Law:
    """Of the first `length` tokens: what the step commits, and the target alone behind that; [V] * length."""
    committed: dict[Text, float] = defaultdict(float)
    for trial in trials:
        sampled = trial.scenario.drafter is not None
        for count, chance in trial.counts.items():
            if chance == 0:
                continue
            law = trial.next_law(count).copy()
            if not sampled and count < len(trial.tokens):
                law[trial.tokens[count]] = 0.0  # then one more is accepted
            for token in np.flatnonzero(law):
                committed[(*trial.tokens[:count], int(token))] += trial.chance * chance * law[token]
    return sum(
        (chance * _continued(text, target, vocab, length) for text, chance in committed.items()),
        np.zeros([vocab] * length),
    )


def _continued(text: Text, target: Laws, vocab: int, length: int) -> Law:
    """The law of `length` tokens that begin with a text, the rest by the target."""
    law = np.zeros([vocab] * length)
    for rest in itertools.product(range(vocab), repeat=length - len(text)):
        whole = (*text, *rest)
        law[whole] = np.prod([target(whole[:i])[whole[i]] for i in range(len(text), length)])
    return law


def deviation(scenarios: Sequence[Scenario], vocab: int, patch: pytest.MonkeyPatch) -> float:
    """The largest deviation of a joint probability from the target's, over all scenarios, judged in one batch."""
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
        groups = [some] if scenario.drafter is not None else [[trial] for trial in some]
        for group in groups:
            worst = max(
                worst, abs(joint_law(group, scenario.target, vocab, length) - expected).max()
            )
    return worst


def check_at_random_coins(trials: Sequence[Trial], patch: pytest.MonkeyPatch) -> None:
    """What was measured one coin at a time foretells what any coins do together."""
    rng = np.random.default_rng(0)
    batch = Batch([trial for trial in trials for _ in range(5)], patch)
    coins = Coins(*(rng.random((len(batch.trials), batch.width)) for _ in range(2)))
    for trial, accepts, draws, outcome in zip(
        batch.trials, coins.accept, coins.draw, batch.judge(coins), strict=True
    ):
        if trial.scenario.drafter is None:
            drawn = [
                int((trial.steps[i] <= draws[i]).sum()) if i in trial.steps else -1
                for i in range(len(trial.tokens) + 1)
            ]
            count = next(
                (i for i, token in enumerate(trial.tokens) if drawn[i] != token), len(trial.tokens)
            )
        else:
            count = trial.fallen[
                tuple(bool(accepts[i] < threshold) for i, threshold in enumerate(trial.thresholds))
            ]
        assert outcome == (count, int((trial.steps[count] <= draws[count]).sum()))


# --- laws -------------------------------------------------------------------------------------------------------------------


def target(vocab: int, seed: int, *, zeros: int = 0, peak: float = 0.8) -> Laws:
    """A law of its own behind each text, with so many tokens that it never takes."""

    @cache
    def law(text: Text) -> Law:
        rng = np.random.default_rng([seed, len(text), *text])
        found = rng.dirichlet(np.full(vocab, peak))
        found[rng.permutation(vocab)[:zeros]] = 0.0
        normalised: Law = found / found.sum()
        return normalised

    return law


def drafter(to: Laws, vocab: int, seed: int, kind: str) -> Laws:
    """Laws to draft from: unlike the target, near it, or it; `sparse` ones have 1, 2, ... entries by position."""
    other = target(vocab, 1000 + seed)

    @cache
    def law(text: Text) -> Law:
        if kind == "equal":
            return to(text)
        found = other(text) if kind != "near" else 0.8 * to(text) + 0.2 * other(text)
        if kind == "sparse":
            kept = 1 + (len(text) + seed) % vocab
            found = np.where(found >= np.sort(found)[-kept], found, 0.0)
        # As the wire has them.
        normalised: Law = (found / found.sum()).astype(np.float32).astype(np.float64)
        return normalised / normalised.sum()

    return law


KINDS = ("unlike", "near", "sparse", "equal")


def mixed(rule: AcceptanceRule, vocab: int, longest: int, seed: int, zeros: int) -> list[Scenario]:
    """All lengths and kinds in one batch, so that each is padded to the others; the last two without distributions."""
    found = []
    for i, length in enumerate([longest, *range(longest)]):
        to = target(vocab, seed + i, zeros=zeros)
        found += [
            Scenario(rule, length, to, drafter(to, vocab, seed + i, kind))
            for kind in KINDS[: 4 if length else 1]
        ]
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
def test_a_step_commits_the_targets_joint_law(
    rule: AcceptanceRule, vocab: int, longest: int, zeros: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        deviation(mixed(rule, vocab, longest, 10 * longest + zeros, zeros), vocab, monkeypatch)
        < TOLERANCE
    )
