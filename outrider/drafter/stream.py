"""A drafter's end of the draft stream: dials, introduces itself, and serves a DraftSession.

Receiving and drafting are separate tasks, so that a full send buffer never stops the reading.
Knows no way of drafting.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import grpc

from outrider.drafter.session import DraftSession
from outrider.drafter.strategy import Strategy
from outrider.errors import OutriderError, Reason, Retry
from outrider.process import rpc, telemetry
from outrider.process.clock import Clock, monotonic
from outrider.process.tls import Tls, explain
from outrider.protocol.draft_messages import DraftBatch, Hello, StepBatch, Welcome
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire import model as wire_model
from outrider.v1 import drafts_pb2, verifier_pb2, verifier_pb2_grpc

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_BACKOFF_S = (0.1, 2.0)
# A stream that lasted this long resets the backoff.
_GOOD_S = 60.0
# Upper bound of the retry delay that a verifier may ask for.
_LONGEST_RETRY_S = 60.0
_POLL_LOADING_S = 0.25
# Log a wait for the verifier only after this time: it may be starting too, and loads for a while.
_LOG_WAIT_AFTER_S = 30.0
_GOODBYE_S = 1.0
_CLOSE_S = 10.0
# Further steps stay in the verifier, which closes the stream of a drafter that does not read.
_MAX_UNREAD_STEPS = 256
# Most proposals or skips of a message. With sampled runs of 8 tokens and 32 probabilities each they
# take about 1 MB of the 16 MiB that a message may have.
_MAX_MESSAGE_ENTRIES = 512
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # grpc-stubs lack it


class Observer:
    """Callbacks of a stream. They do nothing; override the callbacks that you need."""

    async def registered(self, address: str) -> None:
        """A verifier registered this drafter."""

    async def lost(self) -> None:
        """The stream ended, and its sequences with it."""

    def drafted(self, batch: DraftBatch, seconds: float) -> None:
        """The session made a batch in this time and is about to send it."""

    def following(self, sequence_count: int, abandoned_count: int) -> None:
        """A round ended with these counts: sequences that are open, and all abandoned so far."""


async def wait_until_ready(
    channel: grpc.aio.Channel, clock: Clock = monotonic, tls: Tls | None = None
) -> ModelInfo:
    """Poll GetModel until the verifier is READY; returns its model.

    `tls` has the files that the channel was made with. Never times out. Raises OutriderError for an
    answer that is invalid, or when the files change, since the channel keeps the old files; and
    AioRpcError when the verifier refuses the call for good.
    """
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    logged = ""
    log_after = clock() + _LOG_WAIT_AFTER_S
    stamp = tls and tls.stamp()
    while True:
        is_refused = False
        try:
            response = await stub.GetModel(verifier_pb2.GetModelRequest(), timeout=10)
            info = wire_model.model_from_proto(rpc.readable(response))
            if info.stage is Stage.READY:
                return info
            state = f"{info.stage.name.lower()}: {info.stage_detail}"
        except grpc.aio.AioRpcError as failure:
            error = rpc.error_of(failure)
            if error.retry is Retry.NEVER:
                raise
            reason = explain(error.message, tls)
            is_refused = reason != error.message
            state = f"{failure.code().name}: {reason}"
        if tls is not None and tls.stamp() != stamp:
            raise OutriderError(Reason.VERIFIER_UNAVAILABLE, "the certificate's files have changed")
        # A refused certificate does not get better by waiting, so it is logged at once.
        if state != logged and (is_refused or clock() > log_after):
            log.info("waiting for the verifier (%s)", state)
            logged = state
        await asyncio.sleep(_POLL_LOADING_S)


class DraftStream:
    """Serves one verifier and reconnects when it restarts; `stop` ends it."""

    def __init__(
        self,
        address: Callable[[], str],
        make_strategy: Callable[[ModelInfo], Strategy],
        hello: Callable[[Strategy, ModelInfo], Hello],
        observer: Observer,
        clock: Clock = monotonic,
        tls: Tls | None = None,
    ) -> None:
        """Each connection calls `address`, `make_strategy` and `hello` and reads `tls` anew.

        The verifier's socket may appear after this drafter started, so its address may change. A
        verifier opens every sequence again on a new stream, so each strategy starts empty.
        """
        self._address = address
        self._make_strategy = make_strategy
        self._hello = hello
        self._observer = observer
        self._clock = clock
        self._tls = tls
        self._stopping = asyncio.Event()
        self._backoff_s = _BACKOFF_S[0]
        self._fatal: tuple[type[Exception], ...] = ()

    def stop(self) -> None:
        """Say goodbye and end `run`."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`; raises OutriderError when the verifier refuses it for good."""
        while not self._stopping.is_set():
            try:
                await self._connect()
                error = OutriderError(Reason.VERIFIER_UNAVAILABLE, "the verifier ended the stream")
            except grpc.aio.AioRpcError as failure:
                error = rpc.error_of(failure)
                if error.retry is Retry.NEVER:
                    raise error from failure
            # The verifier sent an invalid message. A new stream starts from a clean state.
            except OutriderError as violation:
                error = violation
            # A fault of the strategy that a new connection may clear.
            except Exception as fault:
                if isinstance(fault, self._fatal):
                    raise
                log.exception("drafting failed; reconnecting")
                error = OutriderError(Reason.INTERNAL, "drafting failed")
            if not self._stopping.is_set():
                log.warning("the stream to %s ended: %s", self._address(), error)
                wanted_s = min(error.retry_after_s or 0.0, _LONGEST_RETRY_S)
                await self._sleep(max(wanted_s, self._backoff_s * random.uniform(0.5, 1.0)))
                self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _connect(self) -> None:
        async with rpc.dial(self._address(), self._tls) as channel:
            waiting = wait_until_ready(channel, self._clock, self._tls)
            info = await self._unless_stopped(waiting)
        if info is None:
            return
        address = self._address()
        async with rpc.dial(address, self._tls) as channel:
            strategy = self._make_strategy(info)
            self._fatal = strategy.fatal
            try:
                connection = _Connection(
                    channel, strategy, info, self._stopping, self._observer, self._clock
                )
                welcome = await self._unless_stopped(
                    connection.introduce(self._hello(strategy, info))
                )
                if welcome is None:
                    return
                log.info("drafting for %s", welcome.model_id)
                await self._observer.registered(address)
                await self._serve(connection)
            finally:
                try:
                    await self._observer.lost()
                finally:
                    await _close(strategy)

    async def _serve(self, connection: _Connection) -> None:
        began = self._clock()
        try:
            await connection.serve()
        finally:
            if self._clock() - began > _GOOD_S:
                self._backoff_s = _BACKOFF_S[0]

    async def _unless_stopped(self, work: Coroutine[Any, Any, _Result]) -> _Result | None:
        """The result of `work`; None when `stop` came first."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stopped.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)


async def _close(strategy: Strategy) -> None:
    """Close a strategy. Logs it if that fails or takes too long."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await strategy.aclose()
    except Exception:  # it must not hide why the stream ended
        log.exception("closing the strategy %s failed", strategy.name)


class _Connection:
    """One connection to a verifier, with its session."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        strategy: Strategy,
        info: ModelInfo,
        stopping: asyncio.Event,
        observer: Observer,
        clock: Clock,
    ) -> None:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        self._call: Any = stub.StreamDrafts()
        self._family_name = strategy.name
        self._session = DraftSession(strategy, clock)
        self._clock = clock
        self._vocab_size = info.vocab_size
        self._stopping = stopping
        self._observer = observer
        self._inbox: asyncio.Queue[StepBatch] = asyncio.Queue(_MAX_UNREAD_STEPS)
        self._wake = asyncio.Event()

    async def introduce(self, hello: Hello) -> Welcome:
        """Send Hello and wait for Welcome; raises AioRpcError when the verifier refuses."""
        request = verifier_pb2.StreamDraftsRequest(hello=wire_drafts.hello_to_proto(hello))
        try:
            await self._call.write(request)
        except asyncio.InvalidStateError:
            await self._raise_status()
        first = await self._call.read()
        if first is _END:
            await self._raise_status()
        if first is _END or rpc.readable(first).WhichOneof("message") != "welcome":
            message = "the verifier's first message must be a Welcome"
            raise OutriderError(Reason.PROTOCOL_VIOLATION, message)
        welcome = wire_drafts.welcome_from_proto(first.welcome)
        self._session.welcome(welcome)
        return welcome

    async def serve(self) -> None:
        """Receive and draft until the verifier ends the stream or `stopping` is set.

        In the second case, send Draining, half-close and wait up to 1 s for the end of the stream.
        """
        receiving = asyncio.create_task(self._receive())
        drafting = asyncio.create_task(self._draft())
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([receiving, drafting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                self._wake.set()
                # A verifier that no longer reads must not keep the process alive.
                await asyncio.wait([receiving, drafting], timeout=_GOODBYE_S)
            else:
                await self._end(receiving, drafting)
        finally:
            for task in (receiving, drafting, stopped):
                task.cancel()
            await asyncio.gather(receiving, drafting, stopped, return_exceptions=True)

    async def _end(self, *tasks: asyncio.Task[None]) -> None:
        """Raise why the stream ended: an error of our own tasks as it is, else the call's status.

        gRPC's own exceptions are ignored, because a failed write does not carry the status.
        """
        ended_by_grpc = (grpc.aio.AioRpcError, asyncio.InvalidStateError, type(None))
        for task in tasks:
            if task.done() and not isinstance(task.exception(), ended_by_grpc):
                task.result()
        await self._raise_status()

    async def _raise_status(self) -> None:
        """Raise AioRpcError with the call's status, unless that is OK."""
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            initial = await self._call.initial_metadata()
            trailing = await self._call.trailing_metadata()
            raise grpc.aio.AioRpcError(code, initial, trailing, await self._call.details(), None)

    async def _receive(self) -> None:
        while (response := await self._call.read()) is not _END:
            if rpc.readable(response).WhichOneof("message") == "step":
                await self._inbox.put(wire_drafts.step_from_proto(response.step, self._vocab_size))
                self._wake.set()
            elif response.WhichOneof("message") == "draining":
                log.info("the verifier is draining: %s", response.draining.reason)

    async def _draft(self) -> None:
        session = self._session
        while not self._stopping.is_set():
            self._wake.clear()
            while not self._inbox.empty():
                session.apply(self._inbox.get_nowait())
            started = self._clock()
            batch = await session.round(self._wake.is_set)
            self._observer.following(len(session.sequences), session.abandoned_count)
            if batch.proposals or batch.skips:
                self._observer.drafted(batch, self._clock() - started)
                self._trace(batch)
                for part in _messages(batch):
                    proto = wire_drafts.drafts_to_proto(part)
                    await self._call.write(verifier_pb2.StreamDraftsRequest(drafts=proto))
            else:
                await self._wake.wait()
        goodbye = drafts_pb2.Draining(reason="the drafter is stopping")
        await self._call.write(verifier_pb2.StreamDraftsRequest(draining=goodbye))
        await self._call.done_writing()

    def _trace(self, batch: DraftBatch) -> None:
        """Record a span for each proposal, as a child of the round that it answers."""
        if not telemetry.enabled():
            return
        for proposal in batch.proposals:
            traceparent = self._session.sequences[proposal.sequence_id].traceparent
            span = telemetry.start("propose", traceparent, seconds_ago=proposal.draft_seconds)
            span.set(
                outrider__family=self._family_name,
                outrider__sequence_id=proposal.sequence_id,
                outrider__base_length=proposal.base_length,
                outrider__draft_tokens=len(proposal.token_ids),
            )
            span.end()


def _messages(batch: DraftBatch) -> Iterator[DraftBatch]:
    """Split a batch into messages of at most 512 entries.

    A batch that fits stays whole, because the verifier divides the drafting time of a message by
    its longest run.
    """
    if len(batch.proposals) + len(batch.skips) <= _MAX_MESSAGE_ENTRIES:
        yield batch
        return
    for first in range(0, len(batch.proposals), _MAX_MESSAGE_ENTRIES):
        yield DraftBatch(batch.proposals[first : first + _MAX_MESSAGE_ENTRIES])
    for first in range(0, len(batch.skips), _MAX_MESSAGE_ENTRIES):
        yield DraftBatch(skips=batch.skips[first : first + _MAX_MESSAGE_ENTRIES])
