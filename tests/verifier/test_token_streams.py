"""Many sequences on one stream: they do not disturb each other, and share messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2
from outrider.internal.v1.token_streams_pb2_grpc import (
    TokenStreamServiceServicer,
    TokenStreamServiceStub,
    add_TokenStreamServiceServicer_to_server,
)
from outrider.process.network import rpc, rpc_errors
from outrider.protocol.link_versions import SPOKEN, Versions
from outrider.v1 import common_pb2, verifier_pb2
from tests.waiting import until
from verifier_svc.streams import gateway_streams
from verifier_svc.streams.gateway_streams import GatewayStream

Request = token_streams_pb2.StreamTokensRequest
Sequence = token_streams_pb2.SequenceRequest
Tokens = verifier_pb2.GenerateTokensResponse
FOREVER = 60.0


class Verifier(TokenStreamServiceServicer):
    """Answers each request with the steps for its first prompt token.

    A step is a list of token ids to send, an event or a time in seconds to wait for, an error to
    raise, or a function to call.
    """

    def __init__(self, steps: Callable[[int], list[Any]]) -> None:
        self.steps = steps
        self.running = 0
        self.traceparents: list[str] = []
        self.stream: GatewayStream | None = None
        self.versions = SPOKEN

    async def AgreeVersion(
        self, request: token_streams_pb2.AgreeVersionRequest, context: Any
    ) -> token_streams_pb2.AgreeVersionResponse:
        return token_streams_pb2.AgreeVersionResponse(version=1)

    # grpc's type stubs do not know that a handler may write its responses through `context`.
    async def StreamTokens(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Request], context: Any
    ) -> None:
        self.stream = GatewayStream(self.generate, aiter(request_iterator), context, self.versions)
        await self.stream.run()

    async def generate(
        self, request: verifier_pb2.GenerateTokensRequest, traceparent: str
    ) -> AsyncGenerator[Tokens, None]:
        self.traceparents.append(traceparent)
        self.running += 1
        try:
            steps = self.steps(request.prompt_token_ids[0])
            for i, step in enumerate(steps, 1):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                elif callable(step):
                    step()
                else:
                    reason = common_pb2.FINISH_REASON_LENGTH if i == len(steps) else None
                    yield Tokens(token_ids=step, finish_reason=reason)
        finally:
            self.running -= 1


@asynccontextmanager
async def calling(verifier: Verifier) -> AsyncIterator[Any]:
    """Yield a call of StreamTokens over real gRPC."""
    server = rpc.Server()
    add_TokenStreamServiceServicer_to_server(verifier, server.grpc)
    [port] = await server.start("127.0.0.1:0")
    try:
        async with asyncio.timeout(60.0), rpc.dial(f"127.0.0.1:{port}") as channel:
            yield TokenStreamServiceStub(channel).StreamTokens(None)
    finally:
        await server.stop(0.0)


def said(**request: Any) -> Request:
    """Return a message with one request."""
    return Request(requests=[Sequence(**request)])


def begin(number: int, prompt: int, traceparent: str = "") -> Request:
    """Return a message that begins call `number`, with a prompt of one token."""
    generate = verifier_pb2.GenerateTokensRequest(prompt_token_ids=[prompt])
    return said(call_id=number, generate=generate, traceparent=traceparent)


@pytest.mark.parametrize(("version", "is_served"), [(0, False), (1, False), (2, True), (4, False)])
async def test_a_stream_of_a_version_that_is_not_spoken_ends_with_the_reason(
    version: int, is_served: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway that names no version speaks version 1."""
    verifier = Verifier(lambda prompt: [[prompt]])
    verifier.versions = Versions(2, 3)
    async with calling(verifier) as call:
        message = begin(1, 7)
        message.version = version
        await call.write(message)
        if is_served:
            assert (await call.read()).parts[0].tokens.token_ids == [7]
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    error = rpc_errors.error_of(caught.value)
    assert error.reason is Reason.NOT_READY
    assert error.message == (
        f"the gateway speaks version {version or 1} of outrider.internal.v1, and the verifier"
        " versions 2 to 3; update the older of the two"
    )
    assert error.message in caplog.text


async def test_all_parts_that_were_queued_come_before_the_caller_hears_of_draining() -> None:
    """A caller that hears of draining may cancel its calls, and so lose parts that come later."""

    def say_draining() -> None:
        assert verifier.stream is not None
        verifier.stream.say_draining()

    # The loop runs nothing else between these steps. Their tokens fill three messages.
    tokens = [1_000_007] * 150_000
    verifier = Verifier(lambda _: [*[tokens] * 5, say_draining, tokens])
    async with calling(verifier) as call:
        await call.write(begin(1, 7))
        counts, draining = [], False
        while not draining:
            message = await call.read()
            counts.append(len(message.parts))
            draining = message.draining
    assert sum(counts) == 6
    assert len(counts) > 1


def cancel(number: int) -> Request:
    """Return a message that cancels call `number`."""
    return said(call_id=number, cancel=token_streams_pb2.CancelTokens())


def reading(number: int, reads: bool) -> Request:
    """Return a message that pauses call `number`, or lets it go on."""
    if reads:
        return said(call_id=number, resume=token_streams_pb2.ResumeTokens())
    return said(call_id=number, pause=token_streams_pb2.PauseTokens())


async def messages(call: Any) -> list[list[tuple[int, list[int]]]]:
    """Return all messages to the end of the stream, each as the numbers and tokens of its parts."""
    return [
        [(part.call_id, list(part.tokens.token_ids)) for part in message.parts]
        async for message in call
    ]


async def test_tokens_of_one_turn_of_the_loop_share_a_message() -> None:
    gates = asyncio.Event(), asyncio.Event()
    verifier = Verifier(lambda prompt: [gates[0], [prompt], gates[1], [prompt, prompt]])
    async with calling(verifier) as call:
        for number in (1, 2, 3):
            await call.write(begin(number, 10 * number))
        await call.done_writing()
        await until(lambda: verifier.running == 3)
        gates[0].set()
        first = await call.read()
        gates[1].set()
        second = await call.read()
    for message, count in ((first, 1), (second, 2)):
        assert [(part.call_id, list(part.tokens.token_ids)) for part in message.parts] == [
            (number, [10 * number] * count) for number in (1, 2, 3)
        ]


async def test_a_failed_sequence_gets_its_error_and_the_others_go_on() -> None:
    refused = OutriderError(Reason.OVERLOADED, "too many wait", "max_tokens", retry_after_s=2.0)
    steps: list[list[Any]] = [
        [[1], refused],
        [RuntimeError("a user's secret")],
        [0.2, [3], 0.2, [4]],
    ]
    verifier = Verifier(steps.__getitem__)
    async with calling(verifier) as call:
        for number in (0, 1, 2):
            await call.write(begin(number, number))
        await call.done_writing()
        parts = [part async for message in call for part in message.parts]
    ends = {
        part.call_id: rpc_errors.error_in(part.status) for part in parts if part.HasField("status")
    }
    assert ends[0] == refused
    assert ends[1].reason is Reason.INTERNAL
    assert "secret" not in ends[1].message
    assert [list(part.tokens.token_ids) for part in parts if part.call_id == 2] == [[3], [4]]


async def test_a_cancelled_sequence_is_freed_and_no_other() -> None:
    verifier = Verifier(lambda prompt: [[prompt], FOREVER])
    async with calling(verifier) as call:
        for number in (1, 2):
            await call.write(begin(number, number))
        await until(lambda: verifier.running == 2)
        await call.write(cancel(1))
        await until(lambda: verifier.running == 1)
        await call.write(cancel(2))
        await until(lambda: verifier.running == 0)
        # Cancelling a call that has ended, or never started, is no error: the caller cannot know.
        for number in (2, 77):
            await call.write(cancel(number))
        await call.write(begin(3, 9))
        await until(lambda: verifier.running == 1)


async def test_a_paused_sequence_stops_alone_and_loses_nothing() -> None:
    verifier = Verifier(lambda _: [*[each for i in range(20) for each in ([i], 0.01)], [99]])
    async with calling(verifier) as call:
        for number in (1, 2):
            await call.write(begin(number, number))
        # Pausing a sequence twice, or pausing one that has ended or never started, does nothing.
        for number in (1, 1, 77):
            await call.write(reading(number, False))
        found: dict[int, list[int]] = {1: [], 2: []}
        while 99 not in found[2]:
            for part in (await call.read()).parts:
                found[part.call_id] += part.tokens.token_ids
        assert found[2] == [*range(20), 99]
        assert len(found[1]) < 20, "the pause came during the first steps"
        await asyncio.sleep(0.1)
        assert verifier.running == 1
        for number in (1, 1, 2, 77):
            await call.write(reading(number, True))
        while 99 not in found[1]:
            for part in (await call.read()).parts:
                found[part.call_id] += part.tokens.token_ids
        assert found[1] == [*range(20), 99]


async def test_a_paused_sequence_is_freed_when_it_is_cancelled_or_the_caller_hangs_up() -> None:
    verifier = Verifier(lambda prompt: [[prompt], 0.1, [prompt], FOREVER])
    async with calling(verifier) as call:
        for number in (1, 2):
            await call.write(begin(number, number))
            await call.write(reading(number, False))
        await until(lambda: verifier.running == 2)
        await asyncio.sleep(0.2)
        await call.write(cancel(1))
        await until(lambda: verifier.running == 1)
        call.cancel()
        await until(lambda: verifier.running == 0)


@pytest.mark.parametrize(
    ("messages_sent", "complaint"),
    [
        ([begin(1, 1), begin(1, 2)], "call_id 1 is that of a sequence that goes on"),
        ([said(call_id=1)], "a message must be generate, cancel, pause or resume"),
    ],
    ids=["a number twice", "no message"],
)
async def test_a_message_without_meaning_ends_the_stream_with_the_reason(
    messages_sent: list[Request], complaint: str
) -> None:
    verifier = Verifier(lambda prompt: [[prompt], FOREVER])
    async with calling(verifier) as call:
        for message in messages_sent:
            await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await messages(call)
        error = rpc_errors.error_of(caught.value)
        assert (error.reason, error.message) == (Reason.PROTOCOL_VIOLATION, complaint)
        await until(lambda: verifier.running == 0)


async def test_a_verifier_that_ends_the_stream_sends_all_earlier_tokens() -> None:
    verifier = Verifier(lambda prompt: [[prompt], FOREVER])
    async with calling(verifier) as call:
        await call.write(begin(1, 1))
        await until(lambda: verifier.running == 1)
        await asyncio.sleep(0.05)
        assert verifier.stream is not None
        verifier.stream._send(token_streams_pb2.TokensPart(call_id=1, tokens=Tokens(token_ids=[8])))
        verifier.stream.end()
        verifier.stream.end()
        parts = [part async for message in call for part in message.parts]
        assert [list(part.tokens.token_ids) for part in parts[:-1]] == [[1], [8]]
        assert rpc_errors.error_in(parts[-1].status).reason is Reason.DRAINING
        await until(lambda: verifier.running == 0)


async def test_large_parts_are_divided_among_messages() -> None:
    """The prompt log probabilities of many sequences can exceed gRPC's limit for a message."""
    long = list(range(1_000_000, 1_000_000 + 200_000))
    verifier = Verifier(lambda prompt: [0.2, long])
    async with calling(verifier) as call:
        for number in range(30):
            await call.write(begin(number, 1))
        await call.done_writing()
        sizes = [(message.ByteSize(), len(message.parts)) async for message in call]
    assert sum(count for _, count in sizes) == 30
    assert max(size for size, _ in sizes) < 3 * 2**20


async def test_a_caller_that_does_not_read_is_cut_off_before_memory_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_streams, "MOST_UNSENT_BYTES", 2**20)
    part = list(range(1_000_000, 1_010_000))
    verifier = Verifier(lambda prompt: [each for _ in range(1000) for each in (part, 0.0)])
    async with calling(verifier) as call:
        for number in (1, 2):
            await call.write(begin(number, 1))
        await until(lambda: verifier.running == 2)
        await until(lambda: verifier.running == 0)
        assert verifier.stream is not None
        assert verifier.stream._unsent == []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await messages(call)
    assert rpc_errors.error_of(caught.value).reason is Reason.SLOW_READER
