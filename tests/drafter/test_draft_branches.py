"""The draft model's branches: its own greedy text, and the next chain if they are committed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from family_rig import Rig

from drafter_svc.families.cached_draft import CachedDraft
from drafter_svc.families.draft_model import DraftModel
from drafter_svc.families.model import ModelFamily
from outrider.drafter.draft_sequence import DraftSequence
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import Opened, Proposal, Window
from outrider.protocol.messages import DraftDistribution, SamplingParams
from outrider.tokenizer import load_tokenizer

MODEL = str(Path(__file__).parents[2] / "models/draft")
PROMPT = "class Node:\n    def __init__(self, value, children):\n        self.value ="
DEPTH = 4
WINDOW = Window(token_count=100, depth=9)


@pytest.fixture
def family(runner: ModelRunner, thread: ThreadPoolExecutor) -> ModelFamily:
    return ModelFamily(DraftModel(runner, thread), runner.vocab_size)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return load_tokenizer(MODEL).encode(PROMPT).ids


def greedy_logits(runner: ModelRunner, thread: ThreadPoolExecutor, text: list[int]) -> torch.Tensor:
    """The model's logits [V] behind `text`, computed from scratch."""
    pages = list(range(400, 400 + -(-len(text) // runner.page_size)))
    return thread.submit(runner.forward, [SequenceSlice(text, 0, pages, 1)]).result()[0]


def greedy(
    runner: ModelRunner, thread: ThreadPoolExecutor, text: list[int], count: int
) -> list[int]:
    """The model's greedy text behind `text`."""
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
    """The length of a proposal's chain. Behind it a token's parent is not its neighbour."""
    return next(
        (i for i, parent in enumerate(proposal.parents) if parent != i), len(proposal.token_ids)
    )


async def branches_of(rig: Rig) -> list[tuple[int, list[int]]]:
    """All branches that are proposed until the next verdict, as (place, tokens).

    Also checks that they stay within the window.
    """
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
async def test_branches_are_the_models_own_greedy_continuations(
    distribution: DraftDistribution,
    family: ModelFamily,
    runner: ModelRunner,
    thread: ThreadPoolExecutor,
    prompt: list[int],
) -> None:
    """Branches beside a sampled chain must be greedy too, since they carry no distribution."""
    is_greedy = distribution is DraftDistribution.ONE_HOT
    sampling = SamplingParams(0.0 if is_greedy else 1.0, seed=3)
    rig = Rig(family)
    rig.open(opened(prompt, sampling=sampling, distribution=distribution))
    branches = await branches_of(rig)
    chain = rig.guesses(1)
    assert (chain == greedy(runner, thread, prompt, WINDOW.depth)) is is_greedy
    assert branches
    for at, run in branches:
        assert run[0] != chain[at]
        assert run[1:] == greedy(runner, thread, [*prompt, *chain[:at], run[0]], len(run) - 1)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
async def test_a_committed_branch_continues_like_a_chain(
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


async def test_behind_a_committed_branch_new_branches_fit_their_places(
    family: ModelFamily, runner: ModelRunner, thread: ThreadPoolExecutor, prompt: list[int]
) -> None:
    """Alternatives are remembered for guesses of a chain; for those of a branch there are none."""
    family._branch_count = 12
    rig = Rig(family)
    rig.open(opened(prompt))
    branches = await branches_of(rig)
    at, run = branches[0]
    new = [*rig.guesses(1)[:at], run[0]]
    rig.commit(1, *new)
    assert len(family._drafts[1].alternatives) == len(rig.guesses(1)) == len(run) - 1
    later = await branches_of(rig)
    chain = rig.guesses(1)
    for at, run in later:
        logits = greedy_logits(runner, thread, [*prompt, *new, *chain[:at]])
        assert run[0] in logits.topk(4).indices


async def test_a_miss_without_a_branch_frees_all_pages(
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


async def test_branches_of_a_failed_round_free_their_pages(
    family: ModelFamily, runner: ModelRunner, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round fails; the session then asks the family again."""
    rig = Rig(family)
    rig.open(opened(prompt))
    await rig.draft()
    forward = runner.forward
    failures = iter([ZeroDivisionError("planted")])

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


async def test_no_branches_where_running_ahead_is_not_allowed(
    family: ModelFamily, prompt: list[int]
) -> None:
    rig = Rig(family)
    rig.open(opened(prompt, Window(DEPTH, DEPTH)))
    assert await branches_of(rig) == []
    assert len(rig.guesses(1)) == DEPTH


@pytest.mark.parametrize("distribution", [DraftDistribution.SPARSE, DraftDistribution.COUPLED])
async def test_branches_of_sampled_drafts_carry_no_distributions(
    distribution: DraftDistribution, family: ModelFamily, prompt: list[int]
) -> None:
    """A branch is chosen, not sampled. Verified as a sample, it would bias the output."""
    rig = Rig(family)
    rig.open(opened(prompt, sampling=SamplingParams(1.0, seed=3), distribution=distribution))
    proposals = (await rig.drafts()).proposals
    assert any(proposal.parents for proposal in proposals)
    for proposal in proposals:
        assert not any(proposal.distributions[_chain_length(proposal) :])


def test_a_branchs_guesses_without_shares_are_as_likely_as_the_chains(family: ModelFamily) -> None:
    sequence = DraftSequence(opened([1, 2]))
    sequence.extend([3, 4, 5], confidences=[0.5, 0.5, 0.5])
    draft = CachedDraft(sequence, 0, 100)
    branch = CachedDraft(sequence, 0, 100, at=1, run=[6, 7], run_shares=[0.25, 0.0])
    draft.branches[1, 6] = branch
    family._offer_branches(draft)
    proposal = sequence.take_proposal()
    assert proposal is not None
    assert proposal.confidences == [0.5, 0.5, 0.5, 0.25, sequence.acceptance]


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_committed_branch_brings_its_cache(
    place: int, family: ModelFamily, prompt: list[int]
) -> None:
    """Only the branch's last guess has not been read yet."""
    family._branch_count = 12
    rig = Rig(family)
    rig.open(opened(prompt))
    branches = await branches_of(rig)
    run = next(run for at, run in branches if at == place)
    rig.commit(1, *rig.guesses(1)[:place], run[0])
    assert rig.guesses(1) == run[1:]
    assert family._drafts[1].unread_count == 1


async def test_alternatives_stay_at_their_places_when_guesses_are_committed(
    family: ModelFamily, runner: ModelRunner, thread: ThreadPoolExecutor, prompt: list[int]
) -> None:
    rig = Rig(family)
    rig.open(opened(prompt))
    await rig.drafts()
    new = rig.guesses(1)[:2]
    rig.commit(1, *new)
    draft = family._drafts[1]
    assert len(draft.alternatives) == len(rig.guesses(1)) > 0
    for at, others in enumerate(draft.alternatives):
        text = [*prompt, *new, *rig.guesses(1)[:at]]
        best = greedy_logits(runner, thread, text).topk(1 + len(others)).indices.tolist()
        assert [token for token, _ in others] == best[1:]


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_branch_at_the_end_of_a_page_has_a_page_of_its_own(
    place: int,
    family: ModelFamily,
    runner: ModelRunner,
    thread: ThreadPoolExecutor,
    prompt: list[int],
) -> None:
    """The branch's first token takes the last slot of the page that the chain filled."""
    family._branch_count = 12
    text = (prompt * 8)[: 2 * runner.page_size - 1 - place]
    rig = Rig(family)
    rig.open(opened(text))
    branches = await branches_of(rig)
    chain = rig.guesses(1)
    run = next(run for at, run in branches if at == place)
    expected = greedy(runner, thread, [*text, *chain[:place], run[0]], len(run) - 1)
    assert run[1:] == expected
