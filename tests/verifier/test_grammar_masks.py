"""A grammar changes the target's distribution, but never how drafts are verified."""

import numpy as np
import pytest
import torch

from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import DraftDistribution, FinishReason, SamplingParams, TokenRequest
from tests.toy_grammars import Heads, Twice
from tests.verifier.fake_model import Client, ScriptedDrafter, finish, make_engine
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.trie import DraftTree
from verifier_svc.verification.batch import DraftVerifier, Verified
from verifier_svc.verification.grammar_masks import GrammarMasks


@pytest.mark.parametrize("sampled", [True, False])
def test_a_forbidden_draft_token_is_rejected_and_not_drawn_anew(sampled: bool) -> None:
    """The drafter draws 0 or the forbidden 2; the target draws 0 as often as 1.

    With 400 first tokens, the test detects a bias of 0.15 with a probability of 97 %.
    """
    engine, model = make_engine(trust=True)
    ScriptedDrafter(
        engine, distributions=frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE})
    )
    sequence = engine.submit(TokenRequest([3], 9, SamplingParams()), Client())
    matcher = sequence.matcher = Heads()
    sequence.mask_width = 1
    [assignment] = sequence.assignments.values()
    either = SparseDistribution(np.array([0, 2]), np.array([0.5, 0.5]))
    one = SparseDistribution(np.array([1]), np.array([1.0]))
    masks = GrammarMasks()
    draft_verifier = DraftVerifier()
    firsts = []
    for seed in range(400):
        sequence.seed = seed
        path = DraftTree([2, 1], [])
        if sampled:
            path = DraftTree([2 * (seed % 2), 1], [either, one])
        batch = masks.cut([ScheduledSequence(sequence, 0, [3], path, assignment, True)])
        logits = torch.zeros(1 + len(batch[0].draft.token_ids), model.vocab_size)
        [verified] = draft_verifier.lay_out(batch)(logits, masks.masks(batch)())
        assert isinstance(verified, Verified)
        assert verified.result is not None
        assert matcher.text == []
        accepted = batch[0].draft.token_ids[: verified.result.accepted_count]
        firsts.append([*accepted, verified.result.next_token][0])
    assert set(firsts) == {0, 1}
    assert np.mean(firsts) == pytest.approx(0.5, abs=0.1)


def test_the_bonus_token_obeys_the_grammar() -> None:
    engine, model = make_engine()
    sequence = engine.submit(TokenRequest([3], 9, SamplingParams(0.0)), Client())
    sequence.matcher = Heads()
    sequence.mask_width = 1
    logits = torch.zeros(3, model.vocab_size)
    logits[0, 0] = logits[1, 1] = logits[2, 5] = 9.0
    masks = GrammarMasks()
    batch = masks.cut([ScheduledSequence(sequence, 0, [3], DraftTree([0, 1], []), None, True)])
    [verified] = DraftVerifier().lay_out(batch)(logits, masks.masks(batch)())
    assert isinstance(verified, Verified)
    assert verified.result is not None
    assert verified.result.accepted_count == 2
    assert verified.result.next_token in (0, 1)


@pytest.mark.parametrize("draft", [[], [0, 0, 1], [0, 0, 1, 1], [0, 0]])
def test_the_end_of_a_grammar_ends_the_text_even_with_ignore_eos(draft: list[int]) -> None:
    engine, _ = make_engine(eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    request = TokenRequest([3], 9, SamplingParams(0.0), ignore_eos=True)
    sequence = engine.submit(request, client, matcher=Twice())
    engine.drain_inbox()
    if draft:
        drafter.propose(sequence.id, draft)
    finish(engine)
    assert client.error is None
    assert client.tokens == [0, 0, 1]
    assert client.finish_reason is FinishReason.STOP
