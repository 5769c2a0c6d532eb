"""One draft model for several verifiers: they share forwards and pages, but not delays."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch

from drafter_svc.families.draft_model import DraftModel
from drafter_svc.families.model import ModelFamily
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import DraftBatch
from tests.drafter.draft_model_rig import opened
from tests.family_rig import Rig

Work = Coroutine[Any, Any, DraftBatch]
Drafting = asyncio.Task[DraftBatch]


class Watched:
    """Records the tokens of a runner's forwards, and holds forwards back while `gate` is shut."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner = runner
        self.forwards: list[list[list[int]]] = []
        self.gate = Event()
        self.at_gate = Event()
        self.gate.set()
        self.broken_token: int | None = None
        self._forward = runner.forward
        self._several = runner.continue_greedily
        monkeypatch.setattr(runner, "forward", self.forward)
        monkeypatch.setattr(runner, "continue_greedily", self.several)

    def _watch(self, slices: Sequence[SequenceSlice]) -> None:
        self.at_gate.set()
        assert self.gate.wait(30)
        self.forwards.append([list(part.token_ids) for part in slices])
        if any(self.broken_token in part.token_ids for part in slices):
            raise ZeroDivisionError("planted")

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        self._watch(slices)
        return self._forward(slices)

    def several(
        self, slices: Sequence[SequenceSlice], count: int, limit: int
    ) -> list[list[int]] | None:
        self._watch(slices)
        return self._several(slices, count, limit)

    async def reached(self) -> None:
        """Wait until the next forward is held back."""
        assert await asyncio.to_thread(self.at_gate.wait, 30)
        self.at_gate.clear()

    def open_gate(self) -> None:
        self.gate.set()

    def shut_gate(self) -> None:
        self.gate.clear()
        self.at_gate.clear()


@pytest.fixture
def watched(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(runner, monkeypatch)
    yield watched
    watched.open_gate()


@pytest.fixture
def model(watched: Watched, thread: ThreadPoolExecutor) -> DraftModel:
    return DraftModel(watched.runner, thread, max_batch_tokens=64)


def rig_of(model: DraftModel, vocab_size: int | None = None) -> Rig:
    """Return a rig with the session of one verifier."""
    return Rig(ModelFamily(model, vocab_size or model.runner.vocab_size, branch_count=0))


async def alone(model: DraftModel, tokens: list[int]) -> list[int]:
    """Return the guesses for a text while no other verifier is drafted for."""
    rig = rig_of(model)
    rig.open(opened(tokens, window=4))
    await rig.drafts()
    guesses = rig.guesses(1)
    rig.close(1)
    return guesses


async def begun() -> None:
    """Let new tasks, and the tasks that they create, run until their first wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def held_back(watched: Watched, work: Work) -> Drafting:
    """Begin work, and wait until its first forward is held back."""
    watched.shut_gate()
    task = asyncio.create_task(work)
    await watched.reached()
    return task


async def joined(
    watched: Watched,
    first: Coroutine[Any, Any, DraftBatch],
    second: Coroutine[Any, Any, DraftBatch],
) -> Drafting:
    """Begin the second work while the forward of the first is held back; wait for the second.

    Returns the task of the first work, which may not have ended yet.
    """
    task = await held_back(watched, first)
    watched.forwards.clear()
    other = asyncio.create_task(second)
    await begun()
    watched.open_gate()
    await other
    return task


async def test_verifiers_share_forwards_and_get_their_own_guesses(
    model: DraftModel, watched: Watched, prompts: list[list[int]]
) -> None:
    expected = [await alone(model, prompt) for prompt in prompts[:2]]
    rigs = [rig_of(model), rig_of(model)]
    for rig, prompt in zip(rigs, prompts[:2], strict=True):
        rig.open(opened(prompt, window=4))
    await (await joined(watched, rigs[0].drafts(), rigs[1].drafts()))
    assert [rig.guesses(1) for rig in rigs] == expected
    assert any(len(slices) == 2 for slices in watched.forwards)
    model.pool.check_integrity(
        [draft.kv for rig in rigs for draft in family_of(rig)._drafts.values()]
    )


def family_of(rig: Rig) -> ModelFamily:
    family = rig.session._strategy
    assert isinstance(family, ModelFamily)
    return family


async def test_a_failing_sequence_does_not_disturb_other_verifiers(
    model: DraftModel, watched: Watched, prompts: list[list[int]]
) -> None:
    expected = await alone(model, prompts[0])
    good = rig_of(model)
    bad = rig_of(model)
    good.open(opened(prompts[0], window=4))
    bad.open(opened([7, 8, 3], window=4))
    watched.broken_token = 3
    assert 3 not in prompts[0]
    await (await joined(watched, good.drafts(), bad.drafts()))
    assert bad.abandoned == {1}
    assert not good.abandoned
    assert good.guesses(1) == expected


async def test_a_long_prompt_delays_another_verifier_by_few_forwards(
    model: DraftModel, watched: Watched, prompts: list[list[int]]
) -> None:
    """The long prompt by itself fills sixteen forwards."""
    busy = rig_of(model)
    other = rig_of(model)
    busy.open(opened([20 + i % 200 for i in range(1024)], window=4))
    other.open(opened(prompts[0], window=4))
    expected = await alone(model, prompts[0])
    reading = await joined(watched, busy.drafts(), other.draft())
    # The model's thread reads more of the prompt while the event loop gets the draft.
    shared = [number for number, slices in enumerate(watched.forwards) if len(slices) > 1]
    assert shared
    assert shared[-1] < 6
    assert other.guesses(1) == expected
    assert not reading.done()
    await reading


async def test_urgent_rounds_go_before_rounds_that_run_ahead(
    model: DraftModel, watched: Watched, prompts: list[list[int]]
) -> None:
    ahead = rig_of(model)
    waiting = rig_of(model)
    ahead.open(opened(prompts[0], depth=2, window=24))
    await ahead.draft()
    assert not ahead.session.sequences[1].urgent
    waiting.open(opened(prompts[1], window=4))
    running = await joined(watched, ahead.drafts(), waiting.draft())
    # After the forward that was held back, the urgent draft has forwards to itself.
    assert [len(slices) for slices in watched.forwards[1:3]] == [1, 1]
    await running


async def test_a_message_ends_only_its_own_verifiers_round(
    model: DraftModel, watched: Watched, prompts: list[list[int]]
) -> None:
    interrupted = rig_of(model)
    going_on = rig_of(model)
    for rig, prompt in zip((interrupted, going_on), prompts[:2], strict=True):
        rig.open(opened(prompt, depth=8, window=16))
    waits = Event()
    first = await held_back(watched, interrupted.draft(waits.is_set))
    second = asyncio.create_task(going_on.draft())
    await begun()
    waits.set()
    watched.open_gate()
    await asyncio.gather(first, second)
    assert len(interrupted.guesses(1)) == 1
    assert len(going_on.guesses(1)) == 8


async def test_a_lost_verifiers_pages_are_freed_after_its_last_forward(
    model: DraftModel, watched: Watched, prompts: list[list[int]]
) -> None:
    lost = rig_of(model)
    stays = rig_of(model)
    for rig, prompt in zip((lost, stays), prompts[:2], strict=True):
        rig.open(opened(prompt, depth=8, window=16))
    held = model.pool.used_count
    drafting = await held_back(watched, lost.drafts())
    drafting.cancel()
    closing = asyncio.create_task(family_of(lost).aclose())
    await asyncio.sleep(0.05)
    assert not closing.done()
    assert model.pool.used_count > held
    watched.open_gate()
    await closing
    assert [draft.kv for draft in family_of(lost)._drafts.values()] == []
    assert len((await stays.drafts()).proposals) > 0
    model.pool.check_integrity([draft.kv for draft in family_of(stays)._drafts.values()])


async def test_each_verifier_gets_only_ids_of_its_vocabulary(
    model: DraftModel, watched: Watched, prompts: list[list[int]]
) -> None:
    expected = await alone(model, prompts[1])
    narrow = rig_of(model, 40)
    wide = rig_of(model)
    narrow.open(opened(prompts[0], window=4))
    wide.open(opened(prompts[1], window=4))
    await (await joined(watched, narrow.drafts(), wide.drafts()))
    assert max(narrow.guesses(1)) < 40
    assert wide.guesses(1) == expected
    assert max(expected) >= 40


async def test_verifiers_share_the_pages_of_common_prefixes(
    model: DraftModel, watched: Watched
) -> None:
    text = [50 + i % 30 for i in range(40)]
    first = rig_of(model)
    second = rig_of(model)
    first.open(opened(text, window=4))
    await first.drafts()
    watched.forwards.clear()
    second.open(opened(text, window=4))
    await second.drafts()
    assert sum(map(len, watched.forwards[0])) < len(text) - model.runner.page_size
    assert second.guesses(1) == first.guesses(1)


async def test_tenants_share_no_pages_of_the_draft_model(
    model: DraftModel, prompts: list[list[int]]
) -> None:
    text = (prompts[0] * 8)[: 3 * model.runner.page_size]
    shared = []
    for tenant in ("a", "b", "a", ""):
        rig = rig_of(model)
        rig.open(replace(opened(text, window=4), tenant=tenant))
        shared.append(family_of(rig)._drafts[1].kv.num_computed_tokens)
        await rig.drafts()
        rig.close(1)
    assert shared == [0, 0, 2 * model.runner.page_size, 0]
