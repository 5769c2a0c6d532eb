"""The n-gram family: proposes what followed before, runs ahead within the window, says when it knows nothing."""

from dataclasses import replace

from pools import pool, until
from redis_servers import Standalone

from drafter_svc.families.ngram import NgramFamily
from drafter_svc.pools.memory import MemoryPool, NgramOptions
from drafter_svc.pools.redis import RedisPool
from outrider.messages import DraftBatch, Opened, Rule, SamplingParams, Verdict, Window


def opened(sequence_id: int, tokens: list[int], depth: int = 6) -> Opened:
    """With a window of so great a depth, for a verifier that takes 4 tokens."""
    return Opened(sequence_id, 0, tokens, SamplingParams(0.0), Rule.ONE_HOT, Window(4 * depth, depth), 4)


async def draft(family: NgramFamily) -> DraftBatch:
    """Everything the family says before it falls silent."""
    said = DraftBatch()
    while (batch := await family.draft(lambda: False)).proposals or batch.skips:
        said.proposals += batch.proposals
        said.skips += batch.skips
    return said


async def test_a_repeated_text_is_proposed_up_to_the_window() -> None:
    family = NgramFamily(NgramOptions(max_draft_len=4), 1000)
    family.open(opened(1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]))
    said = await draft(family)
    assert [token for proposal in said.proposals for token in proposal.token_ids] == [3, 4, 5, 6, 7, 8]
    assert [(p.parent_node, p.first_node) for p in said.proposals] == [(0, 1), (4, 5)]


async def test_nothing_known_is_said_once_for_each_epoch() -> None:
    family = NgramFamily(NgramOptions(), 1000)
    family.open(opened(1, [1, 2, 3]))
    assert len((await draft(family)).skips) == 1
    assert not (await draft(family)).skips
    family.verdict(Verdict(1, 1, 0, 4, 0, [9]))
    assert len((await draft(family)).skips) == 1


async def test_committed_tokens_are_learned_and_the_chain_is_kept_on_a_hit() -> None:
    family = NgramFamily(NgramOptions(max_draft_len=3), 1000)
    family.open(opened(1, [1, 2, 3, 4, 5, 1, 2], depth=3))
    assert (await draft(family)).proposals[0].token_ids == [3, 4, 5]
    family.verdict(Verdict(1, 0, 2, 9, 2, [3, 4]))
    [proposal] = (await draft(family)).proposals
    assert (proposal.parent_node, proposal.first_node, proposal.token_ids) == (3, 4, [1, 2])


async def test_what_else_followed_is_prepared_for_and_found_by_the_verdict() -> None:
    """After 1 2 the text went on with 3 4 and with 8 9; the newer is the chain, the older an outcome beside it."""
    family = NgramFamily(NgramOptions(max_draft_len=3), 1000)
    family.open(opened(1, [1, 2, 8, 9, 7, 5, 1, 2, 3, 4, 6, 1, 2], depth=9))
    said = await draft(family)
    chain, *others = said.proposals
    assert chain.token_ids[:2] == [3, 4]
    outcome = next(p for p in others if p.parent_node == 0)
    assert outcome.token_ids == [8, 9, 7]
    family.verdict(Verdict(1, 0, outcome.first_node, 14, 1, [8]))
    [following] = (await family.draft(lambda: False)).proposals[:1]
    assert following.parent_node == outcome.first_node + 2
    assert following.token_ids[0] == 5


async def test_an_outcome_is_prepared_for_at_every_place_where_a_draft_can_end() -> None:
    family = NgramFamily(NgramOptions(max_draft_len=4, max_matching_ngram_size=1), 1000)
    # Every token was followed by another one before.
    family.open(replace(opened(1, [1, 11, 2, 12, 3, 13, 4, 14, 1, 2, 3, 4, 5, 1], depth=3), window=Window(40, 6)))
    chain, *others = (await draft(family)).proposals
    assert chain.token_ids == [2, 3, 4, 5]
    assert {(p.parent_node, p.token_ids[0]) for p in others if p.parent_node < 4} == {(0, 11), (1, 12), (2, 13), (3, 14)}


async def test_a_drafter_that_is_not_to_run_ahead_prepares_for_nothing() -> None:
    family = NgramFamily(NgramOptions(max_draft_len=4), 1000)
    family.open(opened(1, [1, 2, 8, 9, 7, 5, 1, 2, 3, 4, 6, 1, 2], depth=4))
    assert len((await draft(family)).proposals) == 1


async def test_private_pools_do_not_leak_between_requests_and_a_public_one_is_shared() -> None:
    for shared, expected in ((None, []), (MemoryPool(NgramOptions(), 1000), [[3, 4, 5]])):
        family = NgramFamily(NgramOptions(), 1000, shared)
        family.open(opened(1, [1, 2, 3, 4, 5]))
        await draft(family)
        family.close(1)
        family.open(opened(2, [9, 1, 2]))
        assert [proposal.token_ids for proposal in (await draft(family)).proposals] == expected


async def learn(family: NgramFamily, made: RedisPool, tokens: list[int], tenant: str = "") -> None:
    """Have the family see a text to its end, and wait until Redis has it."""
    before = made.counters.written
    family.open(replace(opened(1, tokens), tenant=tenant))
    family.close(1)
    n = len(tokens) - 1
    await until(lambda: made.counters.written == before + 3 * n - 3)


async def test_replicas_share_through_redis_and_go_on_without_it(redis_server: Standalone) -> None:
    async with pool(redis_server.server) as first, pool(redis_server.server) as second:
        one, other = (NgramFamily(NgramOptions(), 1000, None, each) for each in (first, second))
        await learn(one, first, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
        other.open(opened(2, [20, 1, 2]))
        assert (await draft(other)).proposals[0].token_ids == [3, 4, 5, 6, 7, 8]
        redis_server.kill()
        other.open(opened(3, [30, 31, 30]))
        assert (await draft(other)).proposals[0].token_ids == [31, 30]


async def test_in_redis_tenants_learn_from_themselves_alone_unless_the_pool_is_public(redis_server: Standalone) -> None:
    for public in (False, True):
        async with pool(redis_server.server, public=public) as made:
            family = NgramFamily(NgramOptions(), 1000, None, made)
            await learn(family, made, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], "a")
            family.open(replace(opened(2, [20, 1, 2]), tenant="b"))
            family.open(replace(opened(3, [20, 1, 2]), tenant="a"))
            said = await draft(family)
            assert {proposal.sequence_id for proposal in said.proposals} == ({2, 3} if public else {3})
            assert {skip.sequence_id for skip in said.skips} >= (set() if public else {2})


async def test_unknown_sequences_are_ignored() -> None:
    family = NgramFamily(NgramOptions(), 1000)
    family.verdict(Verdict(7, 0, 0, 1, 0, [1]))
    family.close(7)
    assert not (await draft(family)).proposals
