"""Poll the verifier's replicas, and pick the least busy ready one for each request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import grpc

from gateway.chunk_checks import check_model
from gateway.problems import for_callers, unanswered, unreadable
from gateway.token_stream import TokenStream
from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2_grpc
from outrider.model_info import ModelInfo, Stage
from outrider.process import rpc
from outrider.process.credentials import ClientCredentials, client_credentials
from outrider.process.roles import Role
from outrider.process.tasks import keep_running, watch
from outrider.process.tls import Tls, WatchedTls
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider.wire import model as wire_model

log = logging.getLogger(__name__)

_POLL_READY_S = 1.0
_POLL_LOADING_S = 0.2
_POLL_TIMEOUT_S = 5.0
_DRAIN_POLL_S = 0.05
# A verifier that starts together with the gateway may take this long to answer. Until then its
# problems are not logged.
_STARTUP_S = 30.0
# Errors of one replica with which a sequence moves to another replica.
MOVING = (Reason.VERIFIER_UNAVAILABLE, Reason.NOT_READY, Reason.DRAINING)


class Replica:
    """One verifier. `problem` says why it cannot take requests; None means that it can."""

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self.address = address
        self._tls = tls
        self._files = None if tls is None else WatchedTls(tls, self._credentials)
        self.info: ModelInfo | None = None
        self.problem: OutriderError | None = OutriderError(
            Reason.NOT_READY, f"verifier {address} has not answered yet"
        )
        self.sequences: set[object] = set()
        """The sequences that run on this replica, or wait since it was lost for one to move to."""
        self.others = 0
        """Sequences that other callers had there at the last poll."""
        self.round_trip_s: float | None = None
        """How long the last poll took."""
        self.suspect = asyncio.Event()
        """Set when the next poll should not wait: the verifier is lost, or says that it leaves."""
        self.full = False
        """Whether its queue has refused a sequence since the last poll."""
        self._earlier: dict[asyncio.Task[None], TokenStream] = {}
        self._dial()

    def _credentials(self, files: Tls) -> ClientCredentials:
        return client_credentials(self.address, files, Role.VERIFIER)

    def _dial(self) -> None:
        """Connect with the last valid files, so that files being replaced end no connection."""
        channel = rpc.channel(self.address, None if self._files is None else self._files.current)
        self._channel = channel
        self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)

        def on_lost(error: OutriderError) -> OutriderError:
            # An earlier connection may end while the verifier is well.
            if channel is self._channel:
                self.suspect.set()
                self.mark_lost(error)
            return for_callers(unanswered(self.address, error, self._tls))

        stub = token_streams_pb2_grpc.TokenStreamServiceStub(channel)
        self.tokens = TokenStream(stub, on_lost, self.suspect.set)

    def redial(self) -> None:
        """Make a new connection, since the old one may be half open.

        Sequences on the old connection may finish there.
        """
        retiring = _retire(self._channel, self.tokens)
        retired = watch(retiring, f"an earlier connection to {self.address}")
        self._earlier[retired] = self.tokens
        retired.add_done_callback(self._earlier.pop)
        self._dial()

    def fail_sequences(self, error: OutriderError, *, waiting_only: bool = False) -> None:
        """End all sequences with an error, or only those without a chunk yet."""
        for tokens in (*self._earlier.values(), self.tokens):
            tokens.fail_sequences(error, waiting_only=waiting_only)

    async def refresh(self, fingerprint: str) -> None:
        """Ask the verifier for its model and stage, and update `info` and `problem`.

        `fingerprint` is the gateway's tokenizer's, which must equal the verifier's.
        """
        if self._files is not None and self._files.refresh():
            # A channel keeps the certificate that it was made with.
            self.redial()
        asked = time.perf_counter()
        request = verifier_pb2.GetModelRequest()
        try:
            response = await self._stub.GetModel(request, timeout=_POLL_TIMEOUT_S)
            info = wire_model.model_from_proto(response)
            check_model(info)
        except grpc.aio.AioRpcError as failure:
            self._take_refusal(rpc.error_of(failure))
            if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.redial()
            return
        # A broken verifier may answer anything. The next poll asks it again.
        except Exception as cause:  # noqa: BLE001
            self.problem = unreadable(self.address, cause)
            return
        self.round_trip_s = time.perf_counter() - asked
        self.info = info
        self.full = False
        self.others = 0 if info.load is None else info.load.beside(len(self.sequences))
        self.problem = _problem(self.address, info, fingerprint)

    def _take_refusal(self, error: OutriderError) -> None:
        """Take no requests. NOT_READY is the verifier's own word that its engine hangs."""
        if error.reason is Reason.NOT_READY:
            message = f"verifier {self.address} is not ready: {error.message}"
            self.problem = replace(error, message=message)
        else:
            self.mark_lost(error)

    def mark_lost(self, error: OutriderError) -> None:
        """Take no requests until the verifier answers again."""
        self.problem = unanswered(self.address, error, self._tls)

    def doubt(self, stream: TokenStream, error: OutriderError) -> None:
        """Note that `error` ended a sequence of `stream`.

        A verifier with a full queue goes on to take new requests; another one gets none until it
        has been polled, which is done at once. An earlier connection may end while the verifier is
        well.
        """
        if error.reason is Reason.OVERLOADED:
            self.full = True
        elif stream is self.tokens:
            self.problem = self.problem or error
            self.suspect.set()

    async def close(self) -> None:
        """End all sequences and connections."""
        for retired in list(self._earlier):
            retired.cancel()
        await asyncio.gather(*self._earlier, return_exceptions=True)
        await self.tokens.close()
        await self._channel.close(None)


async def _retire(channel: grpc.aio.Channel, tokens: TokenStream) -> None:
    """Close a connection once its sequences have ended."""
    try:
        await tokens.finished()
    finally:
        await tokens.close()
        await channel.close(None)


def _problem(address: str, info: ModelInfo, fingerprint: str) -> OutriderError | None:
    """Why a verifier that answered cannot take requests; None if it can."""
    if info.stage is Stage.DRAINING:
        return OutriderError(Reason.DRAINING, f"verifier {address} is draining")
    if info.stage is not Stage.READY:
        stage = info.stage.name.lower()
        message = f"verifier {address} is not ready ({stage}): {info.stage_detail}"
        return OutriderError(Reason.NOT_READY, message)
    if info.tokenizer_fingerprint != fingerprint:
        message = (
            f"the gateway's tokenizer (fingerprint {fingerprint}) is not that of "
            f"verifier {address} (fingerprint {info.tokenizer_fingerprint}); "
            "give --tokenizer the target's"
        )
        return OutriderError(Reason.NOT_READY, message)
    return None


class Pick(NamedTuple):
    """A replica for a request, its model's name in requests, and the model when it was picked."""

    model: str
    info: ModelInfo
    replica: Replica

    def busyness(self) -> tuple[bool, float]:
        """Whether the replica's queue is full, and its sequences for each that can run at once.

        Sequences of a verifier that does not report its load count alone.
        """
        own = len(self.replica.sequences)
        load = self.info.load
        if load is None:
            return self.replica.full, own
        count = own + self.replica.others
        is_full = count >= load.max_running + load.max_waiting
        return self.replica.full or is_full, count / load.max_running

    def continues(self, begun: ModelInfo, length: int) -> bool:
        """Whether the replica can write the rest of a sequence that `begun` has begun.

        `length` is the sequence's prompt and `max_tokens` together, in tokens.
        """
        same = _identity(self.info) == _identity(begun)
        return same and length <= self.info.context_length


def _identity(info: ModelInfo) -> tuple[object, ...]:
    return info.model_id, info.vocab_size, info.eos_token_ids


class Router:
    """Polls the replicas and picks one for each request."""

    def __init__(
        self,
        addresses: Sequence[str],
        fingerprint: str,
        model_name: str = "",
        tls: Tls | None = None,
    ) -> None:
        self.replicas = [Replica(address, tls) for address in addresses]
        self.draining = False
        self._fingerprint = fingerprint
        self._model_name = model_name
        self._tasks: list[asyncio.Task[None]] = []
        self._reported_ready: bool | None = None
        # Set when a replica is ready, and when the router drains. Then another one takes its place,
        # so that nobody misses it who looked at the replicas before.
        self._news = asyncio.Event()
        self._cut_off = False

    def start(self, on_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Start polling. `on_ready` is called with each change of `ready`."""
        for replica in self.replicas:
            poll = partial(self._poll, replica, on_ready)
            self._tasks.append(keep_running(poll, f"polling verifier {replica.address}"))

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, give running sequences `seconds` to finish, and fail the rest."""
        self.draining = True
        self._wake()
        deadline = time.monotonic() + seconds
        # Sequences end in many places, so there is no single event to wait for.
        while any(r.sequences for r in self.replicas) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_S)
        self._cut_off = True
        for replica in self.replicas:
            replica.fail_sequences(_shutting_down())

    async def close(self) -> None:
        """Stop polling, and close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            await replica.close()

    async def _poll(self, replica: Replica, on_ready: Callable[[bool], Awaitable[None]]) -> None:
        logged = str(replica.problem)
        log_after = time.monotonic() + _STARTUP_S
        while True:
            replica.suspect.clear()
            await replica.refresh(self._fingerprint)
            if replica.problem is None:
                log_after = 0.0
                self._wake()
            # While the gateway drains, verifiers that stop with it are no news.
            silent = self.draining or time.monotonic() <= log_after
            if str(replica.problem) != logged and not silent:
                log.info("%s", replica.problem or f"verifier {replica.address} is ready")
                logged = str(replica.problem)
            if replica.problem is not None:
                self._move(replica, replica.problem)
            if self.ready is not self._reported_ready:
                self._reported_ready = self.ready
                await on_ready(self.ready)
            pause_s = _POLL_READY_S if replica.problem is None else _POLL_LOADING_S
            with suppress(TimeoutError):
                await asyncio.wait_for(replica.suspect.wait(), pause_s)

    def _move(self, replica: Replica, problem: OutriderError) -> None:
        """Move sequences from a replica to another one that can continue them all, if one is ready.

        All sequences leave a replica that says it drains or hangs. Only those without a chunk leave
        one that does not answer polls, since it may just be slow. Without another replica that has
        room they stay.
        """
        silent = problem.reason is Reason.VERIFIER_UNAVAILABLE
        info = replica.info
        if info is None:
            return
        picks = [pick for pick in self.ready_picks(self._name(info)) if not pick.busyness()[0]]
        if any(pick.continues(info, info.context_length) for pick in picks):
            replica.fail_sequences(for_callers(problem), waiting_only=silent)

    def _wake(self) -> None:
        """Have sequences that wait for a replica look again."""
        self._news.set()
        self._news = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether a request could be taken."""
        return not self.draining and any(replica.problem is None for replica in self.replicas)

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The served models by the name that requests use."""
        infos = [replica.info for replica in self.replicas if replica.info is not None]
        return {self._name(info): info for info in infos}

    def _name(self, info: ModelInfo) -> str:
        return self._model_name or info.model_id

    def lookup(self, model: str | None) -> tuple[str, ModelInfo]:
        """The name of a model, and the info of its replica with the longest context.

        None or "" stands for any model. Use it to bound a request before a replica is picked.
        Raises OutriderError as `pick` does.
        """
        picks = self._picks(model)
        name = min(picks, key=Pick.busyness).model
        infos = [pick.info for pick in picks if pick.model == name]
        return name, max(infos, key=lambda info: info.context_length)

    def pick(self, model: str | None) -> Pick:
        """The least busy ready replica that serves the model. None or "" stands for any model.

        Raises OutriderError: NOT_READY, DRAINING or VERIFIER_UNAVAILABLE if no replica is ready,
        MODEL_NOT_FOUND if none serves the model.
        """
        return min(self._picks(model), key=Pick.busyness)

    async def instead_of(
        self, lost: Pick, error: OutriderError, wait_s: float = 0.0, length: int | None = None
    ) -> Pick:
        """Pick a ready replica of the model after `lost` failed with `error`.

        It may be the lost one, once a poll has found it ready again. A sequence that has begun
        gives its `length`, see `Pick.continues`, and does not go to a full replica before the next
        poll. Raises `error` if none is ready for `wait_s`. A gateway that shuts down does not wait.
        """
        deadline = time.monotonic() + wait_s
        while not self._cut_off:
            news = self._news
            picks = self.ready_picks(lost.model)
            if length is not None:
                roomy = [pick for pick in picks if not pick.replica.full]
                picks = [pick for pick in roomy if pick.continues(lost.info, length)]
            if picks:
                return min(picks, key=Pick.busyness)
            left_s = deadline - time.monotonic()
            if self.draining or left_s <= 0:
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), left_s)
        raise error

    def _picks(self, model: str | None) -> list[Pick]:
        """The ready replicas that serve the model, at least one. Raises as `pick` does."""
        if self.draining:
            raise _shutting_down()
        ready = self.ready_picks()
        if not ready:
            unknown = OutriderError(Reason.NOT_READY, "no verifier is ready")
            # A new error for each request: a shared one would keep their frames in its traceback.
            raise for_callers(self.replicas[0].problem or unknown)
        serving = [pick for pick in ready if model in (None, "", pick.model)]
        if not serving:
            names = ", ".join(sorted({pick.model for pick in ready}))
            message = f"model {str(model)[:100]!r} is not served here; there is {names}"
            raise OutriderError(Reason.MODEL_NOT_FOUND, message, "model")
        return serving

    def ready_picks(self, model: str | None = None) -> list[Pick]:
        """The ready replicas, of one model or of any."""
        picks = [
            Pick(self._name(replica.info), replica.info, replica)
            for replica in self.replicas
            if replica.problem is None and replica.info is not None
        ]
        return [pick for pick in picks if model in (None, pick.model)]


def _shutting_down() -> OutriderError:
    return OutriderError(Reason.DRAINING, "the gateway is shutting down")
