"""The suffix family proposes likely continuations from earlier texts of the same tenant."""

from typing import Any

import pytest

from drafter_svc.families import suffix
from drafter_svc.families.suffix import SuffixFamily, SuffixSettings
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from drafter_svc.pools.corpora import Corpora
from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.draft_messages import Opened, Skip, Window
from outrider.protocol.model_info import ModelInfo, Stage
from tests.family_rig import Rig, opened_sequence

pytest.importorskip(
    "arctic_inference", reason="the suffix family's package is missing: make suffix"
)


def opened(sequence_id: int, tokens: list[int], tenant: str = "", tree_tokens: int = 0) -> Opened:
    more = {"tenant": tenant, "prompt_length": len(tokens), "tree_tokens": tree_tokens}
    return opened_sequence(sequence_id, tokens, Window(64, 16), 4, **more)


async def proposed(rig: Rig) -> list[list[int]]:
    return [proposal.token_ids for proposal in (await rig.draft()).proposals]


async def test_a_proposal_is_as_long_as_the_matched_suffix() -> None:
    rig = Rig(SuffixFamily(SuffixSettings()))
    rig.open(opened(1, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]))
    assert await proposed(rig) == [[4, 5, 6]]


async def test_a_proposal_ends_where_it_becomes_unlikely() -> None:
    text = [1, 2, 3, 9] + [token for other in range(20, 32) for token in (1, 2, 3, other)]
    rig = Rig(SuffixFamily(SuffixSettings()))
    rig.open(opened(1, [*text, 1, 2]))
    assert await proposed(rig) == [[3]]


async def test_an_unknown_text_is_skipped_and_committed_tokens_learned() -> None:
    rig = Rig(SuffixFamily(SuffixSettings()))
    rig.open(opened(1, [1, 2, 3]))
    assert (await rig.draft()).skips == [Skip(1, 3)]
    rig.commit(1, 4, 5, 1, 2, 3)
    assert await proposed(rig) == [[4, 5, 1]]


async def test_texts_help_later_ones_of_the_same_tenant_alone() -> None:
    for shared, expected in ((False, []), (True, [[3, 4]])):
        rig = Rig(SuffixFamily(SuffixSettings(is_public_pool=shared)))
        rig.open(opened(1, [9], tenant="a"))
        rig.commit(1, 1, 2, 3, 4, 5)
        rig.close(1)
        rig.open(opened(2, [8, 1, 2], tenant="a"))
        assert await proposed(rig) == [[3, 4]]
        rig.close(2)
        rig.open(opened(3, [8, 1, 2], tenant="b"))
        assert await proposed(rig) == expected


async def test_connections_of_one_tokenizer_share_trees_that_are_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    init = Corpora.__init__

    def count(self: Corpora, *arguments: Any, **more: Any) -> None:
        made.append("corpora")
        init(self, *arguments, **more)

    monkeypatch.setattr(Corpora, "__init__", count)
    place = PlacementPlan("local", (), None, None)
    loaded = await SuffixFamily.load(SuffixSettings(), place, DrafterMetrics("d1", "suffix"))
    made.clear()
    for fingerprint, size in (("f1", 9), ("f1", 9), ("f2", 9), ("f1", 9), ("f2", 9), ("f1", 0)):
        info = ModelInfo("m", Stage.READY, tokenizer_fingerprint=fingerprint, vocab_size=size)
        loaded.make(info)
    # A verifier that gives another size of the vocabulary has trees of its own.
    assert made == ["corpora"] * 3


async def test_the_corpus_is_bounded() -> None:
    rig = Rig(SuffixFamily(SuffixSettings(max_cached_requests=3)))
    for sequence_id in range(4):
        rig.open(opened(sequence_id, [9]))
        rig.commit(sequence_id, 10 * sequence_id + 1, 10 * sequence_id + 2, 10 * sequence_id + 3)
        rig.close(sequence_id)
    rig.open(opened(10, [1, 2]))
    assert await proposed(rig) == []
    rig.close(10)
    rig.open(opened(11, [31, 32]))
    assert await proposed(rig) == [[33]]


async def test_proposals_stay_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "_SPEC_FACTOR", 9.0)
    rig = Rig(SuffixFamily(SuffixSettings()))
    rig.open(opened(1, [*range(100, 140), *range(100, 120)]))
    assert await proposed(rig) == [list(range(120, 136))]


async def test_where_trees_are_verified_other_continuations_are_branches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suffix, "_SPEC_FACTOR", 2.0)
    rig = Rig(SuffixFamily(SuffixSettings()))
    rig.open(opened(1, [1, 2, 3, 4, 1, 2, 3, 6, 1, 2, 3, 4, 5, 9, 1, 2], tree_tokens=9))
    [proposal] = (await rig.draft()).proposals
    assert proposal.token_ids[:2] == [3, 4]
    paths = list(zip(proposal.parents, proposal.token_ids, strict=True))
    assert (1, 6) in paths
    assert len(paths) <= 9
    # 4 followed twice and 6 once.
    of = dict(zip(paths, proposal.confidences, strict=True))
    assert of[1, 4] == pytest.approx(2 * of[1, 6])


async def test_a_chain_that_cannot_grow_gets_no_branches_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The family's trees may be deeper than its chain: here they go on where the chain ends."""
    monkeypatch.setattr(suffix, "_SPEC_FACTOR", 0.3)
    family = SuffixFamily(SuffixSettings())
    sequence = DraftSequence(opened(1, [1, 2, 3, 4, 5, 1, 2], tree_tokens=9))
    family.opened(sequence)
    sequence.extend([3])
    await family.propose([sequence], lambda: False)
    assert sequence.guesses == [3]


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(Exception, match=r"pip install '\.\[suffix\]'"):
        SuffixFamily(SuffixSettings())
