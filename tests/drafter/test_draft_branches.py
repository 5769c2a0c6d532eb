"""A branch of the draft model goes on greedily; a committed branch becomes the next chain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drafter_svc.families.model import ModelFamily
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import Proposal
from outrider.protocol.messages import DraftDistribution, SamplingParams
from tests.drafter.draft_model_rig import Greedy, Make, opened
from tests.family_rig import Rig

DEPTH = 9
Reference = Callable[[list[int]], torch.Tensor]


@pytest.fixture
def rig(make: Make) -> Rig:
    return make(branch_count=12)


@pytest.fixture
def prompt(prompts: list[list[int]]) -> list[int]:
    return prompts[3]


def family_of(rig: Rig) -> ModelFamily:
    family = rig.session._strategy
    assert isinstance(family, ModelFamily)
    return family


def close(rig: Rig) -> None:
    """Close the sequence, and check that its pages are free."""
    rig.close(1)
    family_of(rig)._pool.check_integrity()
    assert family_of(rig)._pool.used_count == 0


def chain_length(proposal: Proposal) -> int:
    """Return the length of a proposal's chain, where each token's parent is the token before it."""
    return next(
        (i for i, parent in enumerate(proposal.parents) if parent != i), len(proposal.token_ids)
    )


async def branches_of(rig: Rig) -> list[tuple[int, list[int]]]:
    """Return all branches that are proposed until the next verdict, as (place, tokens).

    The function also checks that guesses and branches together stay within the window.
    """
    found: list[tuple[int, list[int]]] = []
    window = rig.session.sequences[1].window
    for proposal in (await rig.drafts()).proposals:
        first = chain_length(proposal)
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
    distribution: DraftDistribution, rig: Rig, greedy: Greedy, prompt: list[int]
) -> None:
    """Branches beside a sampled chain must be greedy too, since they carry no distribution."""
    is_greedy = distribution is DraftDistribution.ONE_HOT
    sampling = SamplingParams(0.0 if is_greedy else 1.0, seed=3)
    rig.open(opened(prompt, sampling=sampling, distribution=distribution))
    branches = await branches_of(rig)
    chain = rig.guesses(1)
    assert (chain == greedy(prompt, DEPTH)) is is_greedy
    assert branches
    for at, run in branches:
        assert run[0] != chain[at]
        assert run == [run[0], *greedy([*prompt, *chain[:at], run[0]], len(run) - 1)]


@pytest.mark.parametrize("at_page_end", [False, True])
@pytest.mark.parametrize("place", [0, 2])
async def test_a_committed_branch_brings_its_cache_and_continues_like_a_chain(
    place: int, at_page_end: bool, rig: Rig, greedy: Greedy, prompt: list[int], runner: ModelRunner
) -> None:
    """With `at_page_end`, the branch's first token replaces a guess in the last slot of a page."""
    text = (prompt * 8)[: 2 * runner.page_size - 1 - place] if at_page_end else prompt
    rig.open(opened(text))
    branches = await branches_of(rig)
    run = next(run for at, run in branches if at == place)
    new = [*rig.guesses(1)[:place], run[0]]
    rig.commit(1, *new)
    assert rig.guesses(1) == run[1:] == greedy([*text, *new], len(run) - 1)
    # Only the branch's last guess has not yet been through a forward.
    assert family_of(rig)._drafts[1].unread_count == 1
    await rig.drafts()
    assert rig.guesses(1) == greedy([*text, *new], DEPTH)
    close(rig)


async def test_behind_a_committed_branch_new_branches_fit_their_places(
    rig: Rig, reference: Reference, prompt: list[int]
) -> None:
    """The family remembers alternatives to guesses of a chain, but not to guesses of a branch."""
    rig.open(opened(prompt))
    at, run = (await branches_of(rig))[0]
    new = [*rig.guesses(1)[:at], run[0]]
    rig.commit(1, *new)
    assert len(family_of(rig)._drafts[1].alternatives) == len(rig.guesses(1)) == len(run) - 1
    later = await branches_of(rig)
    chain = rig.guesses(1)
    for at, run in later:
        assert run[0] in reference([*prompt, *new, *chain[:at]]).topk(4).indices


async def test_a_miss_without_a_branch_frees_all_pages(
    rig: Rig, greedy: Greedy, prompt: list[int]
) -> None:
    rig.open(opened(prompt))
    branches = await branches_of(rig)
    known = {rig.guesses(1)[0], *(run[0] for at, run in branches if at == 0)}
    new = next(token for token in range(100, 200) if token not in known)
    rig.commit(1, new)
    assert rig.guesses(1) == []
    await rig.drafts()
    assert rig.guesses(1) == greedy([*prompt, new], DEPTH)
    close(rig)


async def test_branches_of_a_failed_round_free_their_pages(
    rig: Rig, runner: ModelRunner, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session asks the family again after a failed round."""
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
    close(rig)


@pytest.mark.parametrize("distribution", [DraftDistribution.SPARSE, DraftDistribution.COUPLED])
async def test_branches_of_sampled_drafts_carry_no_distributions(
    distribution: DraftDistribution, rig: Rig, prompt: list[int]
) -> None:
    """A branch is chosen, not sampled. To verify it as a sample would bias the output."""
    rig.open(opened(prompt, sampling=SamplingParams(1.0, seed=3), distribution=distribution))
    proposals = (await rig.drafts()).proposals
    assert any(proposal.parents for proposal in proposals)
    for proposal in proposals:
        assert not any(proposal.distributions[chain_length(proposal) :])
