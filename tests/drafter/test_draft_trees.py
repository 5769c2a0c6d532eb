"""If the verifier verifies trees, the draft model proposes its next-best tokens as branches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.draft_messages import Opened, Proposal, Window
from outrider.protocol.messages import DraftDistribution, SamplingParams
from outrider.sampling.noise import coupled_keys
from outrider.sampling.sampler import coupled_top, target_probs
from tests.drafter.draft_model_rig import GREEDY, Make, opened
from tests.family_rig import Rig

DEPTH = 4
# A drafter on the target's cores gets a window for the next step only. Other drafters run ahead.
WINDOWS = {"next step": Window(16, DEPTH), "ahead": Window(54, 9)}
Reference = Callable[[list[int]], torch.Tensor]


def asked(
    tokens: list[int],
    window: Window = WINDOWS["next step"],
    tree_tokens: int = 16,
    sampling: SamplingParams = GREEDY,
    distribution: DraftDistribution = DraftDistribution.ONE_HOT,
) -> Opened:
    """Return a sequence for which the verifier verifies trees."""
    request = opened(tokens, depth=DEPTH, sampling=sampling, distribution=distribution)
    return replace(request, window=window, tree_tokens=tree_tokens)


async def first_proposal(rig: Rig, request: Opened) -> Proposal:
    rig.open(request)
    [proposal] = (await rig.draft()).proposals
    return proposal


def leaves_of(proposal: Proposal) -> dict[int, dict[int, float]]:
    """Return the confidences of the tokens beside the chain, keyed by place and token."""
    found: dict[int, dict[int, float]] = {}
    for i in range(DEPTH, len(proposal.token_ids)):
        place = proposal.parents[i]
        assert place < DEPTH
        found.setdefault(place, {})[proposal.token_ids[i]] = proposal.confidences[i]
    return found


@pytest.mark.parametrize("window", WINDOWS)
async def test_leaves_are_the_next_likeliest_tokens_and_their_probabilities(
    window: str, make: Make, prompts: list[list[int]], reference: Reference
) -> None:
    for prompt in prompts:
        proposal = await first_proposal(make(), asked(prompt, WINDOWS[window]))
        chain = proposal.token_ids[:DEPTH]
        assert len(proposal.token_ids) == 16
        cumulative_values, offered = [], []
        cumulative = 1.0
        leaves = leaves_of(proposal)
        for place in range(DEPTH):
            probs = reference([*prompt, *chain[:place]]).softmax(-1)
            best = probs.topk(8)
            assert chain[place] == int(best.indices[0])
            assert proposal.confidences[place] == pytest.approx(float(best.values[0]), rel=1e-3)
            for token, share in leaves.get(place, {}).items():
                assert share == pytest.approx(float(probs[token]), rel=1e-3)
                offered.append(cumulative * share)
            cumulative_values += [cumulative * value for value in best.values[1:].tolist()]
            cumulative *= float(best.values[0])
        # The room went to the alternatives that are likeliest to be committed.
        expected = sorted(cumulative_values, reverse=True)[: 16 - DEPTH]
        assert sorted(offered, reverse=True) == pytest.approx(expected, rel=1e-3)


async def test_leaves_of_coupled_drafts_come_next_in_the_order_of_the_draw(
    make: Make, prompts: list[list[int]], reference: Reference
) -> None:
    sampling = SamplingParams(1.0, seed=5)
    request = asked(prompts[0], sampling=sampling, distribution=DraftDistribution.COUPLED)
    proposal = await first_proposal(make(), request)
    assert not proposal.distributions
    chain = proposal.token_ids[:DEPTH]
    leaves = leaves_of(proposal)
    assert leaves
    for place, found in leaves.items():
        text = [*prompts[0], *chain[:place]]
        probs = target_probs(reference(text).unsqueeze(0), [sampling])
        ids, shares = coupled_top(probs, torch.from_numpy(coupled_keys([5], [len(text)])), 8)
        order = dict(zip(ids[0].tolist(), shares[0].tolist(), strict=True))
        assert chain[place] == next(iter(order))
        assert list(found) == list(order)[1 : 1 + len(found)]
        for token, share in found.items():
            assert share == pytest.approx(order[token], rel=1e-3)


async def test_a_sampled_draft_stays_a_chain_without_confidences(
    make: Make, prompts: list[list[int]]
) -> None:
    sampling = SamplingParams(1.0, seed=5)
    request = asked(prompts[0], sampling=sampling, distribution=DraftDistribution.SPARSE)
    proposal = await first_proposal(make(), request)
    assert (len(proposal.token_ids), proposal.parents) == (DEPTH, [])
    assert not proposal.confidences
    assert all(proposal.distributions)


async def test_a_leaf_grows_into_a_branch_while_its_tree_is_verified(
    make: Make, prompts: list[list[int]]
) -> None:
    rig = make(branch_count=4)
    leaves = leaves_of(await first_proposal(rig, asked(prompts[3], WINDOWS["ahead"])))
    await rig.drafts()
    sequence: DraftSequence = rig.session.sequences[1]
    grown = [
        (place, token)
        for place, found in leaves.items()
        for token in found
        if sequence.has_guess_after(place, token)
    ]
    assert grown
    place, token = grown[0]
    rig.commit(1, *sequence.guesses[:place], token, tree_tokens=16)
    assert sequence.guesses
    rig.close(1)
