"""The n-gram family proposes earlier continuations, runs ahead within its window, or skips."""

from dataclasses import replace

import pytest

from drafter_svc.families.ngram import NgramFamily, NgramSettings
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from drafter_svc.pools.memory import MemoryPool, NgramOptions
from drafter_svc.pools.redis import RedisPool
from outrider.protocol.draft_messages import Opened, Proposal, Window
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.tokenizer import load_tokenizer
from tests.family_rig import Rig, opened_sequence
from tests.ngram.pools import pool
from tests.redis_servers import Standalone
from tests.waiting import until


def opened(sequence_id: int, tokens: list[int], depth: int = 6) -> Opened:
    """Return a sequence with 4 draft tokens a step and a window of `depth` tokens."""
    return opened_sequence(sequence_id, tokens, Window(4 * depth, depth), 4)


async def test_a_repeated_text_is_proposed_up_to_the_window() -> None:
    rig = Rig(NgramFamily(NgramOptions(max_draft_len=4), 1000))
    rig.open(opened(1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]))
    proposals = (await rig.drafts()).proposals
    assert [proposal.token_ids for proposal in proposals] == [[3, 4, 5, 6], [3, 4, 5, 6, 7, 8]]


async def test_committed_tokens_are_learned_and_the_chain_is_kept_on_a_hit() -> None:
    rig = Rig(NgramFamily(NgramOptions(max_draft_len=3), 1000))
    rig.open(opened(1, [1, 2, 3, 4, 5, 1, 2], depth=3))
    assert (await rig.drafts()).proposals[0].token_ids == [3, 4, 5]
    rig.commit(1, 3, 4)
    assert (await rig.drafts()).proposals == [Proposal(1, 9, [5, 1, 2])]


@pytest.mark.parametrize(
    "earlier",
    [
        pytest.param(
            '<|assistant|><tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}'
            "\n</tool_call><|end|>",
            id="an earlier call",
        ),
        pytest.param(
            '<tools>\n{"name": "get_weather", "arguments": {"city": "a town"}}\n</tools>',
            id="an example among the definitions",
        ),
    ],
)
async def test_a_call_in_the_prompt_is_drafted_when_the_model_calls(earlier: str) -> None:
    tokenizer = load_tokenizer("models/target")
    prompt = tokenizer.encode(f"{earlier}<|user|>And in Oslo?<|end|><|assistant|>").ids
    begun = tokenizer.encode('<tool_call>\n{"name').ids
    rig = Rig(NgramFamily(NgramOptions(max_draft_len=16), 1000))
    rig.open(opened_sequence(1, prompt, Window(64, 16), 16, prompt_length=len(prompt)))
    rig.commit(1, *begun)
    drafted = tokenizer.decode((await rig.draft()).proposals[0].token_ids)
    assert drafted.startswith('": "get_weather", "arguments": {"city": "')


async def test_another_continuation_is_a_branch_and_can_be_committed() -> None:
    """First 8 9 follows 1 2, and later 3 4 does. The newer is the chain, and the older a branch."""
    rig = Rig(NgramFamily(NgramOptions(max_draft_len=3), 1000))
    rig.open(opened(1, [1, 2, 8, 9, 7, 5, 1, 2, 3, 4, 6, 1, 2], depth=9))
    *_, last = (await rig.drafts()).proposals
    assert last.token_ids[:2] == [3, 4]
    at = last.token_ids.index(8)
    assert last.token_ids[at : at + 3] == [8, 9, 7]
    assert last.parents[at : at + 3] == [0, at + 1, at + 2]
    rig.commit(1, 8)
    assert rig.guesses(1) == [9, 7]
    first = (await rig.draft()).proposals[0]
    assert first.token_ids[:3] == [9, 7, 5]


TREE = [1, 2, 8, 9, 7, 5, 1, 2, 3, 4, 6, 1, 2, 8, 9, 7, 0, 1, 2]


async def test_where_trees_are_verified_branches_come_with_the_chain() -> None:
    rig = Rig(NgramFamily(NgramOptions(max_draft_len=3), 1000))
    window = Window(12, 4)
    rig.open(replace(opened(1, TREE), window=window, tree_tokens=12))
    proposal, *_ = (await rig.draft()).proposals
    assert proposal.token_ids[:3] == [8, 9, 7]
    paths = list(zip(proposal.parents, proposal.token_ids, strict=True))
    of = dict(zip(paths, proposal.confidences, strict=True))
    # 1 2 was followed by 8 twice and by 3 once; a quarter is left for all other tokens.
    assert of[0, 8] == pytest.approx(2 / 4)
    assert of[0, 3] == pytest.approx(1 / 4)
    at = paths.index((0, 3))
    assert proposal.token_ids[at : at + 3] == [3, 4, 6]
    assert len(paths) <= 12


async def test_the_likeliest_continuations_get_the_room() -> None:
    rig = Rig(NgramFamily(NgramOptions(max_draft_len=3), 1000))
    rig.open(replace(opened(1, TREE), window=Window(12, 4), tree_tokens=5))
    proposal, *_ = (await rig.draft()).proposals
    assert (proposal.token_ids, proposal.parents) == ([8, 9, 7, 3, 4], [0, 1, 2, 0, 4])


async def test_private_pools_are_separate_and_a_public_one_is_shared() -> None:
    for shared, expected in ((None, []), (MemoryPool(NgramOptions(), 1000), [[3, 4, 5]])):
        rig = Rig(NgramFamily(NgramOptions(), 1000, shared))
        rig.open(opened(1, [1, 2, 3, 4, 5]))
        await rig.drafts()
        rig.close(1)
        rig.open(opened(2, [9, 1, 2]))
        assert [proposal.token_ids for proposal in (await rig.drafts()).proposals] == expected


async def learn(rig: Rig, made: RedisPool, tokens: list[int], tenant: str = "") -> None:
    """Open and close a sequence with this text, and wait until Redis has its n-grams."""
    before = made.counters.written
    rig.open(replace(opened(1, tokens), tenant=tenant))
    rig.close(1)
    n = len(tokens) - 1
    await until(lambda: made.counters.written == before + 3 * n - 3)


async def test_replicas_share_through_redis_and_go_on_without_it(redis_server: Standalone) -> None:
    async with pool(redis_server.server) as first, pool(redis_server.server) as second:
        one = Rig(NgramFamily(NgramOptions(), 1000, None, first))
        other = Rig(NgramFamily(NgramOptions(), 1000, None, second))
        await learn(one, first, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
        other.open(opened(2, [20, 1, 2]))
        assert (await other.drafts()).proposals[0].token_ids == [3, 4, 5, 6, 7, 8]
        redis_server.kill()
        other.open(opened(3, [30, 31, 30]))
        assert (await other.drafts()).proposals[0].token_ids == [31, 30]


@pytest.mark.parametrize(("public", "drafted"), [(False, {3}), (True, {2, 3})])
async def test_in_redis_tenants_share_only_the_public_pool(
    redis_server: Standalone, public: bool, drafted: set[int]
) -> None:
    async with pool(redis_server.server, public=public) as made:
        rig = Rig(NgramFamily(NgramOptions(), 1000, None, made))
        await learn(rig, made, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], "a")
        rig.open(replace(opened(2, [20, 1, 2]), tenant="b"))
        rig.open(replace(opened(3, [20, 1, 2]), tenant="a"))
        drafts = await rig.drafts()
        assert {proposal.sequence_id for proposal in drafts.proposals} == drafted
        assert {skip.sequence_id for skip in drafts.skips} >= {2, 3} - drafted


async def test_one_round_trip_to_redis_serves_all_unknown_sequences(
    redis_server: Standalone,
) -> None:
    async with pool(redis_server.server) as made:
        rig = Rig(NgramFamily(NgramOptions(), 1000, None, made))
        await learn(rig, made, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
        for sequence_id in range(2, 6):
            rig.open(opened(sequence_id, [20 + sequence_id, 1, 2]))
        before = made.counters.lookups
        assert {proposal.sequence_id for proposal in (await rig.draft()).proposals} == {2, 3, 4, 5}
        assert made.counters.lookups == before + 1


async def test_verifiers_with_different_tokenizers_share_no_public_pool() -> None:
    """In another tokenizer, the same ids stand for other text."""
    settings = NgramSettings(is_public_pool=True)
    place = PlacementPlan("local", (), None, None)
    loaded = await NgramFamily.load(settings, place, DrafterMetrics("d", "ngram"))
    first, alike, other = [
        loaded.make(ModelInfo("m", Stage.READY, tokenizer_fingerprint=name)) for name in "aab"
    ]
    Rig(first).open(opened(1, [1, 2, 3, 4, 5]))
    guesses = []
    for family in (alike, other):
        rig = Rig(family)
        rig.open(opened(1, [9, 1, 2]))
        await rig.drafts()
        guesses.append(rig.guesses(1))
    assert guesses == [[3, 4, 5], []]
