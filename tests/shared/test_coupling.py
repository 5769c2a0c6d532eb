"""The coupled noise agrees with docs/protocol.md, is random, and couples draws."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.protocol.messages import SamplingParams
from outrider.sampling.context import Context
from outrider.sampling.noise import coupled_draw, coupled_keys
from outrider.sampling.sampler import coupled_exponentials, coupled_sample, coupled_top
from tests.accepting import accept
from verifier_svc.verification.draft import Draft

FILE = json.loads((Path(__file__).parents[2] / "protos/coupled_noise.json").read_text())
EDGES = [
    (int(row["key"], 16), row["token"], int(row["z"], 16), row["exponential"])
    for row in FILE["edges"]
]
MASK64, MASK32 = 2**64 - 1, 2**32 - 1
TWO_ULP = 2**-51


def philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK32, (a >> 32) ^ c[3] ^ k[1], a & MASK32]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c


def by_the_document(seed: int, position: int, token: int) -> tuple[int, float]:
    """Return key and E (docs/protocol.md), computed with plain integers."""
    words = philox([position & MASK32, position >> 32, 3, 0], [seed & MASK32, seed >> 32])
    key = words[0] | words[1] << 32
    return key, -math.log(((output(key, token) >> 12) + 0.5) * 2.0**-52)


def output(key: int, token: int) -> int:
    """Return z of docs/protocol.md: output number `token` of SplitMix64."""
    z = (key + (token + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
    return z ^ z >> 31


def test_the_vectors_for_other_languages_agree_with_the_code_and_the_document() -> None:
    for row in FILE["noise"]:
        expected: tuple[int, Any] = (
            int(row["key"], 16),
            pytest.approx(row["exponential"], rel=TWO_ULP),
        )
        assert by_the_document(int(row["seed"]), int(row["position"]), row["token"]) == expected
        keys = coupled_keys([int(row["seed"])], [int(row["position"])])
        assert int(keys[0]) % 2**64 == int(row["key"], 16)
        number = coupled_exponentials(torch.from_numpy(keys), row["token"] + 1)[0, -1].item()
        assert number == pytest.approx(row["exponential"], rel=TWO_ULP)
    for row in FILE["noise"] + FILE["edges"]:
        assert output(int(row["key"], 16), row["token"]) == int(row["z"], 16)
    for row in FILE["draws"]:
        seed, position = int(row["seed"]), int(row["position"])
        drawn = coupled_sample(
            torch.tensor([row["probs"]]), torch.from_numpy(coupled_keys([seed], [position]))
        )
        assert drawn.item() == row["token"] == coupled_draw(row["probs"], seed, position)


def test_the_vectors_for_other_languages_have_the_edges_and_numbers_of_64_bits() -> None:
    assert len(EDGES) == 6
    assert any(int(row["position"]) > 2**32 and int(row["seed"]) == MASK64 for row in FILE["noise"])


def signed(key: int) -> torch.Tensor:
    """Return a key in two's complement, [1]."""
    return torch.tensor([key - 2**64 if key >= 2**63 else key])


@pytest.mark.parametrize(("key", "token", "z", "noise"), EDGES)
def test_the_edges_of_the_noise_are_positive_and_finite(
    key: int, token: int, z: int, noise: float
) -> None:
    assert output(key, token) == z
    number = coupled_exponentials(signed(key), 8)[0, token].item()
    assert number == pytest.approx(noise, rel=TWO_ULP)
    assert 0 < number < math.inf


@pytest.mark.parametrize(("key", "token"), [edge[:2] for edge in EDGES])
def test_at_the_edges_probability_0_never_wins_and_1_always_does(key: int, token: int) -> None:
    banned = torch.full((1, 8), 1 / 7)
    banned[0, token] = 0.0
    assert coupled_sample(banned, signed(key)).item() != token
    assert coupled_sample(1 - (banned > 0).float(), signed(key)).item() == token


@pytest.mark.parametrize(("tokens", "positions"), [(40_000, 1), (1, 40_000), (200, 200)])
def test_the_noise_is_exponential_along_tokens_and_positions(tokens: int, positions: int) -> None:
    keys = torch.from_numpy(coupled_keys(np.full(positions, 9), np.arange(positions)))
    assert stats.kstest(coupled_exponentials(keys, tokens).flatten().numpy(), "expon").pvalue > 1e-4


def test_neighbouring_positions_seeds_and_tokens_share_no_noise() -> None:
    keys = torch.from_numpy(coupled_keys([5, 5, 6], [100, 101, 100]))
    numbers = coupled_exponentials(keys, 50_000).numpy()
    together = np.corrcoef([*numbers, np.roll(numbers[0], 1)])
    assert abs(together - np.eye(4)).max() < 0.02


def test_two_distributions_agree_at_least_as_often_as_the_bound() -> None:
    rng = np.random.default_rng(0)
    keys = torch.from_numpy(coupled_keys(np.full(20_000, 4), np.arange(20_000)))
    for concentration in (0.3, 1.0, 5.0):
        one, other = (torch.from_numpy(rng.dirichlet(np.full(50, concentration))) for _ in range(2))
        tokens = [coupled_sample(probs.repeat(20_000, 1), keys) for probs in (one, other)]
        agree = (tokens[0] == tokens[1]).double().mean()
        distance = (one - other).abs().sum() / 2
        assert agree > (1 - distance) / (1 + distance) - 0.01


def test_all_bits_of_a_seed_change_the_verifiers_draws() -> None:
    seeds = [high * 2**32 + low for low in range(20) for high in (0, 1, 2**31, 2**32 - 1)]
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(1, 50)))
    drawn = [
        accept(logits, [Draft(Context(SamplingParams(), [0] * 4), seed)])[0].next_token
        for seed in seeds
    ]
    noise = [[by_the_document(seed, 4, token)[1] for token in range(50)] for seed in seeds]
    assert drawn == (logits.softmax(-1).numpy() / np.array(noise)).argmax(-1).tolist()
    assert len({tuple(drawn[high::4]) for high in range(4)}) == 4


def test_draws_compare_scores_in_float64() -> None:
    """docs/protocol.md requires float64: in float32 these pairs of close scores often tie."""
    keys = torch.from_numpy(coupled_keys(np.full(2_000, 12), np.arange(2_000)))
    noise = coupled_exponentials(keys, 2)
    probs = torch.stack([torch.ones(2_000), (noise[:, 1] / noise[:, 0]).float()], 1)
    expected = (probs.double() / noise).argmax(-1)
    assert ((probs / noise.float()).argmax(-1) != expected).sum() > 100
    assert torch.equal(coupled_sample(probs, keys), expected)


def test_the_order_of_a_draw_is_that_of_draws_without_the_tokens_before() -> None:
    probs_RV = torch.rand(200, 7, generator=torch.Generator().manual_seed(4))
    probs_RV[:, 2] = 0.0
    keys_R = torch.from_numpy(coupled_keys(range(200), range(200)))
    ids_RK, shares_RK = coupled_top(probs_RV, keys_R, 5)
    left_RV = probs_RV.clone()
    for k in range(5):
        drawn_R1 = coupled_sample(left_RV, keys_R).unsqueeze(-1)
        assert torch.equal(ids_RK[:, k : k + 1], drawn_R1)
        left_RV.scatter_(-1, drawn_R1, 0.0)
    assert (shares_RK.diff(dim=-1) <= 0).all()
    assert (shares_RK > 0).all()
    whole_RK = coupled_top(probs_RV, keys_R, 99)[1]
    assert whole_RK.shape == probs_RV.shape
    assert torch.allclose(whole_RK.sum(-1), torch.ones(200, dtype=torch.float64))
