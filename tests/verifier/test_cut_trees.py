"""Trees are cut where a forward lacks room or a grammar forbids a guess."""

from __future__ import annotations

from outrider.grammar.backends import Mask
from outrider.protocol.messages import TokenRequest
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, make_engine
from verifier_svc.drafts.draft_message import main_path_outcome
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.policy.draft_trees import ChosenDraft
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence
from verifier_svc.state.trie import DraftTree
from verifier_svc.verification.grammar_masks import GrammarMasks


def decoding(page_count: int = 64, max_batch_tokens: int = 64) -> tuple[Engine, Sequence]:
    """Return an engine with pages of 4 tokens, a drafter, and a sequence of 3 tokens."""
    config = EngineConfig(max_batch_tokens=max_batch_tokens)
    engine, _ = make_engine(page_count=page_count, config=config, eos_bias=-99)
    ScriptedDrafter(engine)
    sequence = engine.submit(TokenRequest([1, 2], 6, GREEDY), Client())
    engine.step()
    return engine, sequence


def schedule(engine: Engine, sequence: Sequence, tree: DraftTree) -> ScheduledSequence:
    """Return the sequence's part of the next batch, if `tree` is its draft."""
    chosen: ChosenDraft = (sequence.assignments["scripted"], tree)
    planned = {sequence.id: len(tree.token_ids)}
    [scheduled] = engine.scheduler.next(planned, {sequence.id: chosen})
    return scheduled


def test_of_a_tree_without_pages_the_main_path_is_verified() -> None:
    engine, sequence = decoding(page_count=2)
    tree = DraftTree([3, 4, 5, 6, 7, 0], [], [0, 1, 2, 2, 1, 0])
    scheduled = schedule(engine, sequence, tree)
    assert scheduled.draft.token_ids == [3, 4, 5]
    assert scheduled.assignment is not None


def test_trees_know_the_room_that_prompts_leave_them() -> None:
    engine, _ = decoding(max_batch_tokens=16)
    assert engine.scheduler.draft_room() == 15
    engine.submit(TokenRequest([1] * 40, 6, GREEDY), Client())
    engine.scheduler.admit()
    # The prompt gets a quarter of the batch.
    assert engine.scheduler.draft_room() == 11


class Low:
    """A grammar of tokens below 4."""

    ended = False

    def accept(self, token: int) -> bool:
        return token < 4

    def rollback(self, count: int) -> None:
        pass

    def fill(self, mask: Mask, row: int) -> None:
        mask[row] = 0b1111


def test_a_sibling_of_a_forbidden_main_guess_is_judged_as_no_main_guess() -> None:
    engine, sequence = decoding()
    sequence.matcher = Low()
    tree = DraftTree([2, 5, 3, 1], [], [0, 1, 1, 3])
    for owners in ([], ["a", "a", "b", "b"]):
        tree.drafter_ids = owners
        scheduled = schedule(engine, sequence, tree)
        cut = GrammarMasks().cut([scheduled])[0].draft
        assert (cut.token_ids, cut.parents) == ([2, 3, 1], [])
        assert cut.drafter_ids == owners[:1] + owners[2:]
        assert main_path_outcome(cut, "a", [1, 2, 3]) == (1, 1)
