"""The draft model: it guesses what the model would write itself, whatever was rewound, batched, cut short or sampled on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from family_rig import Rig
from scipy import stats
from transformers import AutoModelForCausalLM

from drafter_svc.families.draft_model import DraftModel
from drafter_svc.families.model import ModelFamily
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.messages import (
    DraftBatch,
    DraftDistribution,
    Opened,
    SamplingParams,
    Skip,
    SparseDistribution,
    StepBatch,
    Verdict,
    Window,
)
from outrider.sampling.noise import Purpose, uniforms
from outrider.tokenizer import load_tokenizer
from outrider.wire.drafts import drafts_from_proto, drafts_to_proto

MODEL = str(Path(__file__).parents[2] / "models/draft")
GREEDY = SamplingParams(temperature=0.0)
TEXTS = [
    "def add(first, second):\n    return first",
    "The list is sorted in place, which means that",
    '{"name": "outrider", "kind": "server", "port":',
    "class Node:\n    def __init__(self, value, children):\n        self.value =",
    "for line in lines:\n    if not line.strip():",
]


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture(scope="module")
def runner(thread: ThreadPoolExecutor) -> ModelRunner:
    return thread.submit(
        ModelRunner.load, MODEL, dtype="float32", device="cpu", threads=1, page_count=512
    ).result()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(MODEL)
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.fixture
def make(runner: ModelRunner, thread: ThreadPoolExecutor) -> Callable[..., Rig]:
    def make(*, vocab_size: int = 0, branch_count: int = 0, **settings: int) -> Rig:
        model = DraftModel(runner, thread, **settings)  # type: ignore[arg-type]  # none of them is a grammar
        return Rig(ModelFamily(model, vocab_size or runner.vocab_size, branch_count=branch_count))

    return make


@pytest.fixture(scope="module")
def reference() -> Callable[[list[int]], torch.Tensor]:
    """transformers' own logits [V] behind a text, from scratch."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    @torch.inference_mode()
    def logits(text: list[int]) -> torch.Tensor:
        last: torch.Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1]
        return last

    return logits


@pytest.fixture(scope="module")
def greedy(reference: Callable[[list[int]], torch.Tensor]) -> Callable[[list[int], int], list[int]]:
    """The tokens that the model writes behind a text."""

    def generate(text: list[int], count: int) -> list[int]:
        text = list(text)
        for _ in range(count):
            text.append(int(reference(text).argmax()))
        return text[-count:]

    return generate


def opened(
    tokens: list[int],
    sequence_id: int = 1,
    *,
    depth: int = 4,
    window: int = 9,
    sampling: SamplingParams = GREEDY,
    distribution: DraftDistribution = DraftDistribution.ONE_HOT,
) -> Opened:
    return Opened(
        sequence_id, list(tokens), sampling, distribution, Window(4 * window, window), depth
    )


async def all_of(rig: Rig) -> dict[int, list[int]]:
    """Everything that is guessed until the next verdict, by sequence, as the last proposal has it."""
    for proposal in (await rig.drafts()).proposals:
        count = next(
            (i for i, parent in enumerate(proposal.parents) if parent != i), len(proposal.token_ids)
        )
        assert proposal.token_ids[:count] == rig.guesses(proposal.sequence_id)[:count]
    return {sequence_id: rig.guesses(sequence_id) for sequence_id in rig.session.sequences}


async def test_a_greedy_chain_is_what_the_model_itself_would_write(
    make: Callable[..., Rig],
    prompts: list[list[int]],
    greedy: Callable[[list[int], int], list[int]],
) -> None:
    rig = make()
    rig.open(opened(prompts[0]))
    assert (await all_of(rig))[1] == greedy(prompts[0], 9)


async def test_the_first_message_of_a_round_carries_what_the_verifier_takes_in_a_step(
    make: Callable[..., Rig], prompts: list[list[int]]
) -> None:
    rig = make()
    rig.open(opened(prompts[0], depth=4, window=9))
    rounds = [(await rig.draft()).proposals[0] for _ in range(3)]
    assert [(p.base_length, len(p.token_ids)) for p in rounds] == [
        (len(prompts[0]), count) for count in (4, 8, 9)
    ]
    assert await rig.draft() == DraftBatch()


async def test_a_hit_goes_on_behind_what_is_ahead(
    make: Callable[..., Rig],
    prompts: list[list[int]],
    greedy: Callable[[list[int], int], list[int]],
) -> None:
    rig = make()
    rig.open(opened(prompts[1], window=6))
    ahead = (await all_of(rig))[1]
    rig.commit(1, *ahead[:4])
    assert (await all_of(rig))[1] == greedy(prompts[1], 10)[4:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_guesses_that_are_taken_many_by_one_call_are_the_likeliest(
    thread: ThreadPoolExecutor,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
) -> None:
    def load() -> ModelRunner:
        return ModelRunner.load(MODEL, dtype=dtype, device="cpu", threads=1, page_count=512)

    runner, fresh = thread.submit(load).result(), thread.submit(load).result()
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
        guesses = await all_of(rig)
        for i, text in enumerate(texts):
            guess = guesses[i]
            assert len(guess) == 4 + i % 2
            whole = SequenceSlice([*text, *guess[:-1]], 0, list(range(20)), len(guess))
            logits = thread.submit(fresh.forward, [whole]).result()
            # Rounded as they are, two may be the largest.
            assert torch.equal(logits[range(len(guess)), guess], logits.amax(-1))
            right = guess[: i % 4]
            text += [*right, 7]
            rig.commit(i, *right, 7)
    assert max(calls) >= 3


@pytest.mark.parametrize("matched", [0, 1, 3, 5])
async def test_after_a_miss_the_guesses_are_those_of_a_model_that_never_erred(
    make: Callable[..., Rig],
    prompts: list[list[int]],
    greedy: Callable[[list[int], int], list[int]],
    matched: int,
) -> None:
    rig = make()
    rig.open(opened(prompts[2], window=6))
    ahead = (await all_of(rig))[1]
    new = [*ahead[:matched], (ahead[matched] + 1) % 4096]
    rig.commit(1, *new)
    assert (await all_of(rig))[1] == greedy([*prompts[2], *new], 6)


async def test_a_batch_guesses_what_each_sequence_does_alone(
    make: Callable[..., Rig],
    prompts: list[list[int]],
    greedy: Callable[[list[int], int], list[int]],
) -> None:
    rig = make()
    for i, prompt in enumerate(prompts):
        rig.open(opened(prompt, i))
    together = await all_of(rig)
    assert together == {i: greedy(prompt, 9) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("max_batch_tokens", [5, 16])
async def test_long_prompts_are_read_in_chunks(
    make: Callable[..., Rig],
    prompts: list[list[int]],
    greedy: Callable[[list[int], int], list[int]],
    max_batch_tokens: int,
) -> None:
    text = [token for prompt in prompts for token in prompt]
    rig = make(max_batch_tokens=max_batch_tokens)
    rig.open(opened(text))
    rig.open(opened(prompts[0], 2))
    assert await all_of(rig) == {1: greedy(text, 9), 2: greedy(prompts[0], 9)}


async def test_a_sequence_that_guesses_does_not_wait_until_another_has_read_its_prompt(
    make: Callable[..., Rig], prompts: list[list[int]]
) -> None:
    text = [token for prompt in prompts for token in prompt]
    rig = make(max_batch_tokens=len(prompts[0]))
    rig.open(opened(prompts[0], 1))
    rig.open(opened(text, 2))
    first = await rig.draft()
    assert [(p.sequence_id, len(p.token_ids)) for p in first.proposals] == [(1, 4)]
    second = await rig.draft()
    assert [(p.sequence_id, len(p.token_ids)) for p in second.proposals] == [(2, 4)]


async def test_nobody_runs_ahead_while_the_verifier_may_be_waiting_for_another(
    make: Callable[..., Rig], prompts: list[list[int]]
) -> None:
    rig = make()
    rig.open(opened(prompts[0], 1))
    await rig.draft()
    rig.open(opened(prompts[1], 2))
    batch = await rig.draft()
    assert [p.sequence_id for p in batch.proposals] == [2]
    batch = await rig.draft()
    assert {p.sequence_id for p in batch.proposals} == {1, 2}


async def test_a_waiting_verdict_cuts_a_round_short_and_nothing_guessed_is_lost(
    make: Callable[..., Rig],
    prompts: list[list[int]],
    greedy: Callable[[list[int], int], list[int]],
) -> None:
    rig = make()
    rig.open(opened(prompts[0]))
    cut = (await rig.draft(lambda: True)).proposals
    assert [len(p.token_ids) for p in cut] == [1]
    assert (await all_of(rig))[1] == greedy(prompts[0], 9)


async def test_guesses_that_came_too_late_stand_and_need_no_forward(
    make: Callable[..., Rig],
    prompts: list[list[int]],
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make()
    rig.open(opened(prompts[0]))
    ahead = (await all_of(rig))[1]
    fed: list[int] = []
    forward = runner.forward
    monkeypatch.setattr(
        runner, "forward", lambda slices: fed.extend(slices[0].token_ids) or forward(slices)
    )
    rig.commit(1, *ahead[:2])
    first = (await rig.draft()).proposals[0]
    assert (first.base_length, first.token_ids[:7]) == (len(prompts[0]) + 2, ahead[2:])
    # Of the tokens that stand, the forward reads only the last, which no forward read before.
    assert fed[0] == ahead[-1]


async def test_the_end_of_the_draft_models_context_is_skipped_and_harms_no_other(
    make: Callable[..., Rig], runner: ModelRunner, prompts: list[list[int]]
) -> None:
    rig = make()
    rig.open(opened([5] * (runner.context_length - 2), 1))
    rig.open(opened([5] * (runner.context_length + 10), 2))
    rig.open(opened(prompts[0], 3))
    said = await rig.drafts()
    assert {sequence_id: len(rig.guesses(sequence_id)) for sequence_id in (1, 2, 3)} == {
        1: 2,
        2: 0,
        3: 9,
    }
    assert sorted((s.sequence_id, s.base_length) for s in said.skips) == [
        (1, runner.context_length - 2),
        (2, runner.context_length + 10),
    ]


async def test_ids_that_the_draft_model_does_not_know_are_skipped_and_harm_no_other(
    make: Callable[..., Rig], runner: ModelRunner, prompts: list[list[int]]
) -> None:
    """A target's vocabulary may be padded further than its draft's."""
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


async def test_ids_from_beyond_the_targets_vocabulary_are_never_proposed(
    make: Callable[..., Rig], prompts: list[list[int]]
) -> None:
    rig = make(vocab_size=40)
    rig.open(opened(prompts[0]))
    assert max((await all_of(rig))[1]) < 40


async def test_without_pages_a_sequence_is_skipped_until_others_end(
    thread: ThreadPoolExecutor,
    prompts: list[list[int]],
    greedy: Callable[[list[int], int], list[int]],
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
    assert (await all_of(rig))[3] == greedy([5] * 17 + [6], 6)


async def test_a_closed_sequence_is_forgotten_and_late_messages_do_no_harm(
    make: Callable[..., Rig], prompts: list[list[int]]
) -> None:
    rig = make()
    rig.open(opened(prompts[0]))
    await rig.draft()
    rig.close(1)
    rig.close(1)
    rig.session.apply(StepBatch(verdicts=[Verdict(1, 99, [1], 0, 2)]))
    assert await rig.draft() == DraftBatch()


# --- sampling ---------------------------------------------------------------------------------------------------------------


def sampled(
    tokens: list[int], sequence_id: int, seed: int | None = None, **settings: float
) -> Opened:
    sampling = SamplingParams(
        temperature=settings.get("temperature", 1.0), top_p=settings.get("top_p", 1.0), seed=seed
    )
    return opened(
        tokens,
        sequence_id,
        depth=1,
        window=2,
        sampling=sampling,
        distribution=DraftDistribution.SPARSE,
    )


async def first_guesses(
    rig: Rig, prompt: list[int], count: int
) -> list[tuple[int, SparseDistribution]]:
    """The first sampled token of `count` sequences with the same prompt and seeds of their own."""
    for i in range(count):
        rig.open(sampled(prompt, i, seed=i))
    batch = await rig.draft()
    return [
        (p.token_ids[0], p.distributions[0])
        for p in batch.proposals
        if p.distributions[0] is not None
    ]


async def test_tokens_are_sampled_from_exactly_the_distribution_that_is_sent(
    make: Callable[..., Rig], prompts: list[list[int]]
) -> None:
    count = 400
    rig = make(max_entries=6, max_batch_tokens=8192)
    drawn = await first_guesses(rig, prompts[1][:6], count)
    claimed = drawn[0][1]
    assert len(drawn) == count
    assert all(
        np.array_equal(distribution.token_ids, claimed.token_ids) for _, distribution in drawn
    )
    expected = count * claimed.probabilities / claimed.probabilities.sum()
    observed = [sum(token == entry for token, _ in drawn) for entry in claimed.token_ids]
    assert sum(observed) == count
    assert stats.chisquare(observed, expected).pvalue > 1e-3


async def test_the_distribution_is_the_models_top_entries_renormalised_in_the_wires_precision(
    make: Callable[..., Rig],
    prompts: list[list[int]],
    reference: Callable[[list[int]], torch.Tensor],
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
    make: Callable[..., Rig], prompts: list[list[int]]
) -> None:
    rig = make(max_entries=32)
    rig.open(sampled(prompts[0], 1, top_p=1.0))
    rig.open(sampled(prompts[0], 2, top_p=0.3))
    wide, narrow = (p.distributions[0] for p in (await rig.draft()).proposals)
    assert narrow is not None
    assert wide is not None
    assert 1 <= len(narrow.token_ids) < len(wide.token_ids) == 32


async def test_what_is_sampled_passes_the_verifiers_checks_and_repeats_with_its_seed(
    make: Callable[..., Rig], runner: ModelRunner, prompts: list[list[int]]
) -> None:
    batches = []
    for _ in range(2):
        rig = make()
        for i, prompt in enumerate(prompts):
            rig.open(sampled(prompt, i, seed=77))
        batches.append(await rig.draft())
    received = drafts_from_proto(drafts_to_proto(batches[0]), runner.vocab_size)
    assert len(received.proposals) == len(prompts)
    assert all(
        len(p.distributions) == len(p.token_ids) and all(p.distributions)
        for p in received.proposals
    )
    assert [p.token_ids for p in batches[0].proposals] == [
        p.token_ids for p in batches[1].proposals
    ]


async def test_no_number_is_drawn_with_twice(
    make: Callable[..., Rig], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that was drafted and fell has had a say in what came of the others, so what is drafted anew needs another number."""
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
        guesses = await all_of(rig)
        for i in range(len(prompts)):
            new = [*guesses[i][: turn % 3], (guesses[i][turn % 3] + 1) % 4096]
            rig.commit(i, *new)
    assert len(asked) > 100
    assert len(asked) == len(set(asked))


async def test_no_two_drafters_and_no_two_sequences_draw_alike(
    make: Callable[..., Rig], prompts: list[list[int]]
) -> None:
    """Else what one of them drew would tell what the other did, and a restarted drafter would draw the same again."""
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
        drawn += [tuple(tokens) for tokens in (await all_of(rig)).values()]
    assert len(drawn) == len(set(drawn)) == 16


async def test_a_greedy_request_is_drafted_greedily_though_it_may_sample(
    make: Callable[..., Rig],
    prompts: list[list[int]],
    greedy: Callable[[list[int], int], list[int]],
) -> None:
    rig = make()
    rig.open(opened(prompts[0], sampling=GREEDY, distribution=DraftDistribution.SPARSE, window=3))
    proposal = (await rig.draft()).proposals[0]
    assert (proposal.token_ids, proposal.distributions) == (greedy(prompts[0], 3), [])
