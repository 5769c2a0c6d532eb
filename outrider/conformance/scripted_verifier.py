"""The kit's verifier: sends a scene's messages, and records and checks the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from outrider.conformance.ledger import Complain, Ledger
from outrider.errors import DOMAIN, OutriderError, Reason, Retry
from outrider.process.network import rpc_errors
from outrider.process.security.roles import Peer
from outrider.protocol.limits import MAX_DRAFT_TOKENS, MAX_FAMILY_LENGTH, MAX_NAME_LENGTH
from outrider.protocol.wire import drafts as wire_drafts
from outrider.testing import DraftStream, ScriptedVerifier
from outrider.v1 import drafts_pb2, verifier_pb2

# Of a prompt, only the 32 tokens before the last token get features, so that no message becomes
# long.
_PROMPT_FEATURES = 32
Note = Callable[[str, dict[str, Any]], None]
"""Takes the sender's name and its message, for the transcript."""


class Broken(Exception):
    """A scene found a broken rule. `ended` is True if the end of the stream broke the rule."""

    def __init__(self, rule: str, reason: str, ended: bool = False) -> None:
        super().__init__(f"{rule}: {reason}")
        self.rule = rule
        self.reason = reason
        self.ended = ended


class Link(DraftStream):
    """One stream of the drafter.

    A ledger checks the stream's messages, and the transcript records them.
    """

    def __init__(
        self, hello: drafts_pb2.Hello, ledger: Ledger, note: Note, feature_width: int
    ) -> None:
        super().__init__(hello)
        self.ledger = ledger
        self.feature_width = feature_width
        # Maps a sequence to the position after the last feature that was sent.
        self._featured: dict[int, int] = {}
        self._random = np.random.default_rng(0)
        self.received_at = time.monotonic()
        self.half_closed = asyncio.Event()
        self.draining = False
        self._note = note
        self._changed = asyncio.Event()

    def step(self, **fields: Any) -> None:
        """Send a StepBatch with these fields; add its tokens' features if `features` is absent."""
        batch = drafts_pb2.StepBatch(**fields)
        if "features" not in fields:
            for opened in batch.opened:
                end = len(opened.token_ids) - 1
                first = max(0, end - _PROMPT_FEATURES)
                self._add_features(batch, opened.sequence_id, first, end)
            for verdict in batch.verdicts:
                first = self._featured.get(verdict.sequence_id, 0)
                self._add_features(batch, verdict.sequence_id, first, verdict.committed_length - 1)
        self.ledger.sent(batch)
        self.send(verifier_pb2.StreamDraftsResponse(step=batch))

    def _add_features(
        self, batch: drafts_pb2.StepBatch, sequence_id: int, first: int, end: int
    ) -> None:
        if self.feature_width and first < end:
            batch.features.append(self.features(sequence_id, first, end))

    def features(self, sequence_id: int, first: int, end: int) -> drafts_pb2.Features:
        """Return random features of the tokens at positions `first` to `end - 1`."""
        self._featured[sequence_id] = end
        shape = (end - first, self.feature_width)
        numbers = self._random.standard_normal(shape).astype("<f4")
        dtype = self.hello.feature_request.dtype
        if dtype == drafts_pb2.FEATURE_DTYPE_FLOAT16:
            rows = numbers.astype("<f2").tobytes()
        elif dtype == drafts_pb2.FEATURE_DTYPE_FLOAT32:
            rows = numbers.tobytes()
        else:
            # The upper half of a float32 is a bfloat16.
            rows = (numbers.view("<u4") >> 16).astype("<u2").tobytes()
        return drafts_pb2.Features(sequence_id=sequence_id, first_position=first, rows=rows)

    def send(self, message: Message | bytes) -> None:
        """Send a message, and record it in the transcript unless it is given as bytes."""
        if isinstance(message, Message):
            self._note("verifier", MessageToDict(message, preserving_proto_field_name=True))
        super().send(message)

    def end(self, status: status_pb2.Status | None) -> None:
        """End the stream with this status; with None, end it as a killed process would."""
        self._note("verifier", {"ends": reason_in(status) if status else "without a status"})
        super().end(status)
        self.close()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition holds, for at most `seconds`; return whether it holds.

        Each message triggers a check. The wait also ends with the stream.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition() and not self.ended:
                    self._changed.clear()
                    await self._changed.wait()
        return condition()

    def heard(self, request: verifier_pb2.StreamDraftsRequest | None) -> None:
        """Record and check a message of the drafter; None means that it half-closed."""
        if request is None:
            self._note("drafter", {"half_closes": True})
            self.half_closed.set()
            return
        self._note("drafter", MessageToDict(request, preserving_proto_field_name=True))
        self.received_at = time.monotonic()
        if request.HasField("drafts"):
            self.ledger.received(request.drafts)
        self.draining |= request.HasField("draining")
        self._changed.set()

    def close(self) -> None:
        """Mark the stream as ended and wake `until`."""
        super().close()
        self._changed.set()


class KitsVerifier(ScriptedVerifier):
    """Records and checks every message of a drafter, its Hello included."""

    def __init__(
        self,
        model: verifier_pb2.GetModelResponse,
        complain: Complain,
        remark: Complain,
        note: Note,
        hidden_size: int,
    ) -> None:
        super().__init__(model)
        self._hidden_size = hidden_size
        self._complain = complain
        self._remark = remark
        self._note = note

    def stream_of(self, hello: drafts_pb2.Hello) -> Link:
        """Return a Link with a ledger of its own."""
        ledger = Ledger(self.model.vocab_size, self._complain, self._remark)
        return Link(hello, ledger, self._note, self.feature_width(hello))

    def feature_width(self, hello: drafts_pb2.Hello) -> int:
        """Return a feature's length; 0 unless the drafter asks for features of a known type."""
        request = hello.feature_request
        is_known = request.dtype in drafts_pb2.FeatureDtype.values()
        if drafts_pb2.CAPABILITY_FEATURES not in hello.capabilities or not is_known:
            return 0
        return self._hidden_size * (len(request.aux_layers) + request.final_state)

    async def link(self) -> Link:
        """Wait for the drafter's next stream, and return it."""
        stream = await self.streams.get()
        assert isinstance(stream, Link)
        return stream

    def check_first(
        self, first: verifier_pb2.StreamDraftsRequest | None, peer: Peer | None
    ) -> None:
        """Complain about a first message that is no Hello, or has wrong fields; refuse nobody."""
        if first is None:
            self._complain("hello", "no Hello came within 10 s")
            return
        self._note("drafter", MessageToDict(first, preserving_proto_field_name=True))
        hello = first.hello
        if peer is not None:
            try:
                peer.check_id("drafter_id", hello.drafter_id)
            except OutriderError as error:
                self._complain("hello", error.message)
        if first.WhichOneof("message") != "hello":
            self._complain("hello", "the first message is no Hello")
        if hello.tokenizer_fingerprint != self.model.tokenizer_fingerprint:
            self._complain("hello", f"tokenizer_fingerprint is {hello.tokenizer_fingerprint!r}")
        has_valid_id = 1 <= len(hello.drafter_id) <= MAX_NAME_LENGTH
        if not (has_valid_id and 1 <= len(hello.family) <= MAX_FAMILY_LENGTH):
            lengths = f"1 to {MAX_NAME_LENGTH} characters, family 1 to {MAX_FAMILY_LENGTH}"
            self._complain("hello", f"drafter_id must have {lengths}")
        if not 1 <= hello.max_draft_tokens <= MAX_DRAFT_TOKENS:
            self._complain("hello", f"max_draft_tokens is {hello.max_draft_tokens}")
        if hello.HasField("max_sequence_count") and hello.max_sequence_count < 1:
            self._complain("hello", f"max_sequence_count is {hello.max_sequence_count}")
        try:
            wire_drafts.feature_request_from_proto(hello)
        except OutriderError as error:
            self._complain("hello", error.message)

    async def _refuse(self, context: Any) -> None:
        if self.refusal is not None:
            self._note("verifier", {"ends": reason_in(self.refusal)})
        await super()._refuse(context)


def refused(reason: Reason, retry_after_s: float | None = None) -> status_pb2.Status:
    """Return a status with which the scripted verifier refuses a drafter."""
    message = "the conformance kit refuses"
    return rpc_errors.status_of(OutriderError(reason, message, retry_after_s=retry_after_s))


def refused_for_a_later_reason(retry: Retry) -> status_pb2.Status:
    """Return a refusal with this retry rule, for a reason that only a later version knows."""
    message = f"the conformance kit refuses for a later version's reason; retry: {retry.value}"
    reason = "REASON_OF_A_LATER_VERSION"
    info = error_details_pb2.ErrorInfo(
        reason=reason, domain=DOMAIN, metadata={"retry": retry.name.lower()}
    )
    status = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message=message)
    status.details.add().Pack(info)
    return status


def reason_in(status: status_pb2.Status) -> str:
    """Return the reason in a status' ErrorInfo; empty if it has none."""
    info = error_details_pb2.ErrorInfo()
    for packed in status.details:
        packed.Unpack(info)
    reason: str = info.reason
    return reason
