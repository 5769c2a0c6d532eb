"""The library `outrider.drafter` runs the strategies that users write."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.drafter import GuessStrategy, coupled_draw
from outrider.protocol.draft_messages import (
    DraftBatch,
    Opened,
    Proposal,
    Skip,
    StepBatch,
    Verdict,
    Window,
)
from outrider.sampling.noise import coupled_keys
from outrider.sampling.sampler import coupled_sample
from tests.drafter.drafter_process import ROOT, python
from tests.drafter.scripted_drafts import ScriptedVerifier, Stream
from tests.family_rig import Rig, opened_sequence

EXAMPLE = ROOT / "examples/ngram_drafter.py"


def opened(sequence_id: int, tokens: Sequence[int]) -> Opened:
    return opened_sequence(sequence_id, tokens, Window(8, 4), 2)


def count_on(text: Sequence[int], count: int) -> list[int]:
    """Guess that each token is one more than the token before it; guess nothing after 99."""
    if text[-1] >= 99:
        return []
    return [text[-1] + i for i in range(1, count + 1)]


async def proposed(stream: Stream) -> tuple[int, list[int]]:
    """Return the base length and the guesses of the next message's only proposal."""
    batch = await stream.receive()
    assert isinstance(batch, DraftBatch)
    [proposal] = batch.proposals
    return proposal.base_length, proposal.token_ids


async def test_a_function_of_the_text_is_a_whole_strategy() -> None:
    rig = Rig(GuessStrategy(count_on, "count"))
    rig.open(opened(1, [10, 11]))
    rig.open(opened(2, [99]))
    drafts = await rig.drafts()
    assert drafts.proposals == [Proposal(1, 2, [12, 13]), Proposal(1, 2, [12, 13, 14, 15])]
    assert drafts.skips == [Skip(2, 1)]


async def test_sequences_skipped_by_an_interruption_are_asked_again() -> None:
    calls = 0

    def interrupted() -> bool:
        nonlocal calls
        calls += 1
        return calls > 1

    rig = Rig(GuessStrategy(count_on, "count"))
    rig.open(opened(1, [10]))
    rig.open(opened(2, [20]))
    assert [p.sequence_id for p in (await rig.draft(interrupted)).proposals] == [1]
    assert 2 in [p.sequence_id for p in (await rig.draft()).proposals]


async def test_the_example_drafts_and_says_goodbye(verifier: ScriptedVerifier) -> None:
    async with python(str(EXAMPLE), verifier.address) as process:
        stream = await verifier.accepted()
        assert stream.said.family == "example-ngram"
        stream.send(StepBatch(opened=[opened(1, [5, 6, 7, 8, 5, 6])]))
        assert [await proposed(stream), await proposed(stream)] == [(6, [7, 8]), (6, [7, 8, 5, 6])]
        stream.send(StepBatch(verdicts=[Verdict(1, 7, [9], 0, 2)]))
        assert await stream.receive() == DraftBatch(skips=[Skip(1, 7)])
        process.send_signal(signal.SIGTERM)
        assert await stream.receive() == "the drafter is stopping"
        assert await stream.receive() is None
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_a_function_drafts_for_several_verifiers(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    addresses = [verifier.address, other.address]
    arguments = f"lambda text, count: [9], name='nine', verifier={addresses}"
    program = f"from outrider.drafter import serve; serve({arguments})"
    async with python("-c", program) as process:
        for each in (verifier, other):
            assert await (await each.accepted()).drafted(opened(1, [5, 6])) == [9]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40


@pytest.mark.parametrize("seed", [42, 2**64 - 1])
def test_a_coupled_draw_equals_the_verifiers(seed: int) -> None:
    probs = np.random.default_rng(seed % 1000).dirichlet(np.full(500, 0.1), 20).astype(np.float32)
    positions = [*range(19), 2**33 + 1]
    keys = torch.from_numpy(coupled_keys([seed] * 20, positions))
    expected = coupled_sample(torch.from_numpy(probs), keys).tolist()
    drawn = [coupled_draw(row, seed, at) for row, at in zip(probs, positions, strict=True)]
    assert drawn == expected
