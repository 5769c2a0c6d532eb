"""Each acceptance rule, on cases that can be worked out by hand."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import (
    Acceptance,
    AcceptanceRule,
    DraftDistribution,
    SamplingParams,
    SpeculationOptions,
    TokenRequest,
)
from outrider.sampling.context import Context
from tests.accepting import accept
from verifier_svc.verification.batch import DraftVerifier
from verifier_svc.verification.draft import NO_TOKEN, NOT_FINITE, AcceptResult, Draft
from verifier_svc.verification.rule_choice import acceptance_rule, choose_distribution
from verifier_svc.verification.rules import lossy
from verifier_svc.verification.rules.sampled_drafts import SparseDrafts, block, token_wise

TARGET = np.array([1 / 3, 2 / 3])
DRAFTER = np.array([2 / 3, 1 / 3])


def toy(numbers: int = 60) -> tuple[SparseDrafts, np.ndarray]:
    """Return the example of the paper on block verification, arXiv 2403.10444.

    The vocabulary has two tokens, a draft has two tokens, and the context is ignored. In place of
    random numbers there are `numbers` evenly spaced numbers. Returns every draft with every pair of
    these numbers, and the probability of each case.
    """
    points = (np.arange(numbers) + 0.5) / numbers
    cases = list(itertools.product(itertools.product((0, 1), repeat=2), points, points))
    tokens = np.array([case[0] for case in cases])
    ones = np.ones((len(cases), 2, 1))
    drafts = SparseDrafts(
        torch.full((len(cases),), 2),
        torch.from_numpy(DRAFTER[tokens]),
        torch.from_numpy(TARGET[tokens]),
        torch.from_numpy(ones * DRAFTER),
        torch.from_numpy(ones * TARGET),
        torch.from_numpy(np.array([case[1:] for case in cases])),
    )
    return drafts, DRAFTER[tokens].prod(1) / numbers**2


def test_block_accepts_eleven_ninths_where_token_wise_accepts_ten() -> None:
    drafts, weights = toy()
    assert weights.sum() == pytest.approx(1)
    assert (token_wise(drafts).accepted_B.numpy() * weights).sum() == pytest.approx(10 / 9)
    assert (block(drafts).accepted_B.numpy() * weights).sum() == pytest.approx(11 / 9)


def test_typical_acceptance_depends_on_the_targets_entropy() -> None:
    sure = [0.97, 0.01, 0.01, 0.01]
    unsure = [0.25] * 4
    probs = torch.tensor([sure, sure, unsure])
    accepted = lossy.typical(probs, torch.tensor([0, 1, 3]), torch.tensor([0.09] * 3))
    assert accepted.tolist() == [True, False, True]


def test_relaxed_acceptance_takes_the_likeliest_few_within_delta() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 4)
    tokens = torch.tensor([0, 1, 2, 2])
    accepted = lossy.relaxed(probs, tokens, torch.tensor([1, 2, 2, 3]), torch.tensor([0.4] * 4))
    assert accepted.tolist() == [True, True, False, True]
    narrow = torch.tensor([4] * 4), torch.tensor([0.1] * 4)
    assert not lossy.relaxed(probs, tokens, *narrow)[1:].any()
    # A token of probability 0 was banned, or cut off by top-k. It is rejected even if the rule's
    # own k has room for it.
    probs = torch.tensor([[0.5, 0.5, 0.0]] * 2)
    wide = torch.tensor([10, 10]), torch.tensor([1.0, 1.0])
    accepted = lossy.relaxed(probs, torch.tensor([1, 2]), *wide)
    assert accepted.tolist() == [True, False]


def draft(
    tokens: list[int], rule: AcceptanceRule, temperature: float = 1.0, **more: object
) -> Draft:
    return Draft(Context(SamplingParams(temperature), [0], 1, tokens), 7, rule, **more)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossy_rules_reach_the_output_only_when_asked_for(temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.9, -9.0]] * 3)
    options = SpeculationOptions(relaxed_top_k=2, relaxed_delta=0.5)

    def accepted_count(rule: AcceptanceRule) -> int:
        lossy_draft = draft([1, 1], rule, temperature, options=options)
        return accept(logits, [lossy_draft])[0].accepted_count

    assert accepted_count(AcceptanceRule.TYPICAL) == 2
    assert accepted_count(AcceptanceRule.RELAXED) == 2
    assert temperature > 0 or accepted_count(AcceptanceRule.GREEDY) == 0


def test_relaxed_acceptance_is_exact_outside_the_thinking_phase() -> None:
    logits = torch.tensor([[2.0, 1.9, -9.0]] * 3)
    [result] = accept(logits, [draft([1, 1], AcceptanceRule.RELAXED, 0.0, thinking=[True, False])])
    assert result == AcceptResult(1, 0)


def test_the_thinking_phase_ends_before_its_end_token() -> None:
    draft_verifier = DraftVerifier(thinking_ids=(5, 6))
    thinking = draft_verifier._thinking([1, 5, 2], [3, 4, 6, 3, 5, 3])
    assert thinking == [True, True, False, False, False, True]
    assert draft_verifier._thinking([1, 5, 2, 6, 2], [3, 3]) == [False, False]
    assert DraftVerifier()._thinking([1, 5, 2], [3]) == [False]


def test_if_nothing_is_allowed_there_is_no_token() -> None:
    mask = np.array([[0b0110], [0]], np.int32)
    context = Context(SamplingParams(0.0), [0], 1, [2], mask=mask)
    logits = torch.zeros(2, 4).index_fill_(1, torch.tensor([2]), 1.0)
    [result] = accept(logits, [Draft(context, 0, AcceptanceRule.GREEDY)])
    assert result == AcceptResult(1, NO_TOKEN)
    sampled = Draft(Context(SamplingParams(banned_token_ids=(0, 1, 2, 3)), [0], 1), 0)
    assert accept(torch.zeros(1, 4), [sampled])[0].next_token == NO_TOKEN


BROKEN = {
    "NaN": [0.0, torch.nan, 1.0, 0.0],
    "+inf": [0.0, torch.inf, 1.0, 0.0],
    "only -inf": [-torch.inf] * 4,
    "too large to divide": [0.0, 1e35, 1.0, 0.0],
}
SETTINGS = {
    "greedy": SamplingParams(0.0),
    "sampled": SamplingParams(),
    "banned where it is broken": SamplingParams(banned_token_ids=(1,)),
    "greedy, with a bias": SamplingParams(0.0, logit_bias=((0, 1.0),)),
    "top-p": SamplingParams(0.5, top_p=0.9),
}


@pytest.mark.parametrize(
    "rule",
    [
        AcceptanceRule.COUPLED,
        AcceptanceRule.BLOCK,
        AcceptanceRule.TOKEN_WISE,
        AcceptanceRule.TYPICAL,
    ],
)
@pytest.mark.parametrize("broken", BROKEN)
def test_non_finite_logits_give_no_token_and_spare_other_rows(
    broken: str, rule: AcceptanceRule
) -> None:
    sampled = rule in (AcceptanceRule.BLOCK, AcceptanceRule.TOKEN_WISE)
    claims = [SparseDistribution(np.array([2, 3]), np.array([0.5, 0.5]))] if sampled else []
    sure = [-50.0, -50.0, 50.0, -50.0]
    bad = BROKEN[broken]
    for setting in SETTINGS.values():
        drafts = [
            Draft(Context(setting, [0], 1, [2]), 7, rule, claims),
            Draft(Context(setting, [0], 1, [2]), 7, rule, claims),
            Draft(Context(setting, [0], 1), 7),
        ]
        first, second, third = accept(torch.tensor([bad, sure, sure, bad, sure]), drafts)
        assert first == AcceptResult(0, NOT_FINITE)
        assert second.next_token == (NOT_FINITE if second.accepted_count else 2)
        assert third == AcceptResult(0, 2)


def test_a_logit_of_minus_infinity_is_no_error() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf]])
    for sampling in (SamplingParams(0.0), SamplingParams()):
        assert accept(logits, [Draft(Context(sampling, [0], 1), 0)])[0].next_token == 1


def test_if_nothing_is_allowed_no_draft_token_is_accepted() -> None:
    """The argmax of a row without allowed tokens is token 0, which was drafted."""
    nothing = Context(SamplingParams(banned_token_ids=(0, 1, 2, 3)), [0], 1, [0])
    beside = Draft(Context(SamplingParams(), [0], 1, [2]), 5)
    dead, alive = accept(torch.zeros(4, 4), [Draft(nothing, 0), beside])
    assert dead == AcceptResult(0, NO_TOKEN)
    assert alive == accept(torch.zeros(2, 4), [beside])[0]


ONE_HOT = DraftDistribution.ONE_HOT
SPARSE = DraftDistribution.SPARSE
COUPLED = DraftDistribution.COUPLED
ALL = frozenset(DraftDistribution)
SAMPLES = frozenset({ONE_HOT, SPARSE})
COUPLES = frozenset({ONE_HOT, COUPLED})
GREEDY = SamplingParams(0.0)
SAMPLED = SamplingParams(1.0)
SEEDED = SamplingParams(1.0, seed=3)


@pytest.mark.parametrize(
    ("sampling", "offered", "sampled_drafts", "asked"),
    [
        (GREEDY, ALL, True, ONE_HOT),
        (SAMPLED, ALL, True, SPARSE),
        (SAMPLED, ALL, False, COUPLED),
        (SEEDED, ALL, True, COUPLED),
        (SAMPLED, SAMPLES, False, ONE_HOT),
        (SEEDED, SAMPLES, True, ONE_HOT),
        (SAMPLED, frozenset({ONE_HOT}), True, ONE_HOT),
        (SAMPLED, COUPLES, True, ONE_HOT),
        (SEEDED, COUPLES, True, COUPLED),
        (SAMPLED, COUPLES, False, COUPLED),
    ],
)
def test_the_table_of_rules(
    sampling: SamplingParams,
    offered: frozenset[DraftDistribution],
    sampled_drafts: bool,
    asked: DraftDistribution,
) -> None:
    request = TokenRequest([1], 1, sampling)
    setting = {"sampled_drafts": sampled_drafts}
    assert choose_distribution(request, offered, **setting, trusted=True) is asked
    if asked is not SPARSE:
        return
    assert choose_distribution(request, offered, **setting, trusted=False) is ONE_HOT


def test_no_request_has_both_sampled_and_coupled_drafters() -> None:
    for sampling, acceptance, sampled_drafts in itertools.product(
        (GREEDY, SAMPLED, SEEDED), Acceptance, (False, True)
    ):
        options = SpeculationOptions(acceptance=acceptance)
        request = TokenRequest([1], 1, sampling, speculation=options)
        asked = {
            choose_distribution(request, offered, sampled_drafts=sampled_drafts, trusted=trusted)
            for offered in (frozenset({ONE_HOT}), SAMPLES, COUPLES, ALL)
            for trusted in (False, True)
        }
        assert not {SPARSE, COUPLED} <= asked


def test_lossy_acceptance_is_never_sampled_and_says_so() -> None:
    for acceptance, rule in (
        (Acceptance.TYPICAL, AcceptanceRule.TYPICAL),
        (Acceptance.RELAXED, AcceptanceRule.RELAXED),
    ):
        request = TokenRequest([1], 1, speculation=SpeculationOptions(acceptance=acceptance))
        assert choose_distribution(request, ALL, sampled_drafts=True, trusted=True) is COUPLED
        assert acceptance_rule(request, AcceptanceRule.BLOCK, False) is rule
        assert rule.lossy
    exact = TokenRequest([1], 1)
    assert acceptance_rule(exact, AcceptanceRule.BLOCK, False) is AcceptanceRule.BLOCK
    assert acceptance_rule(exact, None, False) is AcceptanceRule.COUPLED
    assert acceptance_rule(exact, None, True).lossy


def test_synthetic_rates_bear_a_step_that_only_reads_prompts() -> None:
    assert accept(torch.zeros(0, 4), [], (0.5,)) == []


@pytest.mark.parametrize(
    ("rates", "tokens", "parents", "expected"),
    [
        # The ratio of the last two rates gives the further rates.
        ((0.8, 0.6, 0.3), 4, (), (0.8, 0.6, 0.3, 0.15)),
        # The second guess of the main path is row 3: the first guess has a sibling.
        ((0.8, 0.4, 0.0), 3, [0, 0, 1], (0.8, 0.4)),
    ],
    ids=["a chain", "a tree"],
)
def test_synthetic_drafts_are_accepted_up_to_each_position_at_its_rate(
    rates: tuple[float, ...],
    tokens: int,
    parents: Sequence[int],
    expected: tuple[float, ...],
) -> None:
    """The target itself never agrees with a draft."""
    count = 4000
    drafts = [
        Draft(
            Context(SamplingParams(0.0), [1], 1, [2] * tokens, frozenset(), parents=parents),
            seed,
            AcceptanceRule.SYNTHETIC,
        )
        for seed in range(count)
    ]
    logits_RV = torch.zeros(count * (tokens + 1), 4)
    logits_RV[:, 3] = 1.0
    found = accept(logits_RV, drafts, rates)
    for position, rate in enumerate(expected):
        reached = sum([result.accepted_count > position for result in found]) / count
        assert reached == pytest.approx(rate, abs=0.035)
    assert {result.next_token for result in found} == {3}
