"""The draft model prepares branches: they are what it would write there, and one that comes true becomes the chain."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from family_rig import Rig

from drafter_svc.families.draft_model import DraftModel
from drafter_svc.families.model import ModelFamily
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.messages import DraftDistribution, Opened, Proposal, SamplingParams, Window
from outrider.tokenizer import load_tokenizer

MODEL = str(Path(__file__).parents[2] / "models/draft")
PROMPT = "class Node:\n    def __init__(self, value, children):\n        self.value ="
DEPTH = 4
WINDOW = Window(token_count=100, depth=9)


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture(scope="module")
def runner(thread: ThreadPoolExecutor) -> ModelRunner:
    return thread.submit(
        ModelRunner.load, MODEL, dtype="float32", device="cpu", threads=1, page_count=512
    ).result()


@pytest.fixture
def family(runner: ModelRunner, thread: ThreadPoolExecutor) -> ModelFamily:
    return ModelFamily(DraftModel(runner, thread), runner.vocab_size)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return load_tokenizer(MODEL).encode(PROMPT).ids


def greedy_logits(runner: ModelRunner, thread: ThreadPoolExecutor, text: list[int]) -> torch.Tensor:
    """What the model thinks of what follows `text`, [V], with nothing kept from before."""
    pages = list(range(400, 400 + -(-len(text) // runner.page_size)))
    return thread.submit(runner.forward, [SequenceSlice(text, 0, pages, 1)]).result()[0]


def greedy(
    runner: ModelRunner, thread: ThreadPoolExecutor, text: list[int], count: int
) -> list[int]:
    """What the model writes after `text`."""
    tokens = list(text)
    for _ in range(count):
        tokens.append(int(greedy_logits(runner, thread, tokens).argmax()))
    return tokens[len(text) :]


def opened(
    tokens: list[int],
    window: Window = WINDOW,
    sampling: SamplingParams | None = None,
    distribution: DraftDistribution = DraftDistribution.ONE_HOT,
) -> Opened:
    return Opened(1, tokens, sampling or SamplingParams(0.0), distribution, window, DEPTH)


def _chain_length(proposal: Proposal) -> int:
    """How many of a proposal's tokens are its first path; a branch begins below an earlier one."""
    return next(
        (i for i, parent in enumerate(proposal.parents) if parent != i), len(proposal.token_ids)
    )


async def branches_of(rig: Rig) -> list[tuple[int, list[int]]]:
    """All branches that are proposed until the next verdict, with their places; the window is kept."""
    found: list[tuple[int, list[int]]] = []
    window = rig.session.sequences[1].window
    for proposal in (await rig.drafts()).proposals:
        first = _chain_length(proposal)
        for token, parent in zip(proposal.token_ids[first:], proposal.parents[first:], strict=True):
            if parent < first:
                found.append((parent, [token]))
            else:
                found[-1][1].append(token)
    count = len(rig.guesses(1)) + sum(len(run) for _, run in found)
    assert count <= window.token_count
    assert all(at + len(run) <= window.depth for at, run in found)
    return found


@pytest.mark.parametrize("distribution", [DraftDistribution.ONE_HOT, DraftDistribution.SPARSE])
async def test_branches_are_what_the_model_would_write_there(
    distribution: DraftDistribution,
    family: ModelFamily,
    runner: ModelRunner,
    thread: ThreadPoolExecutor,
    prompt: list[int],
) -> None:
    """Beside a sampled chain as well: as its distribution goes with no branch, what is drawn there would count as the likeliest."""
    rig = Rig(family)
    rig.open(
        opened(
            prompt,
            sampling=SamplingParams(
                1.0 if distribution is DraftDistribution.SPARSE else 0.0, seed=3
            ),
            distribution=distribution,
        )
    )
    branches, chain = await branches_of(rig), rig.guesses(1)
    assert (chain == greedy(runner, thread, prompt, WINDOW.depth)) is (
        distribution is DraftDistribution.ONE_HOT
    )
    assert branches
    for at, run in branches:
        assert run[0] != chain[at]
        assert run[1:] == greedy(runner, thread, [*prompt, *chain[:at], run[0]], len(run) - 1)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
async def test_a_branch_that_comes_true_goes_on_as_if_it_had_been_the_chain(
    place: int,
    family: ModelFamily,
    runner: ModelRunner,
    thread: ThreadPoolExecutor,
    prompt: list[int],
) -> None:
    family._branch_count = 12
    rig = Rig(family)
    rig.open(opened(prompt))
    branches = await branches_of(rig)
    run = next(run for at, run in branches if at == place)
    new = [*rig.guesses(1)[:place], run[0]]
    rig.commit(1, *new)
    assert rig.guesses(1) == run[1:]
    await rig.drafts()
    assert rig.guesses(1) == greedy(runner, thread, [*prompt, *new], WINDOW.depth)
    rig.close(1)
    family._pool.check_integrity()


async def test_behind_a_branch_that_came_true_branches_are_prepared_where_their_tokens_belong(
    family: ModelFamily, runner: ModelRunner, thread: ThreadPoolExecutor, prompt: list[int]
) -> None:
    """The model remembers other tokens for guesses that were the chain's when they were made, and none for those of a branch."""
    family._branch_count = 12
    rig = Rig(family)
    rig.open(opened(prompt))
    branches = await branches_of(rig)
    at, run = branches[0]
    new = [*rig.guesses(1)[:at], run[0]]
    rig.commit(1, *new)
    assert len(family._drafts[1].others) == len(rig.guesses(1)) == len(run) - 1
    later, chain = await branches_of(rig), rig.guesses(1)
    for at, run in later:
        logits = greedy_logits(runner, thread, [*prompt, *new, *chain[:at]])
        assert run[0] in logits.topk(4).indices


async def test_a_miss_that_nobody_foresaw_gives_every_page_back(
    family: ModelFamily, runner: ModelRunner, thread: ThreadPoolExecutor, prompt: list[int]
) -> None:
    rig = Rig(family)
    rig.open(opened(prompt))
    branches = await branches_of(rig)
    known = {rig.guesses(1)[0], *(run[0] for at, run in branches if at == 0)}
    new = next(token for token in range(100, 200) if token not in known)
    rig.commit(1, new)
    assert rig.guesses(1) == []
    await rig.drafts()
    assert rig.guesses(1) == greedy(runner, thread, [*prompt, new], WINDOW.depth)
    rig.close(1)
    family._pool.check_integrity()
    assert family._pool.used_count == 0


async def test_branches_of_a_round_that_failed_give_their_pages_back(
    family: ModelFamily, runner: ModelRunner, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round fails once, and the session asks again."""
    rig = Rig(family)
    rig.open(opened(prompt))
    await rig.draft()
    forward, failures = runner.forward, iter([ZeroDivisionError("planted")])

    def failing(slices: list[SequenceSlice]) -> torch.Tensor:
        for failure in failures:
            raise failure
        return forward(slices)

    monkeypatch.setattr(runner, "forward", failing)
    assert await branches_of(rig)
    assert not rig.abandoned
    rig.close(1)
    family._pool.check_integrity()
    assert family._pool.used_count == 0


async def test_where_a_drafter_is_not_to_run_ahead_it_prepares_for_nothing(
    family: ModelFamily, prompt: list[int]
) -> None:
    rig = Rig(family)
    rig.open(opened(prompt, Window(DEPTH, DEPTH)))
    assert await branches_of(rig) == []
    assert len(rig.guesses(1)) == DEPTH


@pytest.mark.parametrize("distribution", [DraftDistribution.SPARSE, DraftDistribution.COUPLED])
async def test_branches_of_sampled_drafts_are_never_taken_for_samples(
    distribution: DraftDistribution, family: ModelFamily, prompt: list[int]
) -> None:
    """A path that mixes a sample with a choice would bias the output if it were judged as sampled."""
    rig = Rig(family)
    rig.open(opened(prompt, sampling=SamplingParams(1.0, seed=3), distribution=distribution))
    said = (await rig.drafts()).proposals
    assert any(proposal.parents for proposal in said)
    for proposal in said:
        assert not any(proposal.distributions[_chain_length(proposal) :])
