"""The acceptance rules one by one, on cases that can be worked out by hand."""

import itertools

import numpy as np
import pytest
import torch

from outrider.messages import (
    Acceptance,
    AcceptanceRule,
    DraftDistribution,
    SamplingParams,
    SparseDistribution,
    SpeculationOptions,
    TokenRequest,
)
from outrider.sampling.logits import Context
from verifier_svc.verification.acceptance import NO_TOKEN, NOT_FINITE, Draft, accept
from verifier_svc.verification.batch import DraftVerifier
from verifier_svc.verification.rule_choice import acceptance_rule, how_to_propose
from verifier_svc.verification.rules import block, lossy, token_wise
from verifier_svc.verification.rules.sparse import SparseDrafts

TARGET, DRAFTER = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])


def toy(numbers: int = 60) -> tuple[SparseDrafts, np.ndarray]:
    """The example of the paper on block verification, arXiv 2403.10444: two tokens, drafts of two, context ignored.

    Every draft with every pair of evenly spread numbers, and how likely the draft is.
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


def test_block_accepts_eleven_ninths_where_token_wise_accepts_ten() -> (
    None
):
    drafts, weights = toy()
    assert weights.sum() == pytest.approx(1)
    assert (token_wise.accept(drafts).accepted_B.numpy() * weights).sum() == pytest.approx(10 / 9)
    assert (block.accept(drafts).accepted_B.numpy() * weights).sum() == pytest.approx(11 / 9)


def test_the_last_accepted_position_decides_not_the_first_rejected() -> None:
    # Tokens (0, 1): the first alone can never end a block here, but the pair is always taken.
    drafts, _ = toy(4)
    pair = (drafts.target_BK[:, 0] < 0.5) & (drafts.target_BK[:, 1] > 0.5)
    assert (block.accept(drafts).accepted_B[pair] == 2).all()
    assert (token_wise.accept(drafts).accepted_B[pair] == 0).any()


def test_with_one_hot_drafts_block_equals_token_wise() -> (
    None
):
    """A one-hot distribution leaves nothing to pay with, so block verification is the token-wise rule."""
    numbers = 40
    points = (np.arange(numbers) + 0.5) / numbers
    uniform = torch.from_numpy(np.array(list(itertools.product(points, points))))
    count = len(uniform)
    ones = torch.ones(count, 2, dtype=torch.float64)
    target = torch.tensor([0.5, 0.75], dtype=torch.float64).expand(count, 2)
    drafts = SparseDrafts(
        torch.full((count,), 2), ones, target, ones.unsqueeze(-1), target.unsqueeze(-1), uniform
    )
    for rule in (token_wise, block):
        accepted = rule.accept(drafts).accepted_B
        assert [(accepted == n).double().mean().item() for n in range(3)] == pytest.approx(
            [0.5, 0.125, 0.375], abs=0.02
        )


@pytest.mark.parametrize("seed", range(5))
def test_block_verification_never_accepts_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, depth, vocab = 20_000, 4, 6
    target, drafter = (
        rng.dirichlet(np.ones(vocab) * 0.6, (depth,)),
        rng.dirichlet(np.ones(vocab) * 0.6, (depth,)),
    )
    tokens = np.stack([rng.choice(vocab, count, p=law) for law in drafter], 1)
    at = np.arange(depth)
    lengths = rng.integers(0, depth + 1, count)
    real = at < lengths[:, None]
    drafts = SparseDrafts(
        torch.from_numpy(lengths),
        torch.from_numpy(drafter[at, tokens] * real),
        torch.from_numpy(target[at, tokens] * real),
        torch.from_numpy(drafter * real[..., None]),
        torch.from_numpy(target * real[..., None]),
        torch.from_numpy(rng.random((count, depth))),
    )
    kept = [rule.accept(drafts).accepted_B.double() for rule in (token_wise, block)]
    assert kept[1].mean() > kept[0].mean() - 0.01
    assert (kept[1] <= drafts.lengths_B).all()


def test_typical_acceptance_depends_on_the_targets_entropy() -> None:
    sure, unsure = [0.97, 0.01, 0.01, 0.01], [0.25] * 4
    probs = torch.tensor([sure, sure, unsure])
    assert lossy.typical(probs, torch.tensor([0, 1, 3]), torch.full((3,), 0.09)).tolist() == [
        True,
        False,
        True,
    ]


def test_relaxed_acceptance_takes_the_likeliest_few_within_delta() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 4)
    draft, topk = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 2, 2, 3])
    assert lossy.relaxed(probs, draft, topk, torch.full((4,), 0.4)).tolist() == [
        True,
        True,
        False,
        True,
    ]
    assert not lossy.relaxed(probs, draft, torch.full((4,), 4), torch.full((4,), 0.1))[1:].any()
    # However few tokens there are, what has no probability is banned, or cut off by top-k.
    assert lossy.relaxed(
        torch.tensor([[0.5, 0.5, 0.0]] * 2),
        torch.tensor([1, 2]),
        torch.tensor([10] * 2),
        torch.ones(2),
    ).tolist() == [
        True,
        False,
    ]


def draft(
    tokens: list[int], rule: AcceptanceRule, temperature: float = 1.0, **more: object
) -> Draft:
    return Draft(Context(SamplingParams(temperature), [0], 1, tokens), 7, rule, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossy_rules_reach_the_output_only_when_asked_for(temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.9, -9.0]] * 3)
    options = SpeculationOptions(relaxed_topk=2, relaxed_delta=0.5)
    runs = {
        rule: accept(
            logits, [draft([1, 1], rule, temperature, options=options, thinking=[True, True])]
        )[0].accepted_count
        for rule in (AcceptanceRule.GREEDY, AcceptanceRule.TYPICAL, AcceptanceRule.RELAXED)
    }
    assert runs[AcceptanceRule.TYPICAL] == runs[AcceptanceRule.RELAXED] == 2
    assert temperature > 0 or runs[AcceptanceRule.GREEDY] == 0


def test_relaxed_acceptance_is_exact_outside_the_thinking_phase() -> None:
    logits = torch.tensor([[2.0, 1.9, -9.0]] * 3)
    [outcome] = accept(logits, [draft([1, 1], AcceptanceRule.RELAXED, 0.0, thinking=[True, False])])
    assert (outcome.accepted_count, outcome.next_token) == (1, 0)


def test_the_thinking_phase_ends_before_its_end_token() -> None:
    draft_verifier = DraftVerifier(thinking_ids=(5, 6))

    assert draft_verifier._thinking([1, 5, 2], [3, 4, 6, 3, 5, 3]) == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]
    assert draft_verifier._thinking([1, 5, 2, 6, 2], [3, 3]) == [False, False]
    assert DraftVerifier()._thinking([1, 5, 2], [3]) == [False]


def test_a_synthetic_rate_is_met_with_any_target() -> None:
    drafts = [
        Draft(Context(SamplingParams(), [0] * 3, 3, [1, 2, 3, 4]), seed, AcceptanceRule.SYNTHETIC)
        for seed in range(4_000)
    ]
    outcomes = accept(torch.full((5 * 4_000, 6), -9.0), drafts, synthetic_rate=0.8)
    first = np.mean([outcome.accepted_count >= 1 for outcome in outcomes])
    assert first == pytest.approx(0.8, abs=0.02)
    assert np.mean([outcome.accepted_count for outcome in outcomes]) == pytest.approx(
        sum(0.8**i for i in range(1, 5)), abs=0.05
    )


def test_if_nothing_is_allowed_there_is_no_token() -> None:
    mask = np.array([[0b0110], [0]], np.int32)
    context = Context(SamplingParams(0.0), [0], 1, [2], mask=mask)
    [outcome] = accept(
        torch.zeros(2, 4).index_fill_(1, torch.tensor([2]), 1.0),
        [Draft(context, 0, AcceptanceRule.GREEDY)],
    )
    assert (outcome.accepted_count, outcome.next_token) == (1, NO_TOKEN)
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
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("broken", BROKEN)
def test_non_finite_logits_give_no_token_and_spare_other_rows(
    broken: str, setting: str, rule: AcceptanceRule
) -> None:
    sampled = rule in (AcceptanceRule.BLOCK, AcceptanceRule.TOKEN_WISE)
    law = [SparseDistribution(np.array([2, 3]), np.array([0.5, 0.5]))] if sampled else []
    sure, bad = [-50.0, -50.0, 50.0, -50.0], BROKEN[broken]
    drafts = [
        Draft(Context(SETTINGS[setting], [0], 1, [2]), 7, rule, law),
        Draft(Context(SETTINGS[setting], [0], 1, [2]), 7, rule, law),
        Draft(Context(SETTINGS[setting], [0], 1), 7),
    ]
    first, second, third = accept(torch.tensor([bad, sure, sure, bad, sure]), drafts)
    assert (first.accepted_count, first.next_token) == (0, NOT_FINITE)
    assert second.next_token == (NOT_FINITE if second.accepted_count else 2)
    assert (third.accepted_count, third.next_token) == (0, 2)


def test_a_logit_of_minus_infinity_is_no_error() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf]])
    for sampling in (SamplingParams(0.0), SamplingParams()):
        assert accept(logits, [Draft(Context(sampling, [0], 1), 0)])[0].next_token == 1


def test_if_nothing_is_allowed_no_draft_token_is_accepted() -> None:
    """Of a row without any chance the argmax is token 0, which was drafted."""
    nothing = Context(SamplingParams(banned_token_ids=(0, 1, 2, 3)), [0], 1, [0])
    beside = Draft(Context(SamplingParams(), [0], 1, [2]), 5)
    dead, alive = accept(torch.zeros(4, 4), [Draft(nothing, 0), beside])
    assert (dead.accepted_count, dead.next_token) == (0, NO_TOKEN)
    assert alive == accept(torch.zeros(2, 4), [beside])[0]


ALL = frozenset(DraftDistribution)


@pytest.mark.parametrize(
    ("request_", "offered", "trusted", "asked"),
    [
        (SamplingParams(0.0), ALL, True, DraftDistribution.ONE_HOT),
        (SamplingParams(1.0), ALL, True, DraftDistribution.SPARSE),
        (SamplingParams(1.0), ALL, False, DraftDistribution.COUPLED),
        (SamplingParams(1.0, seed=3), ALL, True, DraftDistribution.COUPLED),
        (
            SamplingParams(1.0),
            frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE}),
            False,
            DraftDistribution.ONE_HOT,
        ),
        (
            SamplingParams(1.0, seed=3),
            frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE}),
            True,
            DraftDistribution.ONE_HOT,
        ),
        (
            SamplingParams(1.0),
            frozenset({DraftDistribution.ONE_HOT}),
            True,
            DraftDistribution.ONE_HOT,
        ),
        (
            SamplingParams(1.0),
            frozenset({DraftDistribution.ONE_HOT, DraftDistribution.COUPLED}),
            True,
            DraftDistribution.ONE_HOT,
        ),
        (
            SamplingParams(1.0, seed=3),
            frozenset({DraftDistribution.ONE_HOT, DraftDistribution.COUPLED}),
            True,
            DraftDistribution.COUPLED,
        ),
        (
            SamplingParams(1.0),
            frozenset({DraftDistribution.ONE_HOT, DraftDistribution.COUPLED}),
            False,
            DraftDistribution.COUPLED,
        ),
    ],
)
def test_the_table_of_rules(
    request_: SamplingParams,
    offered: frozenset[DraftDistribution],
    trusted: bool,
    asked: DraftDistribution,
) -> None:
    assert how_to_propose(TokenRequest([1], 1, request_), offered, trusted) is asked


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("acceptance", Acceptance)
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_request_has_both_sampled_and_coupled_drafters(
    seed: int | None, acceptance: Acceptance, trusted: bool, temperature: float
) -> None:
    request = TokenRequest(
        [1],
        1,
        SamplingParams(temperature, seed=seed),
        speculation=SpeculationOptions(acceptance=acceptance),
    )
    kinds = [
        frozenset({DraftDistribution.ONE_HOT, *more})
        for more in (
            (),
            (DraftDistribution.SPARSE,),
            (DraftDistribution.COUPLED,),
            (DraftDistribution.SPARSE, DraftDistribution.COUPLED),
        )
    ]
    asked = {how_to_propose(request, offered, trusted) for offered in kinds}
    assert not {DraftDistribution.SPARSE, DraftDistribution.COUPLED} <= asked


def test_lossy_acceptance_is_never_sampled_and_says_so() -> None:
    for acceptance, rule in (
        (Acceptance.TYPICAL, AcceptanceRule.TYPICAL),
        (Acceptance.RELAXED, AcceptanceRule.RELAXED),
    ):
        request = TokenRequest([1], 1, speculation=SpeculationOptions(acceptance=acceptance))
        assert how_to_propose(request, ALL, True) is DraftDistribution.COUPLED
        assert acceptance_rule(request, AcceptanceRule.BLOCK, False) is rule
        assert rule.lossy
    exact = TokenRequest([1], 1)
    assert acceptance_rule(exact, AcceptanceRule.BLOCK, False) is AcceptanceRule.BLOCK
    assert acceptance_rule(exact, None, False) is AcceptanceRule.COUPLED
    assert acceptance_rule(exact, None, True).lossy


def test_short_and_empty_drafts_share_a_batch_with_sampled_ones() -> None:
    law = SparseDistribution(np.array([1, 2]), np.array([0.5, 0.5]))
    sampled = draft([1, 2], AcceptanceRule.BLOCK, distributions=[law, law])
    logits = torch.randn(3 + 1 + 2, 4, generator=torch.Generator().manual_seed(0))
    together = accept(
        logits, [sampled, draft([], AcceptanceRule.COUPLED), draft([3], AcceptanceRule.COUPLED)]
    )
    assert together[0] == accept(logits[:3], [sampled])[0]
    assert together[1] == accept(logits[3:4], [draft([], AcceptanceRule.COUPLED)])[0]
