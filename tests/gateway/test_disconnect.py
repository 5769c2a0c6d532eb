"""A client that hangs up frees its sequences at the verifier within a second."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest

from gateway.generation import generate
from gateway.http.ingress.connections import BoundedProtocol
from outrider.errors import Reason
from outrider.process.network import rpc_errors
from outrider.process.network.read_ahead import MOST_UNREAD
from outrider.protocol.messages import FinishReason
from outrider.protocol.model_info import Load
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.gateway.gateway_rig import Rig
from tests.gateway.scripted_verifier import last, plain
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


def endless(rig: Rig, first: list[Any]) -> None:
    """Let the verifier send some chunks and then nothing for a minute."""
    rig.script.answer = lambda _: [*first, 60.0]


async def freed(rig: Rig, count: int) -> None:
    await until(lambda: rig.script.running == 0)
    assert rig.script.cancelled == count


def unread_and_placed(rig: Rig) -> tuple[float, int]:
    """Return how many unread answers the metric shows, and how many sequences admission counts."""
    labels = {"model_name": "models/target"}
    unread = rig.gateway.metrics.registry.get_sample_value("outrider:num_requests_unread", labels)
    counts = rig.gateway.generation.admission.counts["models/target"]
    assert rig.gateway.router.replicas[0].own_count == counts.total()
    return unread or 0.0, counts.total()


_ENDLESS = 2**22


async def long_answers_in_one_place(rig: Rig) -> None:
    """Let the verifier have a very long context, and room for one sequence at once."""
    load = Load(0, 0, max_running=1, max_waiting=0)
    rig.script.info = replace(rig.script.info, context_length=2 * _ENDLESS, load=load)
    await until(lambda: rig.gateway.router.replicas[0].info == rig.script.info)


async def asks_and_reads_nothing(rig: Rig) -> socket.socket:
    """Ask for a very long answer; return the connection, from which nothing has been read."""
    await long_answers_in_one_place(rig)
    where = urlsplit(rig.gateway.http_url)
    connection = socket.create_connection((where.hostname, where.port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = b'{"prompt": "x", "stream": true, "max_tokens": %d}' % _ENDLESS
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("chunks", [[], [plain([5])]], ids=["before the first token", "after it"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_frees_its_sequences(
    rig: Rig, chunks: list[Any], stream: bool
) -> None:
    n = 3
    endless(rig, chunks)
    request = asyncio.create_task(
        rig.client.completions.create(model="models/target", prompt="x", n=n, stream=stream)
    )
    await until(lambda: rig.script.running == n)
    if stream and chunks:
        await (await request).close()
    else:
        request.cancel()
    await freed(rig, n)


async def test_a_client_that_never_reads_and_hangs_up_frees_its_sequence(rig: Rig) -> None:
    """The gateway is then waiting in a write to a full socket."""
    rig.script.answer = lambda _: [
        step for _ in range(20_000) for step in (plain([5] * 200), 0.001)
    ]
    connection = await asks_and_reads_nothing(rig)
    await until(lambda: rig.script.running == 1)
    await asyncio.sleep(0.5)
    assert rig.script.running == 1
    connection.close()
    await freed(rig, 1)


async def test_an_unread_answer_stops_at_the_verifier_alone_and_goes_on_when_it_is_read(
    rig: Rig,
) -> None:
    """While the answer is paused, another request gets the verifier's only place."""
    sent = 0

    def answer(_: object) -> Iterator[Any]:
        nonlocal sent
        for sent in range(4_000):  # noqa: B007
            yield plain([5] * 50)
            yield 0.0
        yield last([], FinishReason.LENGTH)

    rig.script.answer = answer
    connection = await asks_and_reads_nothing(rig)
    await until(lambda: rig.script.running == 1)
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.3)
    assert sent < 2_000, "buffers in the gateway are small"
    assert unread_and_placed(rig) == (1, 0)
    rig.says("It goes on.")
    other = await rig.client.completions.create(model="models/target", prompt="x")
    assert other.choices[0].text == "It goes on."
    assert rig.script.running == 1
    # With the small buffer, reading the rest of the answer would take half a minute.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    with connection, connection.makefile("rb") as lines:
        reading = asyncio.ensure_future(
            asyncio.to_thread(lambda: [line for line in lines if b"data: {" in line])
        )
        await until(lambda: unread_and_placed(rig) == (0, 1))
        events = await reading
    assert sent == 3_999
    assert len(events) == 4_001
    await until(lambda: unread_and_placed(rig) == (0, 0))


async def test_an_answer_that_is_never_read_ends_with_an_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "_UNREAD_S", 0.5)
    rig.script.answer = lambda _: [each for _ in range(20_000) for each in (plain([5] * 50), 0.0)]
    connection = await asks_and_reads_nothing(rig)
    await until(lambda: rig.script.running == 1)
    await until(lambda: rig.script.running == 0)
    assert rig.script.cancelled == 1
    with connection, connection.makefile("rb") as lines:
        events = await asyncio.to_thread(
            lambda: [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        )
    *chunks, last_event = events
    assert len(chunks) >= MOST_UNREAD
    assert all(chunk["choices"][0]["text"] for chunk in chunks)
    assert last_event["error"]["code"] == "slow_reader"
    assert "0.5 s" in last_event["error"]["message"]


async def test_a_call_over_grpc_that_is_never_read_keeps_no_place(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has no deadline.

    Another request gets the only place after the time-out, while the call is still unread.
    """
    monkeypatch.setattr(generate, "_UNREAD_S", 0.5)
    await long_answers_in_one_place(rig)
    rig.script.answer = lambda _: [each for _ in range(20_000) for each in (plain([5] * 50), 0.0)]
    # Without this option, gRPC would widen its window to megabytes.
    narrow = [("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(rig.gateway.grpc_address, options=narrow) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateTextRequest(prompt="x", max_tokens=_ENDLESS)
        call = stub.GenerateText(request)
        await until(lambda: rig.script.running == 1)
        await until(lambda: rig.script.running == 0)
        assert rig.script.cancelled == 1
        assert unread_and_placed(rig) == (1, 0)
        rig.says("It goes on.")
        other = await rig.client.completions.create(model="models/target", prompt="x")
        assert other.choices[0].text == "It goes on."
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [_ async for _ in call]
    assert rpc_errors.error_of(caught.value).reason is Reason.SLOW_READER
    await until(lambda: unread_and_placed(rig) == (0, 0))


async def test_a_connection_that_is_never_read_ends(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "unread_seconds", 0.5)
    # The verifier has finished before the answer would be paused.
    rig.script.answer = lambda _: [plain([5] * 200)] * 250 + [last([], FinishReason.LENGTH)]
    with await asks_and_reads_nothing(rig):
        [replica] = rig.gateway.router.replicas
        await until(lambda: len(replica.sequences) == 1)
        await until(lambda: unread_and_placed(rig) == (1, 0))
        await until(lambda: not replica.sequences)
    assert unread_and_placed(rig) == (0, 0)


async def test_many_clients_that_hang_up_at_any_time_leave_nothing_behind(rig: Rig) -> None:
    rig.script.answer = lambda _: (
        [step for _ in range(20) for step in (plain([5]), 0.005)] + [last([], FinishReason.LENGTH)]
    )

    async def client(number: int) -> None:
        body = {"prompt": "x", "n": 1 + number % 3, "max_tokens": 64, "stream": number % 2 == 0}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.004 * number):
                await rig.http.post("/v1/completions", json=body)

    await asyncio.gather(*(client(number) for number in range(48)))
    [replica] = rig.gateway.router.replicas
    await until(lambda: rig.script.running == 0 and not replica.sequences)
    assert (
        'outrider:num_requests_running{model_name="models/target"} 0.0'
        in (await rig.http.get("/metrics")).text
    )


@pytest.mark.parametrize("chunks", [[], [plain([5])]], ids=["before the first token", "after it"])
async def test_a_cancelled_grpc_call_frees_its_sequence(rig: Rig, chunks: list[Any]) -> None:
    endless(rig, chunks)
    call = rig.generation.GenerateText(generation_pb2.GenerateTextRequest(prompt="x"))
    await until(lambda: rig.script.running == 1)
    if chunks:
        await anext(aiter(call))
    call.cancel()
    await freed(rig, 1)
