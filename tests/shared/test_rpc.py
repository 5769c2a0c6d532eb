"""gRPC on a real server: errors arrive whole, services tell their health, quiet streams live on."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_database import DescriptorDatabase
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2

from outrider.errors import OutriderError, Reason, Retry
from outrider.internal.v1 import token_streams_pb2, token_streams_pb2_grpc
from outrider.process.network import rpc, rpc_errors
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider_bench.experiment.links import ShapedLink
from outrider_bench.experiment.spec import Link
from tests.short_grpc_times import hastened
from tests.waiting import until

HOST = "127.0.0.1"
ERROR = OutriderError(
    Reason.OVERLOADED, "too many tokens", "speculation.draft_tokens", 2.5, {"limit": "4"}
)


class Failing(verifier_pb2_grpc.VerifierServiceServicer):
    """A handler that fails with this error."""

    def __init__(self, error: Exception = ERROR) -> None:
        self.error = error
        self.lost = asyncio.Event()

    async def GetModel(self, request: Any, context: Any) -> Any:
        raise self.error

    async def GenerateTokens(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield verifier_pb2.GenerateTokensResponse(token_ids=[1])
        await asyncio.sleep(request.max_tokens / 10)
        raise self.error

    async def StreamDrafts(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # writes through the context
        """Answer each message until the stream is lost."""
        try:
            async for _ in request_iterator:
                if self.error is not ERROR:
                    raise self.error
                await context.write(verifier_pb2.StreamDraftsResponse())
        finally:
            self.lost.set()


@asynccontextmanager
async def serving(
    servicer: Failing | None = None,
) -> AsyncIterator[tuple[rpc.Server, grpc.aio.Channel]]:
    server = rpc.Server("outrider.v1.VerifierService")
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer or Failing(), server.grpc)
    [port] = await server.start("127.0.0.1:0")
    async with rpc.dial(f"127.0.0.1:{port}") as channel:
        yield server, channel
    await server.stop(0)


async def test_a_client_connects_over_a_round_trip_of_400_ms() -> None:
    link = ShapedLink(Link(round_trip_ms=400))
    async with (
        serving() as (server, _),
        link.forward((HOST, 0), (HOST, server.ports[0])) as port,
        rpc.dial(f"{HOST}:{port}") as channel,
    ):
        await asyncio.wait_for(channel.channel_ready(), 10)


async def test_an_error_in_a_stream_follows_the_messages_sent_before() -> None:
    async with serving() as (_, channel):
        call: Any = verifier_pb2_grpc.VerifierServiceStub(channel).GenerateTokens(
            verifier_pb2.GenerateTokensRequest()
        )
        assert (await call.read()).token_ids == [1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert rpc_errors.error_of(caught.value) == ERROR


@pytest.mark.parametrize("method", ["GetModel", "GenerateTokens", "StreamDrafts"])
async def test_an_unexpected_exception_is_internal_and_hides_its_text(
    caplog: pytest.LogCaptureFixture, method: str
) -> None:
    async with serving(Failing(ZeroDivisionError("a user's secret"))) as (_, channel):
        answer: Any = channel.stream_stream(f"/outrider.v1.VerifierService/{method}", None, None)
        call = answer([b""])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    error = OutriderError(Reason.INTERNAL, f"{method} failed; the server's log has the reason")
    assert rpc_errors.error_of(caught.value) == error
    [line] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line.getMessage() == f"{method} failed"
    assert "secret" in caplog.text


METHODS = [
    ("unary_unary", "/outrider.v1.VerifierService/GetModel"),
    ("unary_stream", "/outrider.v1.VerifierService/GenerateTokens"),
    ("stream_stream", "/outrider.v1.VerifierService/StreamDrafts"),
    ("unary_unary", "/grpc.health.v1.Health/Check"),
    ("unary_stream", "/grpc.health.v1.Health/Watch"),
    ("stream_stream", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
]


def failure(status: bytes) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status))
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, "away", None
    )


@pytest.mark.parametrize(
    "status", [b"\xff" * 30, status_pb2.Status(code=3, message="other").SerializeToString()]
)
def test_unreadable_error_details_leave_the_status(status: bytes) -> None:
    assert rpc_errors.error_of(failure(status)) == OutriderError(
        Reason.VERIFIER_UNAVAILABLE, "away"
    )
    assert rpc_errors.error_in(b"\xff" * 30).reason is Reason.INTERNAL


def test_a_peers_error_is_cut_so_that_it_can_travel_on() -> None:
    """A call's metadata can have at most 8 KiB, and a Duration at most 10,000 years."""
    told = OutriderError(Reason.OVERLOADED, "\N{SNOWMAN}" * 9000, "f" * 9000, 60.0)
    status = rpc_errors.status_of(told)
    for detail in status.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            retry.retry_delay.seconds = 2**63 - 1
            detail.Pack(retry)
    error = rpc_errors.error_in(status.SerializeToString())
    assert told.message.startswith(error.message)
    assert error.field != "f" * 9000
    assert error.retry_after_s == 86_400
    assert rpc_errors.status_of(error).ByteSize() < 4096


async def test_a_quiet_stream_outlives_many_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our server allows far more frequent pings than a server of gRPC allows by default."""
    quick = [
        (key, 100 if key == "grpc.keepalive_time_ms" else value)
        for key, value in rpc.CHANNEL_OPTIONS
    ]
    lenient = [
        (key, 50 if "min_ping_interval" in key else value) for key, value in rpc.SERVER_OPTIONS
    ]
    monkeypatch.setattr(rpc, "CHANNEL_OPTIONS", quick)
    monkeypatch.setattr(rpc, "SERVER_OPTIONS", lenient)
    async with serving() as (_, channel):
        call: Any = verifier_pb2_grpc.VerifierServiceStub(channel).GenerateTokens(
            verifier_pb2.GenerateTokensRequest(max_tokens=20)
        )
        assert (await call.read()).token_ids == [1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert rpc_errors.error_of(caught.value) == ERROR


def test_both_ends_drop_a_silent_peer_within_15_s() -> None:
    for options in (dict(rpc.CHANNEL_OPTIONS), dict(rpc.SERVER_OPTIONS)):
        assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] <= 15_000
        # A ping that gRPC sends for other reasons replaces a keepalive ping.
        assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] <= 15_000


@pytest.mark.parametrize("busy", [False, True])
async def test_both_ends_notice_a_peer_that_vanishes(
    monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """All times are divided by ten. Without a timeout for every ping, noticing took a minute."""
    monkeypatch.setattr(rpc, "CHANNEL_OPTIONS", hastened(rpc.CHANNEL_OPTIONS))
    monkeypatch.setattr(rpc, "SERVER_OPTIONS", hastened(rpc.SERVER_OPTIONS))
    servicer = Failing()
    link = ShapedLink(Link())
    # The channel to the link closes first.
    async with (
        serving(servicer) as (server, _),
        link.forward((HOST, 0), (HOST, server.ports[0])) as port,
        rpc.dial(f"{HOST}:{port}") as channel,
    ):
        call: Any = verifier_pb2_grpc.VerifierServiceStub(channel).StreamDrafts(None)

        async def talk() -> None:
            while True:
                await call.write(verifier_pb2.StreamDraftsRequest())
                if await call.read() is grpc.aio.EOF:  # type: ignore[attr-defined]  # grpc-stubs lack it
                    return

        await call.write(verifier_pb2.StreamDraftsRequest())
        await call.read()
        waiting = asyncio.ensure_future(talk() if busy else call.read())
        link.vanish()
        async with asyncio.timeout(20):
            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                await waiting
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            await servicer.lost.wait()


async def test_the_error_names_the_flag_of_an_address_that_is_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = rpc.Server("x")
        said = f"--grpc-listen: another process listens on 127.0.0.1:{port}; give another port"
        with pytest.raises(OutriderError, match=said):
            await server.start(f"127.0.0.1:{port}", flag="grpc-listen")
        await server.stop(0)


async def test_the_error_names_an_address_that_cannot_be_bound() -> None:
    async with serving() as (_, _channel):
        server = rpc.Server("x")
        with pytest.raises(OutriderError, match="cannot listen on nowhere"):
            await server.start("nowhere:99999999")
        await server.start()
        await server.stop(0)


async def ask_reflection(
    channel: grpc.aio.Channel, version: str, **question: str
) -> reflection_pb2.ServerReflectionResponse:
    method: Any = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method()
    await call.write(reflection_pb2.ServerReflectionRequest(**question))
    await call.done_writing()
    response: reflection_pb2.ServerReflectionResponse = await call.read()
    return response


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_every_service_that_it_lists(version: str) -> None:
    async with serving() as (_, channel):
        answer = await ask_reflection(channel, version, list_services="")
        services = [service.name for service in answer.list_services_response.service]
        for name in (*services, "google.rpc.ErrorInfo"):
            found = await ask_reflection(channel, version, file_containing_symbol=name)
            files = DescriptorDatabase()
            for file in found.file_descriptor_response.file_descriptor_proto:
                files.Add(FileDescriptorProto.FromString(file))
            pool = DescriptorPool(files)
            if name in services:
                assert pool.FindServiceByName(name).methods
            else:
                assert pool.FindMessageTypeByName(name).fields


async def test_an_error_has_its_retry_class_for_clients_that_do_not_know_the_reason() -> None:
    for reason in Reason:
        status = rpc_errors.status_of(OutriderError(reason, "no"))
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert info.metadata["retry"] == reason.kind.retry.name.lower()


@pytest.mark.parametrize("retry", Retry)
def test_an_unknown_reason_has_the_retry_class_that_came_with_it(retry: Retry) -> None:
    info = error_details_pb2.ErrorInfo(
        reason="OF_A_LATER_VERSION", domain="outrider.dev", metadata={"retry": retry.name.lower()}
    )
    status = status_pb2.Status(code=14, message="away")
    status.details.add().Pack(info)
    error = rpc_errors.error_of(failure(status.SerializeToString()))
    assert (error.reason, error.retry) == (Reason.VERIFIER_UNAVAILABLE, retry)


def test_an_error_within_an_outer_message_names_the_whole_path_and_keeps_its_wait() -> None:
    inner = OutriderError(Reason.OVERLOADED, "ids has too many", "ids", 7.0, {"limit": "3"})
    outer = inner.within("drafts.proposals[1]")
    assert outer.field == "drafts.proposals[1].ids"
    assert outer.message == "drafts.proposals[1].ids has too many"
    assert (outer.retry_after_s, outer.metadata) == (7.0, {"limit": "3"})


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_a_message_that_is_too_large_is_refused_for_good(
    compression: grpc.Compression,
) -> None:
    unlimited = [("grpc.max_send_message_length", -1)]
    async with (
        serving() as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.ports[0]}", unlimited) as channel,
    ):
        for kind, method in METHODS:
            call = getattr(channel, kind)(method)
            size = rpc.MAX_MESSAGE_BYTES + 1
            answer = (
                call(compression=compression)
                if kind == "stream_stream"
                else call(bytes(size), compression=compression)
            )
            if kind == "stream_stream":
                await answer.write(bytes(size))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (answer if kind == "unary_unary" else answer.read())
            error = rpc_errors.error_of(caught.value)
            assert (error.reason, error.retry) == (Reason.REQUEST_TOO_LARGE, Retry.NEVER)
            assert error.message == f"the message has {size} bytes; at most 16777216 are allowed"


async def test_an_unknown_method_is_refused_for_good() -> None:
    async with serving() as (_, channel):
        for method in (
            "/outrider.v1.VerifierService/Nothing",
            "/other.Service/GetModel",
            # The service declares this method but does not implement it.
            "/grpc.health.v1.Health/List",
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method, None, None)(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            error = rpc_errors.error_of(caught.value)
            assert (error.reason, error.retry) == (Reason.ROUTE_NOT_FOUND, Retry.NEVER)
            assert method in error.message


class Talkative(token_streams_pb2_grpc.TokenStreamServiceServicer):
    """A handler that writes large messages until the caller leaves."""

    def __init__(self) -> None:
        self.ends: list[type[BaseException]] = []

    async def AgreeVersion(
        self, request: token_streams_pb2.AgreeVersionRequest, context: Any
    ) -> token_streams_pb2.AgreeVersionResponse:
        return token_streams_pb2.AgreeVersionResponse(version=1)

    # The stubs do not know that a handler may write through its context.
    async def StreamTokens(  # type: ignore[override]
        self, request_iterator: Any, context: Any
    ) -> None:
        part = token_streams_pb2.TokensPart(call_id=1, status=bytes(3_000_000))
        message = token_streams_pb2.StreamTokensResponse(parts=[part])
        try:
            while True:
                await context.write(message)
                # Let the event loop hear that the caller has left, so that the next write fails.
                await asyncio.sleep(0.0)
        except BaseException as end:
            self.ends.append(type(end))
            raise


class Yielding(Talkative):
    """A handler that yields the messages to gRPC, which writes them."""

    async def StreamTokens(  # type: ignore[override]
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[Any]:
        part = token_streams_pb2.TokensPart(call_id=1, status=bytes(3_000_000))
        try:
            while True:
                yield token_streams_pb2.StreamTokensResponse(parts=[part])
        finally:
            self.ends.append(GeneratorExit)


def read_once_and_leave(port: int) -> None:
    """Read one message, let others wait, and hang up."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", rpc.CHANNEL_OPTIONS) as channel:
        stub: Any = token_streams_pb2_grpc.TokenStreamServiceStub(channel)
        call = stub.StreamTokens(iter([token_streams_pb2.StreamTokensRequest()]))
        next(call)
        time.sleep(0.05)
        call.cancel()


@pytest.mark.parametrize("make", [Talkative, Yielding])
async def test_a_caller_that_leaves_during_a_write_leaves_no_traceback(
    make: Callable[[], Talkative], caplog: pytest.LogCaptureFixture
) -> None:
    server = rpc.Server()
    servicer = make()
    token_streams_pb2_grpc.add_TokenStreamServiceServicer_to_server(servicer, server.grpc)
    [port] = await server.start("127.0.0.1:0")
    for _ in range(5):
        await asyncio.to_thread(read_once_and_leave, port)
    await until(lambda: len(servicer.ends) == 5)
    await server.stop(0)
    assert set(servicer.ends) != {asyncio.CancelledError}, "no write failed"
    assert "Traceback" not in caplog.text
