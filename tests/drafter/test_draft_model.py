"""The draft model guesses its greedy text in any batch, after rewinds and after interruptions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from drafter_svc.families.draft_model import DraftModel
from drafter_svc.families.model import ModelFamily
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import Skip
from tests.drafter.draft_model_rig import Greedy, Make, guesses_of, opened
from tests.family_rig import Rig

MODEL = str(Path(__file__).parents[2] / "models/draft")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_several_tokens_of_one_decoder_call_are_the_likeliest(
    thread: ThreadPoolExecutor,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
) -> None:
    def load() -> ModelRunner:
        return ModelRunner.load(MODEL, dtype=dtype, device="cpu", threads=1, page_count=512)

    runner = thread.submit(load).result()
    fresh = thread.submit(load).result()
    calls: list[int] = []
    at_once = runner.continue_greedily

    def counted(slices: list[SequenceSlice], count: int, limit: int) -> list[list[int]] | None:
        calls.append(count)
        return at_once(slices, count, limit)

    monkeypatch.setattr(runner, "continue_greedily", counted)
    rig = Rig(ModelFamily(DraftModel(runner, thread), runner.vocab_size, branch_count=0))
    texts = [list(prompt) for prompt in prompts]
    for i, text in enumerate(texts):
        rig.open(opened(text, i, depth=4 + i % 2, window=4 + i % 2))
    for _ in range(4):
        guesses = await guesses_of(rig)
        for i, text in enumerate(texts):
            guess = guesses[i]
            assert len(guess) == 4 + i % 2
            whole = SequenceSlice([*text, *guess[:-1]], 0, list(range(20)), len(guess))
            logits = thread.submit(fresh.forward, [whole]).result()
            # Rounding may make the two largest logits equal.
            assert torch.equal(logits[range(len(guess)), guess], logits.amax(-1))
            right = guess[: i % 4]
            text += [*right, 7]
            rig.commit(i, *right, 7)
    assert max(calls) >= 3


@pytest.mark.parametrize("matched", [0, 3])
async def test_after_a_miss_guesses_equal_those_of_a_fresh_model(
    make: Make, prompts: list[list[int]], greedy: Greedy, matched: int
) -> None:
    rig = make()
    rig.open(opened(prompts[2], window=6))
    ahead = (await guesses_of(rig))[1]
    new = [*ahead[:matched], (ahead[matched] + 1) % 4096]
    rig.commit(1, *new)
    assert (await guesses_of(rig))[1] == greedy([*prompts[2], *new], 6)


async def test_a_batch_guesses_what_each_sequence_guesses_alone(
    make: Make, prompts: list[list[int]], greedy: Greedy
) -> None:
    rig = make()
    for i, prompt in enumerate(prompts):
        rig.open(opened(prompt, i))
    together = await guesses_of(rig)
    assert together == {i: greedy(prompt, 9) for i, prompt in enumerate(prompts)}


async def test_long_prompts_are_read_in_chunks(
    make: Make, prompts: list[list[int]], greedy: Greedy
) -> None:
    text = [token for prompt in prompts for token in prompt]
    rig = make(max_batch_tokens=5)
    rig.open(opened(text))
    rig.open(opened(prompts[0], 2))
    assert await guesses_of(rig) == {1: greedy(text, 9), 2: greedy(prompts[0], 9)}


async def test_a_guessing_sequence_does_not_wait_for_anothers_prompt(
    make: Make, prompts: list[list[int]]
) -> None:
    text = [token for prompt in prompts for token in prompt]
    rig = make(max_batch_tokens=len(prompts[0]))
    rig.open(opened(prompts[0], 1))
    rig.open(opened(text, 2))
    first = await rig.draft()
    assert [(p.sequence_id, len(p.token_ids)) for p in first.proposals] == [(1, 4)]
    second = await rig.draft()
    assert [(p.sequence_id, len(p.token_ids)) for p in second.proposals] == [(2, 4)]


async def test_an_interrupted_round_ends_early_and_keeps_its_guesses(
    make: Make, prompts: list[list[int]], greedy: Greedy
) -> None:
    rig = make()
    rig.open(opened(prompts[0]))
    cut = (await rig.draft(lambda: True)).proposals
    assert [len(p.token_ids) for p in cut] == [1]
    assert (await guesses_of(rig))[1] == greedy(prompts[0], 9)


async def test_committed_guesses_need_no_other_forward(
    make: Make, prompts: list[list[int]], runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    rig.open(opened(prompts[0]))
    ahead = (await guesses_of(rig))[1]
    fed: list[int] = []
    forward = runner.forward

    def watched(slices: list[SequenceSlice]) -> torch.Tensor:
        fed.extend(slices[0].token_ids)
        return forward(slices)

    monkeypatch.setattr(runner, "forward", watched)
    rig.commit(1, *ahead[:2])
    first = (await rig.draft()).proposals[0]
    assert (first.base_length, first.token_ids[:7]) == (len(prompts[0]) + 2, ahead[2:])
    # This forward reads only the last guess. Earlier forwards read the other guesses.
    assert fed[0] == ahead[-1]


async def test_a_sequence_at_the_context_end_is_skipped_alone(
    make: Make, runner: ModelRunner, prompts: list[list[int]]
) -> None:
    rig = make()
    rig.open(opened([5] * (runner.context_length - 2), 1))
    rig.open(opened([5] * (runner.context_length + 10), 2))
    rig.open(opened(prompts[0], 3))
    drafts = await rig.drafts()
    assert [len(rig.guesses(sequence_id)) for sequence_id in (1, 2, 3)] == [2, 0, 9]
    assert sorted((s.sequence_id, s.base_length) for s in drafts.skips) == [
        (1, runner.context_length - 2),
        (2, runner.context_length + 10),
    ]


async def test_a_sequence_with_unknown_ids_is_skipped_alone(
    make: Make, runner: ModelRunner, prompts: list[list[int]]
) -> None:
    """The target's vocabulary may be padded to more ids than the draft model's."""
    unknown = runner.vocab_size
    rig = make(vocab_size=unknown + 64)
    rig.open(opened([*prompts[0], unknown], 1))
    rig.open(opened(prompts[1], 2))
    rig.open(opened(prompts[2], 3))
    first = await rig.draft()
    assert {p.sequence_id for p in first.proposals} == {2, 3}
    assert [s.sequence_id for s in first.skips] == [1]
    await rig.drafts()
    rig.commit(2, unknown)
    rig.commit(3, 5)
    later = await rig.draft()
    assert {p.sequence_id for p in later.proposals} == {3}
    assert later.skips == [Skip(2, len(prompts[1]) + 1)]


async def test_without_pages_a_sequence_is_skipped_until_others_end(
    thread: ThreadPoolExecutor, prompts: list[list[int]], greedy: Greedy
) -> None:
    small = thread.submit(
        ModelRunner.load, MODEL, dtype="float32", device="cpu", threads=1, page_count=3
    ).result()
    rig = Rig(ModelFamily(DraftModel(small, thread), small.vocab_size, branch_count=0))
    text = prompts[3][:12]
    for i in range(3):
        rig.open(opened(text, i, depth=2, window=6))
    rig.open(opened([5] * 17, 3, depth=2, window=6))
    first = await rig.draft()
    assert {p.sequence_id for p in first.proposals} == {0, 1, 2}
    assert first.skips == [Skip(3, 17)]
    for i in range(3):
        rig.close(i)
    rig.commit(3, 6)
    assert (await guesses_of(rig))[3] == greedy([5] * 17 + [6], 6)
