"""The real draft model, which samples from its few likeliest tokens, does not bias the output."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from chi_square import LEAST_P
from drafted import make_engine
from exact import LENGTH, PROMPT, VOCAB, against_enumeration, tiny_model

from drafter_svc.families import forwards
from drafter_svc.families.draft_model import DraftModel
from drafter_svc.families.model import ModelFamily
from outrider.drafter.session import DraftSession
from outrider.errors import OutriderError
from outrider.lm.runner import ModelRunner
from outrider.protocol.draft_messages import Hello, StepBatch
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import (
    AcceptanceRule,
    DraftDistribution,
    SamplingParams,
    TokenChunk,
    TokenRequest,
)
from verifier_svc.engine.config import EngineConfig

CONCURRENT = 256
ENTRIES = 6
SETTINGS = {
    "plain": SamplingParams(),
    "penalties": SamplingParams(0.8, top_p=0.9, repetition_penalty=1.3),
}


def near_target() -> torch.nn.Module:
    """The target with slightly perturbed weights."""
    near = copy.deepcopy(tiny_model())
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.mul_(1 + 0.15 * torch.randn(parameter.shape, generator=noise))
    return near


@pytest.fixture
def family() -> Iterator[ModelFamily]:
    with ThreadPoolExecutor(1) as thread:
        runner = ModelRunner(near_target(), page_size=4, page_count=16 * CONCURRENT)
        model = DraftModel(runner, thread, max_batch_tokens=8 * CONCURRENT, max_entries=ENTRIES)
        yield ModelFamily(model, VOCAB)


def generate(
    family: ModelFamily, sampling: SamplingParams, rule: AcceptanceRule, draws: int
) -> npt.NDArray[np.int64]:
    """The first three tokens of so many requests, [draws, 3], drafted by the family."""
    config = EngineConfig(
        DraftTokensPolicy("fixed", 3), 16 * CONCURRENT, CONCURRENT, 2 * CONCURRENT
    )
    engine = make_engine(rule, True, config, 8 * CONCURRENT)
    texts: list[list[int]] = [[] for _ in range(draws)]
    session = DraftSession(family)

    def on_message(step: StepBatch | OutriderError) -> None:
        assert isinstance(step, StepBatch), step
        assert all(opened.distribution is DraftDistribution.SPARSE for opened in step.opened)
        session.apply(step)

    hello = Hello("model", "model", "f", 12, distributions=family.distributions)
    handle = engine.drafting.join(hello, on_message)
    own = np.random.default_rng(3)
    started = sampled = 0
    with (
        asyncio.Runner() as loop,
        mock.patch("secrets.randbits", lambda bits: int(own.integers(2**bits, dtype=np.uint64))),
    ):
        while started < draws or engine.sequences:
            while started < draws and len(engine.sequences) < CONCURRENT:
                request = TokenRequest(PROMPT, LENGTH + 2, sampling)
                engine.submit(request, partial(collect, texts[started]))
                started += 1
            engine.drain_inbox()
            batch = loop.run(session.round(lambda: False))
            for proposal in batch.proposals:
                sampled += sum(given is not None for given in proposal.distributions)
            engine.drafting.on_drafts(handle, batch)
            engine.step()
            engine.outbox.send_to_clients()
    assert sampled > 2 * draws
    return np.array([text[:LENGTH] for text in texts])


def collect(text: list[int], chunk: TokenChunk | OutriderError) -> None:
    assert isinstance(chunk, TokenChunk), chunk
    text += chunk.token_ids


@pytest.mark.parametrize(
    ("setting", "rule", "draws", "sees"),
    [
        ("plain", AcceptanceRule.BLOCK, 5_000, 0.066),
        pytest.param("plain", AcceptanceRule.TOKEN_WISE, 30_000, 0.035, marks=pytest.mark.slow),
        pytest.param("penalties", AcceptanceRule.BLOCK, 30_000, 0.035, marks=pytest.mark.slow),
    ],
)
def test_texts_follow_the_target_behind_the_real_draft_model(
    family: ModelFamily, setting: str, rule: AcceptanceRule, draws: int, sees: float
) -> None:
    sampling = SETTINGS[setting]
    against_enumeration(generate(family, sampling, rule, draws), sampling).must_agree(sees)


def test_a_draft_model_that_claims_a_false_distribution_is_caught(
    family: ModelFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = forwards.inverse_cdf
    monkeypatch.setattr(
        forwards, "inverse_cdf", lambda weights, numbers: honest(weights**1.3, numbers)
    )
    sampling = SETTINGS["plain"]
    samples = generate(family, sampling, AcceptanceRule.BLOCK, 3_000)
    assert against_enumeration(samples, sampling).p < LEAST_P
