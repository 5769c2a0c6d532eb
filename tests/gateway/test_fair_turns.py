"""Tenants come in turn to the work on requests for text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.generation import turns as turns_module
from gateway.generation.turns import AT_ONCE, OF_A_TENANT, Turns
from gateway.http.ingress import entrance
from outrider.protocol.messages import FinishReason
from outrider.v1.generation_pb2 import GenerateTextRequest
from tests.gateway.gateway_rig import Rig
from tests.gateway.scripted_verifier import last
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def in_turn(turns: Turns, tenant: str, order: list[str]) -> None:
    await turns.enter(tenant)
    order.append(tenant)
    await asyncio.sleep(0)
    turns.leave(tenant)


async def test_tenants_come_in_turn() -> None:
    turns = Turns(1, 1)
    order: list[str] = []
    await asyncio.gather(*(in_turn(turns, tenant, order) for tenant in "aaaabcb"))
    assert "".join(order) == "abcabaa"


async def test_a_burst_of_one_tenant_leaves_turns_to_the_rest() -> None:
    turns = Turns(8, 2)
    order: list[str] = []
    burst = [asyncio.create_task(in_turn(turns, "burst", order)) for _ in range(9)]
    while not order:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert order == ["burst", "burst"]
    await in_turn(turns, "small", order)
    assert order.index("small") <= 4
    await asyncio.wait(burst)
    assert order.count("burst") == 9


async def coming_in(
    turns: Turns, order: list[str], enough: Callable[[int], bool]
) -> list[asyncio.Task[None]]:
    """Requests of a burst, one in each round of the event loop, as uvloop accepts connections."""
    burst: list[asyncio.Task[None]] = []
    while not enough(len(burst)):
        burst.append(asyncio.create_task(in_turn(turns, "burst", order)))
        await asyncio.sleep(0)
    return burst


async def test_a_request_behind_a_burst_of_connections_waits_for_none_of_its_work() -> None:
    turns = Turns(8, 2)
    order: list[str] = []
    burst = await coming_in(turns, order, lambda count: count == 50)
    assert not order
    await in_turn(turns, "small", order)
    assert order.index("small") <= 2
    await asyncio.wait(burst)
    assert order.count("burst") == 50


async def test_requests_that_never_stop_coming_in_get_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns_module, "_HOLD_S", 0.02)
    turns = Turns(8, 2)
    order: list[str] = []
    async with asyncio.timeout(30.0):
        burst = await coming_in(turns, order, lambda _: len(order) > 10)
        await asyncio.wait(burst)


async def test_a_request_that_leaves_while_it_waits_costs_no_turn() -> None:
    turns = Turns(1, 1)
    order: list[str] = []
    await turns.enter("first")
    waiting = [asyncio.create_task(in_turn(turns, name, order)) for name in "abc"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    turns.leave("first")
    waiting[1].cancel()  # in the moment in which it gets its turn
    await asyncio.wait(waiting)
    assert order == ["c"]
    await asyncio.wait_for(turns.enter("next"), 1.0)


async def test_a_call_over_grpc_waits_for_its_turn_and_a_refusal_does_not(rig: Rig) -> None:
    rig.says("yes")
    turns = rig.gateway.generation.turns
    busy = [f"busy {i // OF_A_TENANT}" for i in range(AT_ONCE)]
    for tenant in busy:
        await turns.enter(tenant)
    before = len(rig.script.requests)
    waiting = asyncio.create_task(text_of(rig, GenerateTextRequest(prompt="x")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await text_of(rig, GenerateTextRequest(prompt="x", model="unknown"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert len(rig.script.requests) == before
    for tenant in busy:
        turns.leave(tenant)
    assert await waiting == "yes"


async def text_of(rig: Rig, request: GenerateTextRequest) -> str:
    return "".join([response.text async for response in rig.generation.GenerateText(request)])


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/messages/count_tokens"])
async def test_a_burst_of_long_texts_does_not_hold_up_another_tenant(rig: Rig, path: str) -> None:
    text = "a " * 30_000
    rig.script.info = replace(rig.script.info, context_length=131_072)
    rig.script.play(last([5], FinishReason.LENGTH))
    await until(lambda: rig.gateway.router.replicas[0].info == rig.script.info)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/tokenize": {"prompt": text},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": text}]},
    }
    done: list[str] = []

    async def ask(path: str, tenant: str) -> None:
        headers = {"authorization": f"Bearer {tenant}"}
        answer = await rig.http.post(path, json=bodies[path], headers=headers, timeout=60)
        assert answer.status_code == 200
        done.append(tenant)

    burst = [asyncio.create_task(ask(path, "a")) for _ in range(24)]
    await until(lambda: done)
    begun = len(done)
    await ask("/v1/completions", "b")
    assert done.index("b") - begun <= 8
    await asyncio.gather(*burst)


async def test_an_answer_that_its_client_does_not_read_holds_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        arrival = entrance.arrival_in(scope)
        assert arrival is not None
        await arrival.turn()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def unread(message: Message) -> None:
        await asyncio.Event().wait()

    async def read(message: Message) -> None:
        answered.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    answered: list[Message] = []
    monkeypatch.setattr(entrance, "identity_in", lambda _: SimpleNamespace(tenant="a"))
    nobody: Any = SimpleNamespace(only_model=lambda: None)
    entered = entrance.Entrance(app, nobody, Turns(AT_ONCE, OF_A_TENANT))
    scope = {"type": "http", "path": "/tokenize", "method": "POST"}
    stuck = [asyncio.create_task(entered(dict(scope), receive, unread)) for _ in range(OF_A_TENANT)]
    async with asyncio.timeout(20):
        await entered(dict(scope), receive, read)
    assert answered
    for task in stuck:
        task.cancel()
    await asyncio.wait(stuck)
