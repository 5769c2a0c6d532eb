"""The engine's output follows the target's distribution under each exact rule, in every setting.

The engine generates three tokens many times, with 0 to 5 draft tokens a step. By chi-square, the
tests compare the counts of these texts with exact enumeration. Seeds are fixed: a failure is a
bias, not chance. `sees` is the smallest bias that a test sees, as a total variation distance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from outrider.protocol.messages import AcceptanceRule, DraftDistribution
from outrider.sampling.noise import Purpose, uniforms
from tests.losslessness.chi_square import LEAST_P, Comparison
from tests.losslessness.exact import (
    VOCAB,
    against_enumeration,
    equal_to_target,
    exact_probs,
    flat,
    generate,
    on_an_unlikely_token,
    reversed_target,
)
from tests.losslessness.guesser import Guesser
from tests.losslessness.settings import SETTINGS
from tests.losslessness.small import NextProbs, Probs, Text
from tests.losslessness.traffic import seed_of
from verifier_svc.verification import acceptance, rows

SAMPLES = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE})
COUPLES = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.COUPLED})
# The distributions that the drafter offers, and the verifier's settings.
WAYS: dict[str, tuple[frozenset[DraftDistribution], dict[str, Any]]] = {
    "token-wise": (SAMPLES, {"rule": AcceptanceRule.TOKEN_WISE}),
    "block": (SAMPLES, {"rule": AcceptanceRule.BLOCK}),
    "coupled": (COUPLES, {"trust": False}),
    "one-hot": (frozenset({DraftDistribution.ONE_HOT}), {"trust": False}),
}
# In the quick suite, each rule for sampled drafts has one of two settings: the simplest or the
# richest.
QUICK = (("token-wise", "plain"), ("block", "everything"))
DRAFTERS = {
    "equal": equal_to_target,
    "reversed": reversed_target,
    "unlikely": on_an_unlikely_token,
    "flat": flat,
}


def generated(
    way: str, setting: str, drafter: str, draws: int, *, seeded: bool = False, **behaviour: Any
) -> npt.NDArray[np.int64]:
    """Return the first three tokens of `draws` requests.

    `behaviour` are settings of the drafter.
    """
    offers, verifier = WAYS[way]
    draft_probs = DRAFTERS[drafter](SETTINGS[setting])
    guesser = Guesser(f"{way} {drafter}", draft_probs, offers, **behaviour)
    if seeded:
        verifier = {**verifier, "seed": seed_of}
    return generate(SETTINGS[setting], draws, guesser, **verifier)


def compared(way: str, setting: str, drafter: str, draws: int, **behaviour: Any) -> Comparison:
    samples = generated(way, setting, drafter, draws, **behaviour)
    return against_enumeration(samples, SETTINGS[setting])


@pytest.mark.parametrize("way", [pytest.param("token-wise", marks=pytest.mark.slow), "block"])
def test_late_sampled_branches_leave_no_trace(way: str) -> None:
    comparison = compared(way, "plain", "flat", 5_800, late=3, sampled_branches=True)
    comparison.must_agree(sees=0.065)


# These cases have each rule for sampled drafts with every setting, and with every drafter. They do
# not have all triples: for a rule, drafters differ only in their claims, and test_exact_step.py has
# all claims. With drafts that are not sampled, each request gets the very tokens of plain decoding,
# as a test below shows for all settings.
PAIRS = [
    pytest.param(
        way,
        setting,
        list(DRAFTERS)[(i + j) % len(DRAFTERS)],
        marks=[] if (way, setting) in QUICK else pytest.mark.slow,
    )
    for i, way in enumerate(("token-wise", "block"))
    for j, setting in enumerate(SETTINGS)
]


@pytest.mark.parametrize(("way", "setting", "drafter"), PAIRS)
def test_output_follows_the_target_in_every_setting(way: str, setting: str, drafter: str) -> None:
    compared(way, setting, drafter, 8_000).must_agree(sees=0.061)


@pytest.mark.slow
def test_two_hundred_thousand_draws_show_no_bias() -> None:
    compared("block", "plain", "reversed", 200_000).must_agree(sees=0.017)


def test_without_a_drafter_output_follows_the_target() -> None:
    sampling = SETTINGS["everything"]
    against_enumeration(generate(sampling, 8_000), sampling).must_agree(sees=0.061)


# --- the same tests catch mistakes that other servers made ---


def reused_uniform(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, purpose: Purpose, steps: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Make one number for all positions and purposes of a sequence."""
    return uniforms(seeds, np.zeros_like(positions), Purpose.ACCEPT)


def unnormalised(weights_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """Draw as `inverse_cdf` does, but without scaling to the sum of the weights."""
    points = uniform_R.double().unsqueeze(-1)
    found = torch.searchsorted(weights_RV.cumsum(-1, dtype=torch.float64), points)
    return found.squeeze(-1).clamp(max=VOCAB - 1)


def test_noise_used_for_two_purposes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "uniforms", reused_uniform)
    assert compared("token-wise", "plain", "flat", 2_000).p < LEAST_P


def test_an_unnormalised_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "inverse_cdf", unnormalised)
    assert compared("block", "plain", "reversed", 2_000).p < LEAST_P


def test_a_drafter_that_drops_unlikely_tokens_is_caught() -> None:
    drops: Any = {"stops": lambda token, prob: prob < 0.5}
    assert compared("token-wise", "plain", "equal", 2_000, **drops).p < LEAST_P


# --- trust ---

RARE = 10


def always_rare(text: Text) -> Probs:
    """Always draw the rare token."""
    return np.eye(VOCAB)[RARE]


def claims_to_be_unlikely(text: Text) -> Probs:
    """Claim a lower probability of the rare token than the target's."""
    probs = np.full(VOCAB, 1.0)
    probs[RARE] = 1e-6
    return probs / probs.sum()


def liar(claim: str) -> Guesser:
    """Return a drafter that always proposes the rare token, and claims to have drawn it."""
    claims: NextProbs = equal_to_target(SETTINGS["plain"])
    if claim == "unlikely":
        claims = claims_to_be_unlikely
    return Guesser("liar", always_rare, SAMPLES, claims=claims, always_samples=True)


@pytest.mark.parametrize("claim", ["unlikely", "target"])
def test_a_trusted_liar_forces_its_token(claim: str) -> None:
    sampling = SETTINGS["plain"]
    samples = generate(sampling, 1_000, liar(claim))
    assert (samples[:, 0] == RARE).mean() > 20 * exact_probs(sampling)[()][RARE]
    assert against_enumeration(samples, sampling).p < LEAST_P


def test_an_untrusted_liar_leaves_no_trace() -> None:
    sampling = SETTINGS["plain"]
    samples = generate(sampling, 8_000, liar("unlikely"), trust=False)
    against_enumeration(samples, sampling).must_agree(sees=0.056)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_seed_gives_the_same_tokens_with_every_drafter_and_way(setting: str) -> None:
    plain = generate(SETTINGS[setting], 100, seed=seed_of)
    assert len({tuple(text) for text in plain.tolist()}) > 20
    for way in WAYS:
        for drafter in ("equal", "reversed"):
            samples = generated(way, setting, drafter, 100, seeded=True)
            assert samples.tolist() == plain.tolist()
