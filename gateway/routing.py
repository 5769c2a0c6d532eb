"""The verifier's replicas: how far each has loaded, and which of the ready ones is the least busy."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import grpc

from gateway.token_stream import TokenStream
from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2_grpc
from outrider.limits import MAX_DRAFT_TOKENS
from outrider.model_info import ModelInfo, Stage
from outrider.process import rpc
from outrider.process.tasks import keep_running, watch
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider.wire import model as wire_model

log = logging.getLogger(__name__)

_POLL_READY_S = 1.0
_POLL_LOADING_S = 0.2
_POLL_TIMEOUT_S = 5.0
_SHOWN_CHARACTERS = 400
_DRAIN_LOOK_S = 0.05
# At the start, a verifier that starts as well may take longer to answer.
_WORTH_TELLING_S = 30.0
# Why a verifier takes no request that another one would take.
_GONE = (Reason.VERIFIER_UNAVAILABLE, Reason.NOT_READY, Reason.DRAINING)


class Replica:
    """One verifier. `problem` is None when it can take requests, else the reason why not."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.info: ModelInfo | None = None
        self.problem: OutriderError | None = OutriderError(
            Reason.NOT_READY, f"verifier {address} has not answered yet"
        )
        self.sequences: set[object] = set()  # those that run there
        self.round_trip_s: float | None = None
        """Of the last question how the verifier is."""
        self._earlier: dict[asyncio.Task[None], TokenStream] = {}
        self._dial()

    def _dial(self) -> None:
        self._channel = channel = rpc.dial(self.address)
        self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        # The end of an earlier connection says nothing of the verifier.
        self.tokens = TokenStream(
            token_streams_pb2_grpc.TokenStreamServiceStub(channel),
            lambda error: (
                self.lost(error) if channel is self._channel else _lost(self.address, error)
            ),
        )

    def redial(self) -> None:
        """Make a new connection, since the old one may be half open. Sequences on the old one may go on there to their end."""
        retired = watch(
            _retire(self._channel, self.tokens), f"an earlier connection to {self.address}"
        )
        self._earlier[retired] = self.tokens
        retired.add_done_callback(self._earlier.pop)
        self._dial()

    def give_up(self, why: OutriderError, *, waiting_only: bool = False) -> None:
        """End all sequences with an error, or those of which nothing has been said yet."""
        for tokens in (*self._earlier.values(), self.tokens):
            tokens.give_up(why, waiting_only=waiting_only)

    async def refresh(self, fingerprint: str) -> None:
        """Ask how far the verifier is."""
        asked = time.perf_counter()
        try:
            response = await self._stub.GetModel(
                verifier_pb2.GetModelRequest(), timeout=_POLL_TIMEOUT_S
            )
            info = wire_model.model_from_proto(response)
            _check(info)
        except grpc.aio.AioRpcError as failure:
            self.lost(rpc.error_of(failure))
            if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.redial()
            return
        except Exception as cause:  # noqa: BLE001  # a verifier may answer anything; it is asked again
            self._unreadable(cause)
            return
        self.round_trip_s = time.perf_counter() - asked
        self.info = info
        self.problem = _problem(self.address, info, fingerprint)

    def _unreadable(self, cause: Exception) -> None:
        """Take no request until the verifier's answer can be read."""
        message = f"verifier {self.address} gives an answer that cannot be read: {type(cause).__name__}: {cause}"[
            :_SHOWN_CHARACTERS
        ]
        self.problem = OutriderError(Reason.VERIFIER_UNAVAILABLE, message, retry_after_s=1.0)

    def lost(self, error: OutriderError) -> OutriderError:
        """Take no request until the verifier answers again; what those who wait for it are told."""
        self.problem = problem = _lost(self.address, error)
        return problem

    async def close(self) -> None:
        for retired in list(self._earlier):
            retired.cancel()
        await asyncio.gather(*self._earlier, return_exceptions=True)
        await self.tokens.close()
        await self._channel.close(None)


async def _retire(channel: grpc.aio.Channel, tokens: TokenStream) -> None:
    try:
        await tokens.finished()
    finally:
        await tokens.close()
        await channel.close(None)


def _lost(address: str, error: OutriderError) -> OutriderError:
    message = f"verifier {address} does not answer: {error.message}"
    return OutriderError(Reason.VERIFIER_UNAVAILABLE, message, retry_after_s=1.0)


def _check(info: ModelInfo) -> None:
    """Raises ValueError for a model that there cannot be."""
    possible = (
        info.vocab_size > 0
        and info.context_length > 0
        and 0 <= info.max_draft_tokens <= MAX_DRAFT_TOKENS
    )
    if info.stage is Stage.READY and not possible:
        sizes = f"{info.vocab_size}, {info.context_length} and {info.max_draft_tokens}"
        raise ValueError(f"vocab_size, context_length and max_draft_tokens are {sizes}")
    for drafter in info.drafters:
        numbers = (drafter.acceptance_rate, drafter.round_trip_s, drafter.token_s)
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError(f"a number of drafter {drafter.drafter_id!r} is not finite")


def _problem(address: str, info: ModelInfo, fingerprint: str) -> OutriderError | None:
    """Why a verifier that answered cannot take requests."""
    if info.stage is Stage.DRAINING:
        return OutriderError(Reason.DRAINING, f"verifier {address} is draining")
    if info.stage is not Stage.READY:
        message = (
            f"verifier {address} is not ready ({info.stage.name.lower()}): {info.stage_detail}"
        )
        return OutriderError(Reason.NOT_READY, message)
    if info.tokenizer_fingerprint != fingerprint:
        message = (
            f"the gateway's tokenizer (fingerprint {fingerprint}) is not that of verifier {address} "
            f"(fingerprint {info.tokenizer_fingerprint}); give --tokenizer the target's"
        )
        return OutriderError(Reason.NOT_READY, message)
    return None


class Pick(NamedTuple):
    """The replica for a request, the name that requests have for its model, and the model as it was when it was picked."""

    model: str
    info: ModelInfo
    replica: Replica

    def load(self) -> int:
        return len(self.replica.sequences)


class Router:
    """Polls the replicas and picks one for each request."""

    def __init__(self, addresses: Sequence[str], fingerprint: str, model_name: str = "") -> None:
        self.replicas = [Replica(address) for address in addresses]
        self.draining = False
        self._fingerprint = fingerprint
        self._model_name = model_name
        self._tasks: list[asyncio.Task[None]] = []
        self._told_ready: bool | None = None

    def start(self, on_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Begin to poll; `on_ready` hears each change of whether requests can be taken."""
        self._tasks = [
            keep_running(
                partial(self._poll, replica, on_ready), f"polling verifier {replica.address}"
            )
            for replica in self.replicas
        ]

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what runs finish within so long, and end the rest with an error that says so."""
        self.draining = True
        over = time.monotonic() + seconds
        while any(replica.sequences for replica in self.replicas) and time.monotonic() < over:  # noqa: ASYNC110  # runs end in many places
            await asyncio.sleep(_DRAIN_LOOK_S)
        for replica in self.replicas:
            replica.give_up(_shutting_down())

    async def close(self) -> None:
        """Stop to poll and hang up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            await replica.close()

    async def _poll(self, replica: Replica, on_ready: Callable[[bool], Awaitable[None]]) -> None:
        told, worth_telling = str(replica.problem), time.monotonic() + _WORTH_TELLING_S
        while True:
            await replica.refresh(self._fingerprint)
            if replica.problem is None:
                worth_telling = 0.0
            if str(replica.problem) != told and time.monotonic() > worth_telling:
                log.info("%s", replica.problem or f"verifier {replica.address} is ready")
                told = str(replica.problem)
            if replica.problem is not None:
                self._move_waiting(replica, replica.problem)
            if self.ready is not self._told_ready:
                self._told_ready = self.ready
                await on_ready(self.ready)
            await asyncio.sleep(_POLL_READY_S if replica.problem is None else _POLL_LOADING_S)

    def _move_waiting(self, replica: Replica, problem: OutriderError) -> None:
        """Let what waits at a lost replica for its first tokens go to another one of the same model, if there is one."""
        if problem.reason is not Reason.VERIFIER_UNAVAILABLE or replica.info is None:
            return
        others = (
            r
            for r in self.replicas
            if r is not replica and r.problem is None and r.info is not None
        )
        if any(
            other.info is not None and self._name(other.info) == self._name(replica.info)
            for other in others
        ):
            replica.give_up(problem, waiting_only=True)

    @property
    def ready(self) -> bool:
        """Whether a request could be taken."""
        return not self.draining and any(replica.problem is None for replica in self.replicas)

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The served models by the name that requests use."""
        return {
            self._name(replica.info): replica.info
            for replica in self.replicas
            if replica.info is not None
        }

    def _name(self, info: ModelInfo) -> str:
        return self._model_name or info.model_id

    def lookup(self, model: str | None) -> tuple[str, ModelInfo]:
        """The name of a model, None or "" for any, and of its replicas' infos the one with the longest context.

        For what is to be bounded before a replica is picked. Raises OutriderError as `pick` does.
        """
        picks = self._picks(model)
        name = min(picks, key=Pick.load).model
        return name, max(
            (pick.info for pick in picks if pick.model == name),
            key=lambda info: info.context_length,
        )

    def pick(self, model: str | None) -> Pick:
        """The least busy replica that serves the model; None or "" is whichever model there is.

        Raises OutriderError: NOT_READY, DRAINING or VERIFIER_UNAVAILABLE when no replica is ready, MODEL_NOT_FOUND.
        """
        return min(self._picks(model), key=Pick.load)

    def instead_of(self, lost: Pick, error: OutriderError) -> Pick:
        """Another replica of the model, for one that was gone or about to go when asked; raises `error` if there is none."""
        if error.reason not in _GONE:
            raise error
        # Until it is asked how it is.
        lost.replica.problem = lost.replica.problem or error
        try:
            return self.pick(lost.model)
        except OutriderError:
            raise error from None

    def _picks(self, model: str | None) -> list[Pick]:
        """The ready replicas that serve the model, at least one."""
        if self.draining:
            raise _shutting_down()
        ready = [
            Pick(self._name(r.info), r.info, r)
            for r in self.replicas
            if r.problem is None and r.info is not None
        ]
        if not ready:
            raise self.replicas[0].problem or OutriderError(
                Reason.NOT_READY, "no verifier is ready"
            )
        serving = [pick for pick in ready if model in (None, "", pick.model)]
        if not serving:
            names = ", ".join(sorted({pick.model for pick in ready}))
            raise OutriderError(
                Reason.MODEL_NOT_FOUND,
                f"model {str(model)[:100]!r} is not served here; there is {names}",
                "model",
            )
        return serving


def _shutting_down() -> OutriderError:
    return OutriderError(Reason.DRAINING, "the gateway is shutting down")
