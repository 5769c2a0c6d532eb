"""Chats find their earlier turns in the prefix cache, and no replica gets too many of them."""

from __future__ import annotations

from outrider_bench.simulator.chats import PLACES, simulate


async def test_affinity_doubles_the_hits_of_chats_and_keeps_the_load_even() -> None:
    least_busy = await simulate(8, 2000, affinity=False)
    followed = await simulate(8, 2000, affinity=True)
    assert followed.prompt_tokens > 1_000_000
    assert followed.hit_share >= 2 * least_busy.hit_share
    # Of 24 users of a replica about 5 wait for an answer at a time.
    assert followed.largest_excess <= PLACES / 16 + 1 + 0.25 * 24
