"""A refusal reaches every kind of client of a stream, even a client that is writing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import repeat
from typing import Any

import grpc
import pytest

from gateway.upstream.verifier_stream import VerifierStream
from outrider.errors import OutriderError, Reason
from outrider.internal.v1.token_streams_pb2 import (
    AgreeVersionRequest,
    AgreeVersionResponse,
    StreamTokensRequest,
    StreamTokensResponse,
)
from outrider.internal.v1.token_streams_pb2_grpc import (
    TokenStreamServiceServicer,
    TokenStreamServiceStub,
    add_TokenStreamServiceServicer_to_server,
)
from outrider.process.network import rpc, rpc_errors, stream_status
from outrider.protocol.draft_messages import StepBatch, Window
from outrider.protocol.messages import SamplingParams, TokenRequest
from outrider.v1 import drafts_pb2, verifier_pb2, verifier_pb2_grpc
from tests.drafter.counting_drafter import Drafter
from tests.drafter.scripted_drafts import ScriptedVerifier, serving
from tests.family_rig import opened_sequence

REFUSAL = OutriderError(Reason.CERTIFICATE_NOT_ALLOWED, "this certificate may not do that")
MOST_S = 20.0


class Refusing(TokenStreamServiceServicer):
    """Reads a message of each gateway's stream, sends some messages, and refuses the stream."""

    def __init__(self, own_messages: int = 0) -> None:
        self.own_messages = own_messages
        self.has_refused = asyncio.Event()

    async def AgreeVersion(
        self, request: AgreeVersionRequest, context: Any
    ) -> AgreeVersionResponse:
        return AgreeVersionResponse(version=1)

    # The stubs do not know that a handler may write through its context.
    async def StreamTokens(  # type: ignore[override]
        self, request_iterator: AsyncIterator[StreamTokensRequest], context: Any
    ) -> None:
        await anext(aiter(request_iterator))
        for _ in range(self.own_messages):
            await context.write(StreamTokensResponse())
        self.has_refused.set()
        await rpc_errors.abort(context, REFUSAL)


@asynccontextmanager
async def refusing(servicer: Refusing) -> AsyncIterator[Any]:
    """Yield a stub of a verifier that refuses every gateway."""
    server = rpc.Server()
    add_TokenStreamServiceServicer_to_server(servicer, server.grpc)
    [port] = await server.start("127.0.0.1:0")
    async with asyncio.timeout(MOST_S), rpc.dial(f"127.0.0.1:{port}") as channel:
        yield TokenStreamServiceStub(channel)
    await server.stop(0)


async def drafter() -> OutriderError:
    """Run a drafter that runs far ahead, refuse it for good, and return the error that it gets.

    After any other error the drafter would redial.
    """
    async with serving(ScriptedVerifier()) as verifier:
        made = Drafter(verifier.port)
        running = asyncio.create_task(made.stream.run())
        stream = await verifier.accepted()
        stream.send(StepBatch(opened=[opened_sequence(1, [10], Window(512, 64), 2)]))
        await stream.receive()
        stream.send(REFUSAL)
        done, _ = await asyncio.wait(
            {running, asyncio.ensure_future(verifier.accepted())},
            timeout=MOST_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        running.cancel()
        await asyncio.wait({running})
        return error_in(running) if running in done else OutriderError(Reason.INTERNAL, "redialled")


async def writer() -> OutriderError:
    """Make a bare call: write until a write fails, then read to the end and return the error."""
    async with serving(ScriptedVerifier()) as verifier, rpc.dial(verifier.address) as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        call = stub.StreamDrafts()
        hello = drafts_pb2.Hello(tokenizer_fingerprint="f" * 64)
        await call.write(verifier_pb2.StreamDraftsRequest(hello=hello))
        await call.read()
        (await verifier.accepted()).send(REFUSAL)
        with suppress(grpc.aio.AioRpcError):
            while not call.done():
                await call.write(verifier_pb2.StreamDraftsRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(call)
        return rpc_errors.error_of(caught.value)


async def read(call: Any) -> None:
    """Read messages from a call until a read fails."""
    while True:
        await call.read()


async def gateway() -> OutriderError:
    """Send a gateway's requests on one stream until the first request fails; return its error."""
    async with refusing(Refusing()) as stub:
        stream = VerifierStream(stub, lambda error: error, lambda: None, lambda: 1)

        async def ask() -> None:
            async for _ in stream.generate(TokenRequest([1], 8, SamplingParams())):
                pass

        asked = [asyncio.create_task(ask())]
        while not asked[0].done():
            await asyncio.sleep(0)
            asked.append(asyncio.create_task(ask()))
        await asyncio.wait(asked)
        await stream.close()
        return error_in(asked[0])


async def iterator() -> OutriderError:
    """Make a call that takes its messages from an iterator, which ends; return the call's error."""
    async with refusing(Refusing()) as stub:
        call = stub.StreamTokens(iter([StreamTokensRequest()]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        return rpc_errors.error_of(caught.value)


def error_in(task: asyncio.Task[None]) -> OutriderError:
    error = task.exception()
    assert isinstance(error, OutriderError)
    return error


CLIENTS: list[Callable[[], Awaitable[OutriderError]]] = [drafter, writer, gateway, iterator]


@pytest.mark.parametrize("client", CLIENTS)
async def test_no_client_loses_the_reason(client: Callable[[], Awaitable[OutriderError]]) -> None:
    assert {(await client()).reason for _ in range(20)} == {REFUSAL.reason}


async def write(call: Any) -> None:
    """Write messages to a call until a write fails."""
    while True:
        await call.write(StreamTokensRequest())


async def test_a_failed_write_waits_for_the_status_behind_unread_messages() -> None:
    servicer = Refusing(own_messages=2)
    async with refusing(servicer) as stub:
        call = stub.StreamTokens()
        writing = asyncio.create_task(write(call))
        await servicer.has_refused.wait()
        await asyncio.sleep(0.2)
        assert not writing.done()
        for _ in range(2):
            assert isinstance(await call.read(), StreamTokensResponse)
        for end in (call.read(), writing):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await end
            assert rpc_errors.error_of(caught.value).reason is REFUSAL.reason


async def test_an_iterator_that_goes_on_does_not_hide_the_status_behind_unread_messages() -> None:
    servicer = Refusing(own_messages=2)
    async with refusing(servicer) as stub:
        call = stub.StreamTokens(repeat(StreamTokensRequest()))
        await servicer.has_refused.wait()
        await asyncio.sleep(0.2)
        for _ in range(2):
            assert isinstance(await call.read(), StreamTokensResponse)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert rpc_errors.error_of(caught.value).reason is REFUSAL.reason


async def test_a_write_fails_in_time_while_nobody_reads_and_reading_gives_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_status, "STATUS_WAIT_S", 0.1)
    async with refusing(Refusing(own_messages=1)) as stub:
        call = stub.StreamTokens()
        with pytest.raises(grpc.aio.AioRpcError, match="messages that are not read yet"):
            await write(call)
        assert isinstance(await call.read(), StreamTokensResponse)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert rpc_errors.error_of(caught.value).reason is REFUSAL.reason
