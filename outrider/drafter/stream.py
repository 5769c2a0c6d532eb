"""A drafter's end of the draft stream: introduces the drafter, and serves a DraftSession.

Receiving and drafting are separate tasks, so that a full send buffer never stops the reading. This
module works with any drafting method and any transport.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from outrider.drafter.session import DraftSession
from outrider.drafter.step_queue import StepQueue
from outrider.drafter.strategy import Strategy
from outrider.drafter.transport import StreamEnded, Transport, Verifier
from outrider.errors import OutriderError, Reason, Retry
from outrider.process.clock import Clock, monotonic
from outrider.process.observability import telemetry
from outrider.protocol.draft_messages import DraftBatch, Hello, Welcome
from outrider.protocol.model_info import ModelInfo

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_BACKOFF_S = (0.1, 2.0)
# A stream that lasted this long resets the backoff.
_GOOD_S = 60.0
# Upper bound of the retry delay that a verifier may ask for.
_LONGEST_RETRY_S = 60.0
_GOODBYE_S = 1.0
_CLOSE_S = 10.0
# Steps beyond this number wait in the verifier, which ends the stream of a drafter that does not
# read.
_MAX_UNREAD_STEPS = 256


class Observer:
    """Callbacks of a stream. All callbacks do nothing; override those that you need."""

    async def registered(self, address: str) -> None:
        """Note that a verifier registered this drafter."""

    async def lost(self) -> None:
        """Note that the stream and its sequences have ended."""

    def drafted(self, batch: DraftBatch, seconds: float) -> None:
        """Note that the session made `batch` in `seconds`, and that the batch is sent next."""

    def following(self, sequence_count: int, abandoned_count: int) -> None:
        """Note at the end of a round how many sequences are open, and how many were abandoned."""


class DraftStream:
    """Drafts for one verifier until `stop`, and reconnects when the verifier restarts.

    `rejoin` replaces the connection by a new one, with a new strategy.
    """

    def __init__(
        self,
        verifier: Verifier,
        make_strategy: Callable[[ModelInfo], Strategy],
        hello: Callable[[Strategy, ModelInfo], Hello],
        observer: Observer,
        clock: Clock = monotonic,
    ) -> None:
        """Each connection calls `make_strategy` and `hello` anew.

        A verifier opens every sequence again on a new stream, so each strategy starts empty.
        """
        self._verifier = verifier
        self._make_strategy = make_strategy
        self._hello = hello
        self._observer = observer
        self._clock = clock
        self._stopping = asyncio.Event()
        # `_leaving` asks the present connection to end; `_left` says that there is no connection.
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()
        self._left.set()
        self._backoff_s = _BACKOFF_S[0]
        self._fatal: tuple[type[Exception], ...] = ()
        self.is_registered = False
        """True if this drafter is registered with the verifier now."""

    def stop(self) -> None:
        """Say goodbye and end `run`."""
        self._stopping.set()
        self._leaving.set()

    async def rejoin(self) -> None:
        """Say goodbye, and connect again at once; return when the former connection is closed."""
        self._leaving.set()
        await self._left.wait()

    async def run(self) -> None:
        """Serve until `stop`; raise OutriderError if the verifier refuses this drafter for good.

        Also raises the strategy's `fatal` exceptions.
        """
        while not self._stopping.is_set():
            try:
                await self._connect()
                if self._leaving.is_set():
                    continue
                error = OutriderError(Reason.VERIFIER_UNAVAILABLE, "the verifier ended the stream")
            except StreamEnded as end:
                error = end.error
                if error.retry is Retry.NEVER:
                    raise error from end
            # For example, the verifier sent an invalid message. A new stream starts from a clean
            # state.
            except OutriderError as violation:
                error = violation
            # A fault of the strategy that a new connection may clear.
            except Exception as fault:
                if isinstance(fault, self._fatal):
                    raise
                log.exception("drafting failed; reconnecting")
                error = OutriderError(Reason.INTERNAL, "drafting failed")
            if not self._stopping.is_set():
                log.warning("the stream to %s ended: %s", self._verifier.address(), error)
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
        self._leaving.clear()
        self._left.clear()
        try:
            await self._join()
        finally:
            self._left.set()

    async def _join(self) -> None:
        info = await self._unless_stopped(self._verifier.model())
        if info is None:
            return
        async with self._verifier.connect(info) as transport:
            strategy = self._make_strategy(info)
            self._fatal = strategy.fatal
            try:
                connection = _Connection(
                    transport, strategy, self._leaving, self._observer, self._clock
                )
                welcome = await self._unless_stopped(
                    connection.introduce(self._hello(strategy, info))
                )
                if welcome is None:
                    return
                log.info("drafting for %s", welcome.model_id)
                self.is_registered = True
                await self._observer.registered(transport.address)
                await self._serve(connection)
            finally:
                self.is_registered = False
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
        """Return the result of `work`; None when `stop` or `rejoin` came first."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stopped.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)


async def _close(strategy: Strategy) -> None:
    """Close a strategy. Logs a failure, and a close that takes too long."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await strategy.aclose()
    except Exception:  # a failed close must not hide why the stream ended
        log.exception("closing the strategy %s failed", strategy.name)


class _Connection:
    """One connection to a verifier, with its session."""

    def __init__(
        self,
        transport: Transport,
        strategy: Strategy,
        leaving: asyncio.Event,
        observer: Observer,
        clock: Clock,
    ) -> None:
        self._transport = transport
        self._family_name = strategy.name
        self._session = DraftSession(strategy, clock)
        self._clock = clock
        self._leaving = leaving
        self._observer = observer
        self._inbox = StepQueue(_MAX_UNREAD_STEPS)
        self._wake = asyncio.Event()

    async def introduce(self, hello: Hello) -> Welcome:
        """Send Hello and wait for Welcome; raise StreamEnded when the verifier refuses."""
        welcome = await self._transport.introduce(hello)
        self._session.welcome(welcome)
        return welcome

    async def serve(self) -> None:
        """Receive and draft until the verifier ends the stream or `leaving` is set.

        If `leaving` is set, say goodbye and wait up to 1 s for the end of the stream.
        """
        receiving = asyncio.create_task(self._receive())
        drafting = asyncio.create_task(self._draft())
        left = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait([receiving, drafting, left], return_when=asyncio.FIRST_COMPLETED)
            if self._leaving.is_set():
                self._wake.set()
                # A verifier that no longer reads must not keep the process alive.
                await asyncio.wait([receiving, drafting], timeout=_GOODBYE_S)
            else:
                _raise_first(receiving, drafting)
        finally:
            for task in (receiving, drafting, left):
                task.cancel()
            await asyncio.gather(receiving, drafting, left, return_exceptions=True)

    async def _receive(self) -> None:
        while (step := await self._transport.read()) is not None:
            await self._inbox.put(step)
            self._wake.set()

    async def _draft(self) -> None:
        session = self._session
        while not self._leaving.is_set():
            self._wake.clear()
            while not self._inbox.empty():
                if step := self._inbox.get_nowait():
                    session.apply(step)
            started = self._clock()
            batch = await session.round(self._wake.is_set)
            self._observer.following(len(session.sequences), session.abandoned_count)
            if batch.proposals or batch.skips:
                self._observer.drafted(batch, self._clock() - started)
                self._trace(batch)
                await self._transport.write(batch)
            else:
                await self._wake.wait()
        await self._transport.say_goodbye()

    def _trace(self, batch: DraftBatch) -> None:
        """Record a span for each proposal, as a child of the span that Opened or Verdict named."""
        if not telemetry.enabled():
            return
        for proposal in batch.proposals:
            traceparent = self._session.sequences[proposal.sequence_id].traceparent
            span = telemetry.start(
                "propose",
                traceparent,
                seconds_ago=proposal.draft_seconds,
                kind=telemetry.Kind.CONSUMER,
            )
            span.set(
                outrider__family=self._family_name,
                outrider__sequence_id=proposal.sequence_id,
                outrider__base_length=proposal.base_length,
                outrider__draft_tokens=len(proposal.token_ids),
            )
            span.end()


def _raise_first(*tasks: asyncio.Task[None]) -> None:
    """Raise a failed task's exception; prefer an exception that is not StreamEnded."""
    done = [task for task in tasks if task.done()]
    for task in sorted(done, key=lambda task: isinstance(task.exception(), StreamEnded)):
        task.result()
