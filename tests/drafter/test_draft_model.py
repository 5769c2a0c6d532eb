"""The draft model: it guesses what the model would write itself, whatever was rewound, batched, cut short or sampled on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from drafter_svc.families.model import ModelFamily
from outrider.lm.runner import ModelRunner, Slice
from outrider.messages import DraftBatch, Opened, Proposal, Rule, SamplingParams, SparseDistribution, Verdict, Window
from outrider.sampling import Purpose, uniforms
from outrider.tokenizer import load_tokenizer
from outrider.wire import drafts_from_proto, drafts_to_proto

MODEL = str(Path(__file__).parents[2] / "models/draft")
GREEDY = SamplingParams(temperature=0.0)
TEXTS = [
    "def add(first, second):\n    return first",
    "The list is sorted in place, which means that",
    '{"name": "outrider", "kind": "server", "port":',
    "class Node:\n    def __init__(self, value, children):\n        self.value =",
    "for line in lines:\n    if not line.strip():",
]


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture(scope="module")
def runner(thread: ThreadPoolExecutor) -> ModelRunner:
    return thread.submit(ModelRunner.load, MODEL, dtype="float32", device="cpu", threads=1, page_count=512).result()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(MODEL)
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.fixture
def make(runner: ModelRunner, thread: ThreadPoolExecutor) -> Callable[..., ModelFamily]:
    def make(**settings: int) -> ModelFamily:
        settings.setdefault("branch_count", 0)
        return ModelFamily(runner, thread, settings.pop("vocab_size", runner.vocab_size), **settings)

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
    rule: Rule = Rule.ONE_HOT,
) -> Opened:
    return Opened(sequence_id, 0, list(tokens), sampling, rule, Window(4 * window, window), depth)


async def all_of(family: ModelFamily) -> dict[int, list[int]]:
    """Everything that is proposed until the next verdict, by sequence."""
    guesses: dict[int, list[int]] = {}
    while (batch := await family.draft(never)).proposals:
        for proposal in batch.proposals:
            guesses.setdefault(proposal.sequence_id, []).extend(proposal.token_ids)
    return guesses


async def test_a_greedy_chain_is_what_the_model_itself_would_write(
    make: Callable[..., ModelFamily], prompts: list[list[int]], greedy: Callable[[list[int], int], list[int]]
) -> None:
    family = make()
    family.open(opened(prompts[0]))
    assert (await all_of(family))[1] == greedy(prompts[0], 9)


async def test_the_first_message_of_a_round_carries_what_the_verifier_takes_in_a_step(
    make: Callable[..., ModelFamily], prompts: list[list[int]]
) -> None:
    family = make()
    family.open(opened(prompts[0], depth=4, window=9))
    rounds = [(await family.draft(never)).proposals[0] for _ in range(3)]
    assert [(p.parent_node, p.first_node, len(p.token_ids)) for p in rounds] == [(0, 1, 4), (4, 5, 4), (8, 9, 1)]
    assert await family.draft(never) == DraftBatch()


async def test_a_hit_goes_on_behind_what_is_ahead(
    make: Callable[..., ModelFamily], prompts: list[list[int]], greedy: Callable[[list[int], int], list[int]]
) -> None:
    family = make()
    family.open(opened(prompts[1], window=6))
    ahead = (await all_of(family))[1]
    family.verdict(Verdict(1, 0, 4, len(prompts[1]) + 4, 4, ahead[:4]))
    assert (await all_of(family))[1] == greedy(prompts[1], 10)[6:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_guesses_that_are_taken_many_by_one_call_are_the_likeliest(
    thread: ThreadPoolExecutor, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def load() -> ModelRunner:
        return ModelRunner.load(MODEL, dtype=dtype, device="cpu", threads=1, page_count=512)

    runner, fresh = thread.submit(load).result(), thread.submit(load).result()
    calls: list[int] = []
    at_once = runner.continue_greedily

    def counted(slices: list[Slice], count: int, limit: int) -> list[list[int]] | None:
        calls.append(count)
        return at_once(slices, count, limit)

    monkeypatch.setattr(runner, "continue_greedily", counted)
    family, texts = ModelFamily(runner, thread, runner.vocab_size, branch_count=0), [list(prompt) for prompt in prompts]
    for i, text in enumerate(texts):
        family.open(opened(text, i, depth=4 + i % 2, window=4 + i % 2))
    for epoch in range(1, 5):
        guesses = await all_of(family)
        for i, text in enumerate(texts):
            guess = guesses[i]
            assert len(guess) == 4 + i % 2
            whole = Slice([*text, *guess[:-1]], 0, list(range(20)), len(guess))
            logits = thread.submit(fresh.forward, [whole]).result()
            # Rounded as they are, two may be the largest.
            assert torch.equal(logits[range(len(guess)), guess], logits.amax(-1))
            right = guess[: i % 4]
            text += [*right, 7]
            family.verdict(Verdict(i, epoch, 0, len(text), len(right), [*right, 7]))
    assert max(calls) >= 3


@pytest.mark.parametrize("matched", [0, 1, 3, 5])
async def test_after_a_miss_the_guesses_are_those_of_a_model_that_never_erred(
    make: Callable[..., ModelFamily],
    prompts: list[list[int]],
    greedy: Callable[[list[int], int], list[int]],
    matched: int,
) -> None:
    family = make()
    family.open(opened(prompts[2], window=6))
    ahead = (await all_of(family))[1]
    new = [*ahead[:matched], (ahead[matched] + 1) % 4096]
    family.verdict(Verdict(1, 1, 0, len(prompts[2]) + len(new), matched, new))
    assert (await all_of(family))[1] == greedy([*prompts[2], *new], 6)


async def test_a_batch_guesses_what_each_sequence_does_alone(
    make: Callable[..., ModelFamily], prompts: list[list[int]], greedy: Callable[[list[int], int], list[int]]
) -> None:
    family = make()
    for i, prompt in enumerate(prompts):
        family.open(opened(prompt, i))
    together = await all_of(family)
    assert together == {i: greedy(prompt, 9) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("max_batch_tokens", [5, 16])
async def test_long_prompts_are_read_in_chunks(
    make: Callable[..., ModelFamily],
    prompts: list[list[int]],
    greedy: Callable[[list[int], int], list[int]],
    max_batch_tokens: int,
) -> None:
    text = [token for prompt in prompts for token in prompt]
    family = make(max_batch_tokens=max_batch_tokens)
    family.open(opened(text))
    family.open(opened(prompts[0], 2))
    assert await all_of(family) == {1: greedy(text, 9), 2: greedy(prompts[0], 9)}


async def test_a_sequence_that_guesses_does_not_wait_until_another_has_read_its_prompt(
    make: Callable[..., ModelFamily], prompts: list[list[int]]
) -> None:
    text = [token for prompt in prompts for token in prompt]
    family = make(max_batch_tokens=len(prompts[0]))
    family.open(opened(prompts[0], 1))
    family.open(opened(text, 2))
    first = await family.draft(never)
    assert [(p.sequence_id, len(p.token_ids)) for p in first.proposals] == [(1, 4)]
    second = await family.draft(never)
    assert [(p.sequence_id, len(p.token_ids)) for p in second.proposals] == [(2, 4)]


async def test_nobody_runs_ahead_while_the_verifier_may_be_waiting_for_another(
    make: Callable[..., ModelFamily], prompts: list[list[int]]
) -> None:
    family = make()
    family.open(opened(prompts[0], 1))
    await family.draft(never)
    family.open(opened(prompts[1], 2))
    batch = await family.draft(never)
    assert [p.sequence_id for p in batch.proposals] == [2]
    batch = await family.draft(never)
    assert {p.sequence_id for p in batch.proposals} == {1, 2}


async def test_a_waiting_verdict_cuts_a_round_short_and_nothing_guessed_is_lost(
    make: Callable[..., ModelFamily], prompts: list[list[int]], greedy: Callable[[list[int], int], list[int]]
) -> None:
    family = make()
    family.open(opened(prompts[0]))
    cut = (await family.draft(lambda: True)).proposals
    assert [len(p.token_ids) for p in cut] == [1]
    assert [*cut[0].token_ids, *(await all_of(family))[1]] == greedy(prompts[0], 9)


async def test_guesses_that_came_too_late_are_sent_again_without_a_forward(
    make: Callable[..., ModelFamily], prompts: list[list[int]]
) -> None:
    family = make()
    family.open(opened(prompts[0]))
    ahead = (await family.draft(never)).proposals[0].token_ids
    family.verdict(Verdict(1, 1, 0, len(prompts[0]) + 1, 0, ahead[:1]))
    assert (await family.draft(never)).proposals == [Proposal(1, 1, 0, 1, ahead[1:])]


async def test_the_end_of_the_draft_models_context_is_skipped_and_harms_no_other(
    make: Callable[..., ModelFamily], runner: ModelRunner, prompts: list[list[int]]
) -> None:
    family = make()
    family.open(opened([5] * (runner.context_length - 2), 1))
    family.open(opened([5] * (runner.context_length + 10), 2))
    family.open(opened(prompts[0], 3))
    batches = [await family.draft(never) for _ in range(8)]
    grown = {1: 0, 2: 0, 3: 0}
    for proposal in (p for batch in batches for p in batch.proposals):
        grown[proposal.sequence_id] += len(proposal.token_ids)
    assert grown == {1: 2, 2: 0, 3: 9}
    assert sorted((s.sequence_id, s.node) for batch in batches for s in batch.skips) == [(1, 2), (2, 0)]


async def test_ids_that_the_draft_model_does_not_know_are_skipped_and_harm_no_other(
    make: Callable[..., ModelFamily], runner: ModelRunner, prompts: list[list[int]]
) -> None:
    """A target's vocabulary may be padded further than its draft's."""
    unknown = runner.vocab_size
    family = make(vocab_size=unknown + 64)
    family.open(opened([*prompts[0], unknown], 1))
    family.open(opened(prompts[1], 2))
    family.open(opened(prompts[2], 3))
    first = await family.draft(never)
    assert {p.sequence_id for p in first.proposals} == {2, 3}
    assert [s.sequence_id for s in first.skips] == [1]
    family.verdict(Verdict(2, 1, 0, len(prompts[1]) + 1, 0, [unknown]))
    later = await family.draft(never)
    assert {p.sequence_id for p in later.proposals} == {3}
    assert [(s.sequence_id, s.epoch) for s in later.skips] == [(2, 1)]


async def test_ids_from_beyond_the_targets_vocabulary_are_never_proposed(
    make: Callable[..., ModelFamily], prompts: list[list[int]]
) -> None:
    family = make(vocab_size=40)
    family.open(opened(prompts[0]))
    assert max((await all_of(family))[1]) < 40


async def test_without_pages_a_sequence_is_skipped_until_others_end(
    thread: ThreadPoolExecutor, prompts: list[list[int]], greedy: Callable[[list[int], int], list[int]]
) -> None:
    small = thread.submit(ModelRunner.load, MODEL, dtype="float32", device="cpu", threads=1, page_count=3).result()
    family = ModelFamily(small, thread, small.vocab_size, branch_count=0)
    text = prompts[3][:12]
    for i in range(3):
        family.open(opened(text, i, depth=2, window=6))
    family.open(opened([5] * 17, 3, depth=2, window=6))
    first = await family.draft(never)
    assert {p.sequence_id for p in first.proposals} == {0, 1, 2}
    assert [(s.sequence_id, s.node) for s in first.skips] == [(3, 0)]
    for i in range(3):
        family.close(i)
    family.verdict(Verdict(3, 1, 0, 18, 0, [6]))
    assert (await all_of(family))[3] == greedy([5] * 17 + [6], 6)


async def test_a_closed_sequence_is_forgotten_and_late_messages_do_no_harm(
    make: Callable[..., ModelFamily], prompts: list[list[int]]
) -> None:
    family = make()
    family.open(opened(prompts[0]))
    await family.draft(never)
    family.close(1)
    family.close(1)
    family.verdict(Verdict(1, 1, 0, 99, 0, [1]))
    assert await family.draft(never) == DraftBatch()


# --- sampling ---------------------------------------------------------------------------------------------------------------


def sampled(tokens: list[int], sequence_id: int, seed: int | None = None, **settings: float) -> Opened:
    sampling = SamplingParams(temperature=settings.get("temperature", 1.0), top_p=settings.get("top_p", 1.0), seed=seed)
    return opened(tokens, sequence_id, depth=1, window=2, sampling=sampling, rule=Rule.SPARSE)


async def first_guesses(family: ModelFamily, prompt: list[int], count: int) -> list[tuple[int, SparseDistribution]]:
    """The first sampled token of `count` sequences with the same prompt and seeds of their own."""
    for i in range(count):
        family.open(sampled(prompt, i, seed=i))
    batch = await family.draft(never)
    return [(p.token_ids[0], p.distributions[0]) for p in batch.proposals]


async def test_tokens_are_sampled_from_exactly_the_distribution_that_is_sent(
    make: Callable[..., ModelFamily], prompts: list[list[int]]
) -> None:
    count = 400
    family = make(max_entries=6, max_batch_tokens=8192)
    drawn = await first_guesses(family, prompts[1][:6], count)
    claimed = drawn[0][1]
    assert len(drawn) == count
    assert all(np.array_equal(distribution.token_ids, claimed.token_ids) for _, distribution in drawn)
    expected = count * claimed.probabilities / claimed.probabilities.sum()
    observed = [sum(token == entry for token, _ in drawn) for entry in claimed.token_ids]
    assert sum(observed) == count
    assert stats.chisquare(observed, expected).pvalue > 1e-3


async def test_the_distribution_is_the_models_top_entries_renormalised_in_the_wires_precision(
    make: Callable[..., ModelFamily], prompts: list[list[int]], reference: Callable[[list[int]], torch.Tensor]
) -> None:
    family = make(max_entries=8)
    family.open(sampled(prompts[0], 1, temperature=0.7))
    (distribution,) = (await family.draft(never)).proposals[0].distributions
    top = torch.softmax(reference(prompts[0]).double() / 0.7, -1).topk(8)
    assert distribution.token_ids.tolist() == top.indices.tolist()
    np.testing.assert_allclose(distribution.probabilities, (top.values / top.values.sum()).numpy(), rtol=1e-4)
    assert np.array_equal(distribution.probabilities.astype(np.float32).astype(np.float64), distribution.probabilities)


async def test_top_p_of_the_request_is_applied_to_the_draft(make: Callable[..., ModelFamily], prompts: list[list[int]]) -> None:
    family = make(max_entries=32)
    family.open(sampled(prompts[0], 1, top_p=1.0))
    family.open(sampled(prompts[0], 2, top_p=0.3))
    wide, narrow = (p.distributions[0] for p in (await family.draft(never)).proposals)
    assert 1 <= len(narrow.token_ids) < len(wide.token_ids) == 32


async def test_what_is_sampled_passes_the_verifiers_checks_and_repeats_with_its_seed(
    make: Callable[..., ModelFamily], runner: ModelRunner, prompts: list[list[int]]
) -> None:
    batches = []
    for _ in range(2):
        family = make()
        for i, prompt in enumerate(prompts):
            family.open(sampled(prompt, i, seed=77))
        batches.append(await family.draft(never))
    received = drafts_from_proto(drafts_to_proto(batches[0]), runner.vocab_size)
    assert len(received.proposals) == len(prompts)
    assert all(len(p.distributions) == len(p.token_ids) for p in received.proposals)
    assert [p.token_ids for p in batches[0].proposals] == [p.token_ids for p in batches[1].proposals]


async def test_no_number_is_drawn_with_twice(
    make: Callable[..., ModelFamily], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that was drafted and fell has had a say in what came of the others, so what is drafted anew needs another number."""
    asked: list[tuple[int, int, int]] = []

    def counted(seeds: list[int], positions: list[int], purpose: Purpose, steps: list[int]) -> np.ndarray:
        asked.extend(zip(seeds, positions, steps, strict=True))
        return uniforms(seeds, positions, purpose, steps)

    monkeypatch.setattr("drafter_svc.families.model.uniforms", counted)
    family = make(branch_count=4)
    texts = [list(prompt) for prompt in prompts]
    for i, text in enumerate(texts):
        family.open(opened(text, i, sampling=SamplingParams(), rule=Rule.SPARSE))
    for epoch in range(1, 6):
        guesses = await all_of(family)
        for i, text in enumerate(texts):
            new = [*guesses[i][: epoch % 3], (guesses[i][epoch % 3] + 1) % 4096]
            text += new
            family.verdict(Verdict(i, epoch, 0, len(text), epoch % 3, new))
    assert len(asked) > 100
    assert len(asked) == len(set(asked))


async def test_no_two_drafters_and_no_two_sequences_draw_alike(make: Callable[..., ModelFamily], prompts: list[list[int]]) -> None:
    """Else what one of them drew would tell what the other did, and a restarted drafter would draw the same again."""
    drawn = []
    for _ in range(2):
        family = make()
        for i in range(8):
            family.open(opened(prompts[1], i, sampling=SamplingParams(2.0), rule=Rule.SPARSE))
        drawn += [tuple(tokens) for tokens in (await all_of(family)).values()]
    assert len(drawn) == len(set(drawn)) == 16


async def test_a_greedy_request_is_drafted_greedily_though_it_may_sample(
    make: Callable[..., ModelFamily], prompts: list[list[int]], greedy: Callable[[list[int], int], list[int]]
) -> None:
    family = make()
    family.open(opened(prompts[0], sampling=GREEDY, rule=Rule.SPARSE, window=3))
    proposal = (await family.draft(never)).proposals[0]
    assert (proposal.token_ids, proposal.distributions) == (greedy(prompts[0], 3), [])
