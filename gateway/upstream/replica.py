"""A gateway's state of one verifier: its connection, its model, and why it takes no requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import grpc

from gateway.upstream.agreement import Agreement
from gateway.upstream.chunk_checks import check_model
from gateway.upstream.verifier_stream import VerifierStream
from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2_grpc
from outrider.process.network import rpc, rpc_errors
from outrider.process.security.credentials import ClientCredentials, client_credentials
from outrider.process.security.roles import Role
from outrider.process.security.tls import Tls, WatchedTls, explain
from outrider.process.tasks import watch
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.protocol.wire import model as wire_model
from outrider.v1 import verifier_pb2, verifier_pb2_grpc

_POLL_TIMEOUT_S = 5.0
_SHOWN_CHARACTERS = 400
_SHOWN_TO_CALLERS = {
    Reason.NOT_READY: "no verifier is ready",
    Reason.DRAINING: "the verifier is about to stop",
    Reason.VERIFIER_UNAVAILABLE: "the verifier does not answer",
    Reason.MODEL_CHANGED: "the verifier's model has changed",
}


class Replica:
    """One verifier.

    `problem` says why the verifier cannot take requests; None means that it can.
    """

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self.address = address
        self._tls = tls
        self._files = None if tls is None else WatchedTls(tls, self._credentials)
        self.info: ModelInfo | None = None
        self.problem: OutriderError | None = OutriderError(
            Reason.NOT_READY, f"verifier {address} has not answered yet"
        )
        self.sequences: set[object] = set()
        """The sequences that run on this replica, or that wait for another replica since this
        replica was lost."""
        self.unread_count = 0
        """How many of `sequences` have no place in the verifier's batch or queue: they are
        paused or have ended, and their clients have not read the end of the answer yet."""
        self.foreign_count = 0
        """How many sequences of other gateways and callers the verifier had at the last poll."""
        self.round_trip_s: float | None = None
        """The seconds that the last poll took."""
        self.answered_at = time.monotonic()
        """The time of the verifier's last answer to a poll (monotonic seconds)."""
        self.poll_now = asyncio.Event()
        """Set when the next poll should not wait: the verifier is lost, or says that it leaves."""
        self.full = False
        """True if the verifier's queue has refused a sequence since the last poll."""
        self.retired_at: float | None = None
        """When the DNS name lost the verifier's address (monotonic seconds); None if it has it."""
        self._earlier: dict[asyncio.Task[None], VerifierStream] = {}
        self._agreement = Agreement()
        self._dial()

    def _credentials(self, files: Tls) -> ClientCredentials:
        return client_credentials(self.address, files, Role.VERIFIER)

    def _dial(self) -> None:
        """Connect with the last valid TLS files: the present files may be half replaced."""
        channel = rpc.channel(self.address, None if self._files is None else self._files.current)
        self._channel = channel
        self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)

        def on_lost(error: OutriderError) -> OutriderError:
            # An earlier connection may end while the verifier is well.
            if channel is self._channel:
                self.poll_now.set()
                self.mark_lost(error)
            return for_callers(self._unanswered(error))

        agreement = self._agreement
        self._link = token_streams_pb2_grpc.TokenStreamServiceStub(channel)
        self.tokens = VerifierStream(
            self._link, on_lost, self.poll_now.set, lambda: agreement.version
        )

    def redial(self) -> None:
        """Make a new connection, since the old one may be half open.

        Sequences on the old connection may finish there.
        """
        retiring = _retire(self._channel, self.tokens)
        retired = watch(retiring, f"an earlier connection to {self.address}")
        self._earlier[retired] = self.tokens
        retired.add_done_callback(self._earlier.pop)
        self._dial()

    @property
    def leaving(self) -> bool:
        """True if the verifier's DNS name no longer has its address."""
        return self.retired_at is not None

    @property
    def own_count(self) -> int:
        """The number of this gateway's sequences that run at the verifier or wait there."""
        return len(self.sequences) - self.unread_count

    def fail_sequences(self, error: OutriderError, *, waiting_only: bool = False) -> None:
        """End all sequences with an error; if `waiting_only`, only those without a chunk yet."""
        for tokens in (*self._earlier.values(), self.tokens):
            tokens.fail_sequences(error, waiting_only=waiting_only)

    async def refresh(self, fingerprint: str) -> None:
        """Ask the verifier for its model and stage, and update `info` and `problem`.

        `fingerprint` is the fingerprint of the gateway's tokenizer, and must equal the verifier's.
        A verifier that is ready must also speak a version of the gateway's link.
        """
        if self._files is not None and self._files.refresh():
            # A channel keeps its first certificate, so changed files need a new channel.
            self.redial()
        asked = time.perf_counter()
        request = verifier_pb2.GetModelRequest()
        try:
            response = await self._stub.GetModel(request, timeout=_POLL_TIMEOUT_S)
            info = wire_model.model_from_proto(response)
            check_model(info)
        except grpc.aio.AioRpcError as failure:
            self._agreement.forget()
            self.problem = self._refused(rpc_errors.error_of(failure))
            if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.redial()
            return
        # A broken verifier may answer anything. The next poll asks the verifier again.
        except Exception as cause:  # noqa: BLE001
            self.problem = unreadable(self.address, cause)
            return
        self.answered_at = time.monotonic()
        self.round_trip_s = time.perf_counter() - asked
        self.info = info
        self.full = False
        self.foreign_count = 0 if info.load is None else info.load.beside(self.own_count)
        problem = _problem(self.address, info, fingerprint)
        if problem is not None:
            self._agreement.forget()
        elif refusal := await self._agreement.make(self._link):
            problem = self._refused(refusal)
        self.problem = problem

    def _refused(self, error: OutriderError) -> OutriderError:
        """Return the problem of a replica that answers a poll with an error.

        With NOT_READY the verifier itself reports a hanging engine, or that it speaks no version of
        the gateway's link.
        """
        if error.reason is not Reason.NOT_READY:
            return self._unanswered(error)
        message = f"verifier {self.address} is not ready: {error.message}"
        return replace(error, message=message)

    def mark_lost(self, error: OutriderError) -> None:
        """Take no requests until the verifier answers again."""
        self._agreement.forget()
        self.problem = self._unanswered(error)

    def _unanswered(self, error: OutriderError) -> OutriderError:
        """Return the problem of a replica after a call or a connection failed with `error`."""
        reason = explain(error.message, self._tls, is_known=self.info is not None)
        message = f"verifier {self.address} does not answer: {reason}"
        return OutriderError(Reason.VERIFIER_UNAVAILABLE, message, retry_after_s=1.0)

    def mark_suspect(self, stream: VerifierStream, error: OutriderError) -> None:
        """Note that `error` ended a sequence of `stream`.

        A verifier with a full queue still takes new requests. After any other error of the
        present connection, the verifier gets no requests until it has been polled, which happens at
        once. An earlier connection may end while the verifier is well.
        """
        if error.reason is Reason.OVERLOADED:
            self.full = True
        elif stream is self.tokens:
            self._agreement.forget()
            self.problem = self.problem or error
            self.poll_now.set()

    async def close(self) -> None:
        """End all sequences and connections."""
        for retired in list(self._earlier):
            retired.cancel()
        await asyncio.gather(*self._earlier, return_exceptions=True)
        await self.tokens.close()
        await self._channel.close(None)


async def _retire(channel: grpc.aio.Channel, tokens: VerifierStream) -> None:
    """Close a connection after its sequences have ended."""
    try:
        await tokens.finished()
    finally:
        await tokens.close()
        await channel.close(None)


def _problem(address: str, info: ModelInfo, fingerprint: str) -> OutriderError | None:
    """Return why a verifier that answered cannot take requests; None if it can."""
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


def for_callers(problem: OutriderError) -> OutriderError:
    """Return a new error with the same reason, without addresses, files and causes.

    Any tenant may see it. The log and /readyz have what is left out.
    """
    message = f"{_SHOWN_TO_CALLERS[problem.reason]}; operators see why at /readyz"
    return OutriderError(problem.reason, message, retry_after_s=problem.retry_after_s)


def unreadable(address: str, cause: Exception) -> OutriderError:
    """Return the problem of a verifier whose answer cannot be read."""
    reason = f"{type(cause).__name__}: {cause}"
    message = f"verifier {address} gives an answer that cannot be read: {reason}"
    message = message[:_SHOWN_CHARACTERS]
    return OutriderError(Reason.VERIFIER_UNAVAILABLE, message, retry_after_s=1.0)


def explain_differing(model: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Describe how a model's replicas differ; `groups` maps a fingerprint to its addresses."""
    shown = "; ".join(", ".join(sorted(addresses)) for addresses in groups.values())
    cause = "other weights, dtype, version or acceptance settings"
    return f"verifiers of {model} have {cause}: {shown}; none continues the others' answers"
