"""Tenants take turns at the work on requests for text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.generation import tenant_semaphore
from gateway.generation.tenant_semaphore import AT_ONCE, OF_A_TENANT, TenantSemaphore
from gateway.http.ingress import admission
from outrider.protocol.messages import FinishReason
from outrider.v1.generation_pb2 import GenerateTextRequest
from tests.gateway.gateway_rig import Rig
from tests.gateway.scripted_verifier import last
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def in_turn(slots: TenantSemaphore, tenant: str, order: list[str]) -> None:
    await slots.acquire(tenant)
    order.append(tenant)
    await asyncio.sleep(0)
    slots.release(tenant)


async def test_tenants_come_in_turn() -> None:
    slots = TenantSemaphore(1, 1)
    order: list[str] = []
    await asyncio.gather(*(in_turn(slots, tenant, order) for tenant in "aaaabcb"))
    assert "".join(order) == "abcabaa"


async def test_a_burst_of_one_tenant_leaves_slots_to_the_rest() -> None:
    slots = TenantSemaphore(8, 2)
    order: list[str] = []
    burst = [asyncio.create_task(in_turn(slots, "burst", order)) for _ in range(9)]
    while not order:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert order == ["burst", "burst"]
    await in_turn(slots, "small", order)
    assert order.index("small") <= 4
    await asyncio.wait(burst)
    assert order.count("burst") == 9


async def coming_in(
    slots: TenantSemaphore, order: list[str], enough: Callable[[int], bool]
) -> list[asyncio.Task[None]]:
    """Make a burst: one request in each round of the event loop, as uvloop accepts connections."""
    burst: list[asyncio.Task[None]] = []
    while not enough(len(burst)):
        burst.append(asyncio.create_task(in_turn(slots, "burst", order)))
        await asyncio.sleep(0)
    return burst


async def test_a_request_behind_a_burst_of_connections_waits_for_none_of_its_work() -> None:
    slots = TenantSemaphore(8, 2)
    order: list[str] = []
    burst = await coming_in(slots, order, lambda count: count == 50)
    assert not order
    await in_turn(slots, "small", order)
    assert order.index("small") <= 2
    await asyncio.wait(burst)
    assert order.count("burst") == 50


async def test_requests_that_never_stop_coming_in_get_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenant_semaphore, "_HOLD_S", 0.02)
    slots = TenantSemaphore(8, 2)
    order: list[str] = []
    async with asyncio.timeout(30.0):
        burst = await coming_in(slots, order, lambda _: len(order) > 10)
        await asyncio.wait(burst)


async def test_a_request_that_leaves_while_it_waits_costs_no_slot() -> None:
    slots = TenantSemaphore(1, 1)
    order: list[str] = []
    await slots.acquire("first")
    waiting = [asyncio.create_task(in_turn(slots, name, order)) for name in "abc"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    slots.release("first")
    waiting[1].cancel()  # at the moment when it gets its slot
    await asyncio.wait(waiting)
    assert order == ["c"]
    await asyncio.wait_for(slots.acquire("next"), 1.0)


async def test_a_call_over_grpc_waits_for_its_turn_and_a_refusal_does_not(rig: Rig) -> None:
    rig.says("yes")
    slots = rig.gateway.generation.preparing
    busy = [f"busy {i // OF_A_TENANT}" for i in range(AT_ONCE)]
    for tenant in busy:
        await slots.acquire(tenant)
    before = len(rig.script.requests)
    waiting = asyncio.create_task(text_of(rig, GenerateTextRequest(prompt="x")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await text_of(rig, GenerateTextRequest(prompt="x", model="unknown"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert len(rig.script.requests) == before
    for tenant in busy:
        slots.release(tenant)
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


async def test_an_answer_that_its_client_does_not_read_holds_no_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = admission.admitted_request_in(scope)
        assert request is not None
        await request.acquire()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def unread(message: Message) -> None:
        await asyncio.Event().wait()

    async def read(message: Message) -> None:
        answered.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    answered: list[Message] = []
    monkeypatch.setattr(admission, "identity_in", lambda _: SimpleNamespace(tenant="a"))
    nobody: Any = SimpleNamespace(only_model=lambda: None)
    entered = admission.AdmissionMiddleware(app, nobody, TenantSemaphore(AT_ONCE, OF_A_TENANT))
    scope = {"type": "http", "path": "/tokenize", "method": "POST"}
    stuck = [asyncio.create_task(entered(dict(scope), receive, unread)) for _ in range(OF_A_TENANT)]
    async with asyncio.timeout(20):
        await entered(dict(scope), receive, read)
    assert answered
    for task in stuck:
        task.cancel()
    await asyncio.wait(stuck)
