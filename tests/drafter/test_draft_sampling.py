"""The draft model samples from the distribution it reports, and uses no random number twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy import stats

from drafter_svc.families.cached_draft import CachedDraft, Guess
from drafter_svc.families.forwards import Forwards
from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.draft_messages import Opened, SparseDistribution
from outrider.protocol.messages import DraftDistribution, SamplingParams
from outrider.sampling.noise import Purpose, uniforms
from tests.drafter.draft_model_rig import Make, guesses_of, opened
from tests.fake_device import FakeDevice
from tests.family_rig import Rig


def sampled(
    tokens: list[int], sequence_id: int, seed: int | None = None, **settings: float
) -> Opened:
    """Return a sequence whose guesses are sampled from a sparse distribution, one guess a step."""
    sampling = SamplingParams(
        temperature=settings.get("temperature", 1.0), top_p=settings.get("top_p", 1.0), seed=seed
    )
    sparse = DraftDistribution.SPARSE
    return opened(tokens, sequence_id, depth=1, window=2, sampling=sampling, distribution=sparse)


async def first_guesses(
    rig: Rig, prompt: list[int], count: int
) -> list[tuple[int, SparseDistribution]]:
    """Return the first sampled token of each of `count` sequences, and its distribution.

    The sequences have the same prompt and different seeds.
    """
    for i in range(count):
        rig.open(sampled(prompt, i, seed=i))
    batch = await rig.draft()
    return [
        (p.token_ids[0], p.distributions[0])
        for p in batch.proposals
        if p.distributions[0] is not None
    ]


async def test_tokens_are_sampled_from_the_distribution_sent(
    make: Make, prompts: list[list[int]]
) -> None:
    count = 400
    rig = make(max_entries=6, max_batch_tokens=8192)
    drawn = await first_guesses(rig, prompts[1][:6], count)
    sent = drawn[0][1]
    assert len(drawn) == count
    assert all(np.array_equal(distribution.token_ids, sent.token_ids) for _, distribution in drawn)
    expected = count * sent.probabilities / sent.probabilities.sum()
    observed = [sum(token == entry for token, _ in drawn) for entry in sent.token_ids]
    assert sum(observed) == count
    assert stats.chisquare(observed, expected).pvalue > 1e-3


async def test_the_distribution_has_the_models_top_entries_in_float32(
    make: Make, prompts: list[list[int]], reference: Callable[[list[int]], torch.Tensor]
) -> None:
    rig = make(max_entries=8)
    rig.open(sampled(prompts[0], 1, temperature=0.7))
    (distribution,) = (await rig.draft()).proposals[0].distributions
    assert distribution is not None
    top = torch.softmax(reference(prompts[0]).double() / 0.7, -1).topk(8)
    assert distribution.token_ids.tolist() == top.indices.tolist()
    np.testing.assert_allclose(
        distribution.probabilities, (top.values / top.values.sum()).numpy(), rtol=1e-4
    )
    assert np.array_equal(
        distribution.probabilities.astype(np.float32).astype(np.float64), distribution.probabilities
    )


async def test_top_p_of_the_request_is_applied_to_the_draft(
    make: Make, prompts: list[list[int]]
) -> None:
    rig = make(max_entries=32)
    rig.open(sampled(prompts[0], 1, top_p=1.0))
    rig.open(sampled(prompts[0], 2, top_p=0.3))
    wide, narrow = (p.distributions[0] for p in (await rig.draft()).proposals)
    assert narrow is not None
    assert wide is not None
    assert 1 <= len(narrow.token_ids) < len(wide.token_ids) == 32


async def test_no_random_number_is_used_twice(
    make: Make, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected guess has influenced what was committed, so its random number must not return."""
    asked: list[tuple[int, int, int]] = []

    def counted(
        seeds: list[int], positions: list[int], purpose: Purpose, steps: list[int]
    ) -> np.ndarray:
        asked.extend(zip(seeds, positions, steps, strict=True))
        return uniforms(seeds, positions, purpose, steps)

    monkeypatch.setattr("drafter_svc.families.forwards.uniforms", counted)
    rig = make(branch_count=4)
    for i, text in enumerate(prompts):
        rig.open(opened(text, i, sampling=SamplingParams(), distribution=DraftDistribution.SPARSE))
    for turn in range(1, 6):
        guesses = await guesses_of(rig)
        for i in range(len(prompts)):
            new = [*guesses[i][: turn % 3], (guesses[i][turn % 3] + 1) % 4096]
            rig.commit(i, *new)
    assert len(asked) > 100
    assert len(asked) == len(set(asked))


async def test_drafters_and_sequences_without_a_seed_draw_differently(
    make: Make, prompts: list[list[int]]
) -> None:
    """Equal draws would predict each other. A drafter must not repeat its draws after a restart."""
    drawn = []
    for _ in range(2):
        rig = make()
        for i in range(8):
            rig.open(
                opened(
                    prompts[1],
                    i,
                    sampling=SamplingParams(2.0),
                    distribution=DraftDistribution.SPARSE,
                )
            )
        drawn += [tuple(tokens) for tokens in (await guesses_of(rig)).values()]
    assert len(drawn) == len(set(drawn)) == 16


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("distribution", DraftDistribution)
def test_a_gpu_is_waited_for_once_a_choice_and_once_a_draw(
    distribution: DraftDistribution, trees: bool
) -> None:
    sampling = SamplingParams(1.0, seed=3)
    # `_choose` needs no model and no pages.
    forwards = Forwards(cast(Any, None), cast(Any, None), 64, 8, None)

    def choose(logits_RV: torch.Tensor) -> list[Guess | None]:
        drafts = []
        for i in range(3):
            opening = opened([1, 2], i, sampling=sampling, distribution=distribution)
            sequence = DraftSequence(opening)
            sequence.tree_tokens = 8 if trees else 0
            drafts.append(CachedDraft(sequence, i, 50))
        return forwards._choose(drafts, logits_RV, [2, 2, 2])

    logits_RV = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    with FakeDevice() as device:
        found = choose(device.put(logits_RV.clone()))
    assert device.waits == 1 + (distribution is not DraftDistribution.ONE_HOT)
    for guess, wanted in zip(found, choose(logits_RV), strict=True):
        assert guess is not None
        assert wanted is not None
        assert (guess.token, guess.best) == (wanted.token, wanted.best)
