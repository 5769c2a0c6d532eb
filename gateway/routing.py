"""The verifier's replicas: how far each has loaded, and which of the ready ones is the least busy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import grpc

from gateway.token_stream import TokenStream
from outrider import rpc, wire_model
from outrider.errors import OutriderError, Reason
from outrider.messages import ModelInfo, Stage
from outrider.v1 import verifier_pb2, verifier_pb2_grpc

log = logging.getLogger(__name__)

_POLL_READY_S = 1.0
_POLL_LOADING_S = 0.2
_POLL_TIMEOUT_S = 5.0
# Why a verifier takes no request that another one would take.
_GONE = (Reason.VERIFIER_UNAVAILABLE, Reason.NOT_READY, Reason.DRAINING)


class Replica:
    """One verifier. `problem` is None when it can take requests, else the reason why not."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.info: ModelInfo | None = None
        self.problem: OutriderError | None = OutriderError(Reason.NOT_READY, f"verifier {address} has not answered yet")
        self.running = 0
        self.round_trip_s: float | None = None
        """Of the last question how the verifier is."""
        self._channel = rpc.dial(address)
        self._stub = verifier_pb2_grpc.VerifierServiceStub(self._channel)
        self.tokens = TokenStream(self._stub, self.lost)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count one running request."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def refresh(self, fingerprint: str) -> None:
        """Ask how far the verifier is."""
        asked = time.perf_counter()
        try:
            response = await self._stub.GetModel(verifier_pb2.GetModelRequest(), timeout=_POLL_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            self.lost(rpc.error_of(failure))
            return
        self.round_trip_s = time.perf_counter() - asked
        self.info = wire_model.model_from_proto(response)
        self.problem = _problem(self.address, self.info, fingerprint)

    def lost(self, error: OutriderError) -> OutriderError:
        """Take no request until the verifier answers again; what those who wait for it are told."""
        message = f"verifier {self.address} does not answer: {error.message}"
        self.problem = problem = OutriderError(Reason.VERIFIER_UNAVAILABLE, message, retry_after_s=1.0)
        return problem

    async def close(self) -> None:
        await self.tokens.close()
        await self._channel.close(None)


def _problem(address: str, info: ModelInfo, fingerprint: str) -> OutriderError | None:
    """Why a verifier that answered cannot take requests."""
    if info.stage is Stage.DRAINING:
        return OutriderError(Reason.DRAINING, f"verifier {address} is draining", retry_after_s=1.0)
    if info.stage is not Stage.READY:
        message = f"verifier {address} is not ready ({info.stage.name.lower()}): {info.stage_detail}"
        return OutriderError(Reason.NOT_READY, message, retry_after_s=1.0)
    if info.tokenizer_fingerprint != fingerprint:
        message = (
            f"the gateway's tokenizer (fingerprint {fingerprint}) is not that of verifier {address} "
            f"(fingerprint {info.tokenizer_fingerprint}); give --tokenizer the target's"
        )
        return OutriderError(Reason.NOT_READY, message)
    return None


class Router:
    """Polls the replicas and picks one for each sequence."""

    def __init__(self, addresses: Sequence[str], fingerprint: str, model_name: str = "") -> None:
        self.replicas = [Replica(address) for address in addresses]
        self.draining = False
        self._fingerprint = fingerprint
        self._model_name = model_name
        self._tasks: list[asyncio.Task[None]] = []
        self._told_ready: bool | None = None

    def start(self, on_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Begin to poll; `on_ready` hears each change of whether requests can be taken."""
        self._tasks = [asyncio.create_task(self._poll(replica, on_ready)) for replica in self.replicas]

    async def close(self) -> None:
        """Stop to poll and hang up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            await replica.close()

    async def _poll(self, replica: Replica, on_ready: Callable[[bool], Awaitable[None]]) -> None:
        while True:
            before = str(replica.problem)
            await replica.refresh(self._fingerprint)
            if str(replica.problem) != before:
                log.info("%s", replica.problem or f"verifier {replica.address} is ready")
            if self.ready is not self._told_ready:
                self._told_ready = self.ready
                await on_ready(self.ready)
            await asyncio.sleep(_POLL_READY_S if replica.problem is None else _POLL_LOADING_S)

    @property
    def ready(self) -> bool:
        """Whether a request could be taken."""
        return not self.draining and any(replica.problem is None for replica in self.replicas)

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The served models by the name that requests use."""
        return {self._name(replica.info): replica.info for replica in self.replicas if replica.info is not None}

    def _name(self, info: ModelInfo) -> str:
        return self._model_name or info.model_id

    def instead_of(self, replica: Replica, error: OutriderError, model: str) -> Replica:
        """Another replica of the model, for one that was gone or about to go when asked; raises `error` if there is none."""
        if error.reason not in _GONE:
            raise error
        # Until it is asked how it is.
        replica.problem = replica.problem or error
        try:
            return self.pick(model)[2]
        except OutriderError:
            raise error from None

    def pick(self, model: str | None) -> tuple[str, ModelInfo, Replica]:
        """The model's name, the model, and the least busy replica that serves it; None or "" is whichever model there is.

        Raises OutriderError: NOT_READY, DRAINING or VERIFIER_UNAVAILABLE when no replica is ready, MODEL_NOT_FOUND.
        """
        if self.draining:
            raise OutriderError(Reason.DRAINING, "the gateway is shutting down", retry_after_s=1.0)
        ready = [(r, r.info) for r in self.replicas if r.problem is None and r.info is not None]
        if not ready:
            raise self.replicas[0].problem or OutriderError(Reason.NOT_READY, "no verifier is ready", retry_after_s=1.0)
        serving = [(replica, info) for replica, info in ready if model in (None, "", self._name(info))]
        if not serving:
            names = ", ".join(sorted({self._name(info) for _, info in ready}))
            raise OutriderError(Reason.MODEL_NOT_FOUND, f"model {str(model)[:100]!r} is not served here; there is {names}", "model")
        replica, info = min(serving, key=lambda pair: pair[0].running)
        return self._name(info), info, replica
