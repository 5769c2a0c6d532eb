"""Tenants come in turn to the work on requests that came in over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http.entrance import Turns

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def in_turn(turns: Turns, tenant: str, order: list[str]) -> None:
    await turns.enter(tenant)
    order.append(tenant)
    await asyncio.sleep(0)
    turns.leave()


async def test_tenants_come_in_turn() -> None:
    turns = Turns(1)
    order: list[str] = []
    await asyncio.gather(*(in_turn(turns, tenant, order) for tenant in "aaaabcb"))
    assert "".join(order) == "aabcaba"


async def test_a_request_that_leaves_while_it_waits_costs_no_turn() -> None:
    turns = Turns(1)
    order: list[str] = []
    await turns.enter("first")
    waiting = [asyncio.create_task(in_turn(turns, name, order)) for name in "abc"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    turns.leave()
    waiting[1].cancel()  # in the moment in which it gets its turn
    await asyncio.wait(waiting)
    assert order == ["c"]
    await asyncio.wait_for(turns.enter("next"), 1.0)
