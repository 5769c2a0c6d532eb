"""The engine's output follows the target's distribution for every rule, setting and drafter.

The engine generates three tokens with a tiny random model many times, with 0 to 5 draft tokens a
step. The tests compare them with exact enumeration by chi-square. Seeds are fixed: a failure is a
bias, not chance. `sees` is the smallest bias that a test sees, as a total variation distance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from chi_square import LEAST_P, Comparison
from drafted import generate
from exact import (
    END,
    VOCAB,
    NextProbs,
    Probs,
    against_enumeration,
    equal_to_target,
    exact_probs,
    flat,
    on_an_unlikely_token,
    reversed_target,
)

from outrider.protocol.messages import AcceptanceRule, DraftDistribution, SamplingParams
from outrider.sampling.noise import Purpose, uniforms
from verifier_svc.verification import acceptance, rows

SETTINGS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(0.6),
    "top-k": SamplingParams(top_k=5),
    "top-p": SamplingParams(1.3, top_p=0.8),
    "min-p": SamplingParams(min_p=0.02),
    "typical-p": SamplingParams(1.2, typical_p=0.7),
    "penalties": SamplingParams(
        repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5
    ),
    "bias and bans": SamplingParams(logit_bias=((2, 4.0), (12, -3.0)), banned_token_ids=(8, 1)),
    "min-tokens": SamplingParams(1.5, logit_bias=((END, 6.0),), min_tokens=2),
    "everything": SamplingParams(
        1.4,
        12,
        0.95,
        min_p=0.01,
        typical_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        logit_bias=((4, 3.0), (END, 4.0)),
        min_tokens=1,
        banned_token_ids=(11,),
    ),
}
SAMPLES = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE})
RULES: dict[str, dict[str, Any]] = {
    "token-wise": {"offers": SAMPLES, "trust": True, "sampled_rule": AcceptanceRule.TOKEN_WISE},
    "block": {"offers": SAMPLES, "trust": True, "sampled_rule": AcceptanceRule.BLOCK},
    "coupled": {"offers": frozenset({DraftDistribution.ONE_HOT, DraftDistribution.COUPLED})},
    "one-hot": {"offers": frozenset({DraftDistribution.ONE_HOT})},
}
# The quick suite has the simplest and the richest setting, with the drafter that is rejected most.
EXTREMES = ("plain", "everything")
BOTH_RULES = ["token-wise", pytest.param("block", marks=pytest.mark.slow)]
DRAFTERS = {
    "equal": equal_to_target,
    "reversed": reversed_target,
    "unlikely": on_an_unlikely_token,
    "flat": flat,
}


def compared(rule: str, setting: str, drafter: str, draws: int, **more: Any) -> Comparison:
    sampling = SETTINGS[setting]
    draft_probs = DRAFTERS[drafter](sampling)
    samples = generate(sampling, draft_probs, draws, **RULES[rule], **more)
    return against_enumeration(samples, sampling)


@pytest.mark.parametrize("drafter", [pytest.param("equal", marks=pytest.mark.slow), "flat"])
@pytest.mark.parametrize("rule", RULES)
def test_late_drafts_leave_no_trace(rule: str, drafter: str) -> None:
    compared(rule, "plain", drafter, 5_000, late=2).must_agree(sees=0.065)


@pytest.mark.parametrize("drafter", [pytest.param("equal", marks=pytest.mark.slow), "flat"])
@pytest.mark.parametrize("rule", ["token-wise", "block"])
def test_late_sampled_branches_leave_no_trace(rule: str, drafter: str) -> None:
    compared(rule, "plain", drafter, 5_000, late=3, branches=True).must_agree(sees=0.065)


@pytest.mark.parametrize("setting", EXTREMES)
@pytest.mark.parametrize("rule", RULES)
def test_output_follows_the_target_for_every_rule(rule: str, setting: str) -> None:
    compared(rule, setting, "reversed", 5_000, seed=1).must_agree(sees=0.066)


# All pairs of a rule and a setting, a rule and a drafter, and a setting and a drafter. Not all
# triples: a drafter matters to a rule by what it claims, and test_exact_step.py has all claims.
PAIRS = [
    (rule, setting, list(DRAFTERS)[(i + j) % len(DRAFTERS)])
    for i, rule in enumerate(RULES)
    for j, setting in enumerate(SETTINGS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "setting", "drafter"), PAIRS)
def test_output_follows_the_target_for_all_pairs_of_the_three(
    rule: str, setting: str, drafter: str
) -> None:
    compared(rule, setting, drafter, 8_000, seed=1).must_agree(sees=0.061)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token-wise", "block", "coupled"])
def test_two_hundred_thousand_draws_show_no_bias(rule: str) -> None:
    compared(rule, "plain", "reversed", 200_000, seed=2).must_agree(sees=0.017)


@pytest.mark.parametrize(
    "setting",
    [pytest.param(name, marks=[] if name in EXTREMES else pytest.mark.slow) for name in SETTINGS],
)
def test_without_a_drafter_output_follows_the_target(setting: str) -> None:
    sampling = SETTINGS[setting]
    against_enumeration(generate(sampling, None, 8_000), sampling).must_agree(sees=0.061)


# --- the same tests catch mistakes that other servers made ---


def reused_uniform(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, purpose: Purpose, steps: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """The same number for all positions and purposes of a sequence."""
    return uniforms(seeds, np.zeros_like(positions), Purpose.ACCEPT)


def unnormalised(weights_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """As `inverse_cdf`, without scaling to the sum of the weights."""
    points = uniform_R.double().unsqueeze(-1)
    found = torch.searchsorted(weights_RV.cumsum(-1, dtype=torch.float64), points)
    return found.squeeze(-1).clamp(max=VOCAB - 1)


@pytest.mark.parametrize("rule", BOTH_RULES)
def test_noise_used_for_two_purposes_is_caught(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "uniforms", reused_uniform)
    assert compared(rule, "plain", "flat", 5_000).p < LEAST_P


@pytest.mark.parametrize("rule", BOTH_RULES)
def test_an_unnormalised_residual_is_caught(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "inverse_cdf", unnormalised)
    assert compared(rule, "plain", "reversed", 5_000).p < LEAST_P


@pytest.mark.parametrize("rule", BOTH_RULES)
def test_a_drafter_that_drops_unlikely_tokens_is_caught(rule: str) -> None:
    comparison = compared(rule, "plain", "equal", 5_000, drops=lambda prob: prob < 0.5)
    assert comparison.p < LEAST_P


# --- trust ---

RARE = 10


def always_rare(text: tuple[int, ...]) -> Probs:
    """Draw the rare token always."""
    probs = np.zeros(VOCAB)
    probs[RARE] = 1.0
    return probs


def claims_to_be_unlikely(text: tuple[int, ...]) -> Probs:
    """Claim a lower probability of the rare token than the target's own."""
    probs = np.full(VOCAB, 1.0)
    probs[RARE] = 1e-6
    return probs / probs.sum()


def claims_of_liar(claim: str, sampling: SamplingParams) -> NextProbs:
    """The distribution that a drafter claims which always proposes the rare token."""
    return claims_to_be_unlikely if claim == "unlikely" else equal_to_target(sampling)


@pytest.mark.parametrize("claim", ["unlikely", "target"])
@pytest.mark.parametrize("sampled_rule", [AcceptanceRule.TOKEN_WISE, AcceptanceRule.BLOCK])
def test_a_trusted_liar_forces_its_token(sampled_rule: AcceptanceRule, claim: str) -> None:
    sampling = SETTINGS["plain"]
    claims = claims_of_liar(claim, sampling)
    trusted: dict[str, Any] = {"offers": SAMPLES, "trust": True, "sampled_rule": sampled_rule}
    samples = generate(sampling, always_rare, 4_000, claims=claims, **trusted)
    assert (samples[:, 0] == RARE).mean() > 20 * exact_probs(sampling)[()][RARE]
    assert against_enumeration(samples, sampling).p < LEAST_P


@pytest.mark.parametrize("claim", ["unlikely", "target"])
def test_an_untrusted_liar_leaves_no_trace(claim: str) -> None:
    sampling = SETTINGS["plain"]
    samples = generate(
        sampling,
        always_rare,
        8_000,
        claims=claims_of_liar(claim, sampling),
        offers=SAMPLES,
        trust=False,
        sends_distributions=True,
    )
    against_enumeration(samples, sampling).must_agree(sees=0.056)


def test_a_seed_gives_the_same_tokens_with_every_drafter_and_rule() -> None:
    sampling = SETTINGS["everything"]
    plain = generate(sampling, None, 300, seeded=True)
    assert len({tuple(text) for text in plain.tolist()}) > 50
    for rule in RULES.values():
        for make in DRAFTERS.values():
            samples = generate(sampling, make(sampling), 300, seeded=True, **rule)
            assert samples.tolist() == plain.tolist()
