"""Random numbers are counter-based, and target probabilities equal those of transformers."""

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider.protocol.messages import SamplingParams
from outrider.sampling.noise import Purpose, philox4x32, uniforms
from outrider.sampling.sampler import inverse_cdf, target_probs
from outrider.sampling.tensors import argmax


def test_philox_matches_the_known_answers_of_random123() -> None:
    ones = 0xFFFFFFFF
    counters = np.array(
        [[0] * 4, [ones] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint64
    ).T
    keys = np.array([[0, 0], [ones, ones], [0xA4093822, 0x299F31D0]], np.uint64).T
    expected = [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    assert philox4x32(counters, keys).T.tolist() == expected


def test_a_uniform_depends_on_seed_position_and_purpose_alone() -> None:
    together = uniforms([1, 2, 2**64 - 1], [5, 6, 2**40], Purpose.ACCEPT)
    apart = [uniforms([s], [p], Purpose.ACCEPT)[0] for s, p in ((1, 5), (2, 6), (2**64 - 1, 2**40))]
    assert together.tolist() == apart
    other_positions = uniforms([1, 2], [6, 5], Purpose.ACCEPT)
    other_purpose = uniforms([1, 2], [5, 6], Purpose.COUPLED)
    assert len({*together, *other_positions, *other_purpose}) == 7


@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniforms_are_uniform_along_positions(purpose: Purpose) -> None:
    numbers = uniforms(np.full(50_000, 7), np.arange(50_000), purpose)
    assert stats.kstest(numbers, "uniform").pvalue > 1e-4


@pytest.mark.parametrize(
    ("given", "expected"),
    [(0.0, 0.0), (1e-300, 0.0), (1e-38, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (-1e-9, -1e-9)],
)
def test_a_temperature_too_small_for_float32_is_greedy(given: float, expected: float) -> None:
    """A negative temperature stays unchanged, so the range check refuses it."""
    sampling = SamplingParams(given)
    assert (sampling.temperature, sampling.greedy) == (expected, expected == 0.0)
    probs = target_probs(torch.tensor([[30.0, -30.0]]), [SamplingParams(abs(given))])
    assert probs.isfinite().all()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "typical_p"),
    [
        (1.0, 0, 1.0, 0.0, 1.0),
        (0.7, 5, 1.0, 0.0, 1.0),
        (1.3, 0, 0.8, 0.0, 1.0),
        (0.9, 12, 0.6, 0.0, 1.0),
        (1.0, 1, 0.01, 0.0, 1.0),
        (1.0, 0, 1.0, 0.05, 1.0),
        (0.8, 0, 1.0, 0.0, 0.7),
        (1.5, 40, 0.9, 0.02, 0.9),
        (1.0, 0, 1.0, 1.0, 0.01),
    ],
)
@pytest.mark.parametrize(
    ("vocab_size", "scale"),
    [(200, 3.0), (5000, 6.0), (5000, 0.1)],
    ids=["few tokens", "many, the candidates are enough", "many, the candidates are not enough"],
)
def test_target_probabilities_equal_those_of_transformers(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    vocab_size: int,
    scale: float,
) -> None:
    logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(0)) * scale
    processors = LogitsProcessorList()
    if temperature != 1.0:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    if typical_p < 1:
        processors.append(TypicalLogitsWarper(typical_p))
    expected = processors(torch.zeros(16, 1, dtype=torch.long), logits.clone()).softmax(-1)
    sampling = SamplingParams(temperature, top_k, top_p, min_p=min_p, typical_p=typical_p)
    got = target_probs(logits, [sampling] * 16)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_each_row_has_its_own_settings() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    samplings = [
        SamplingParams(),
        SamplingParams(0.5, 3),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.1, typical_p=0.8),
    ]
    together = target_probs(logits, samplings)
    for i in range(4):
        alone = target_probs(logits[i : i + 1], samplings[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone)


def test_inverse_cdf_never_returns_a_token_without_weight() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.4, 0.0, 0.6, 0.0, 0.0]]).repeat(4, 1)
    edges = torch.tensor([0.0, 0.4, 1 - 2**-53, 0.39999], dtype=torch.float64)
    assert inverse_cdf(weights, edges).tolist() == [2, 4, 4, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_likeliest_token_is_torchs_and_of_equals_the_first(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # The numbers are small and whole, so that most rows have ties.
    rows = torch.randint(-3, 4, (50, 97), generator=generator).to(dtype)
    rows[0] = -torch.inf
    rows[1, 5:9] = torch.inf
    rows[2, [7, 9]] = torch.nan
    found = argmax(rows)
    assert found.tolist() == rows.max(-1).indices.tolist()
    assert found[:3].tolist() == [0, 5, 7]
    assert found.dtype is torch.int64
    assert argmax(rows[:0]).tolist() == []
