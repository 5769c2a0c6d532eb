"""Writes the span and the access-log line of one requested sequence, even if it was refused."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType

from outrider.errors import OutriderError
from outrider.process.clock import Clock
from outrider.process.observability import telemetry
from outrider.process.observability.telemetry import Kind
from outrider.protocol.messages import TokenChunk, TokenRequest
from outrider.v1 import verifier_pb2

log = logging.getLogger("verifier.access")

_SHOWN_CHARACTERS = 128


class ServedSequence:
    """Logs and traces the request that is served inside its `with` block, in the request's task."""

    def __init__(
        self, request: verifier_pb2.GenerateTokensRequest, traceparent: str, clock: Clock
    ) -> None:
        """The request may be invalid. The span is a child of `traceparent`."""
        self._clock = clock
        self._began = clock()
        self._fields: dict[str, object] = {
            "request_id": request.request_id[:_SHOWN_CHARACTERS],
            "tenant": request.tenant[:_SHOWN_CHARACTERS],
            "prompt_tokens": len(request.prompt_token_ids),
        }
        self._token_count = 0
        self._outcome = ""
        self.span = telemetry.start("generate_tokens", traceparent, kind=Kind.SERVER)

    def describe(self, request: TokenRequest) -> None:
        """Set the span's attributes from a valid request."""
        self.span.set(
            outrider__request_id=request.request_id,
            gen_ai__usage__input_tokens=len(request.prompt),
        )
        if request.committed:
            self.span.set(outrider__resumed_tokens=len(request.committed))

    def add(self, chunk: TokenChunk) -> None:
        """Count a chunk's tokens, and keep the outcome and the counts that the last chunk has."""
        self._token_count += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._outcome = chunk.finish_reason.name.lower()
        if chunk.stats is not None:
            self.span.set(
                outrider__accepted_tokens=chunk.stats.accepted_token_count,
                outrider__draft_tokens=chunk.stats.draft_token_count,
            )

    def __enter__(self) -> ServedSequence:
        telemetry.log_request_id(str(self._fields["request_id"]))
        self.span.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        outcome = self._outcome or _outcome(error)
        self.span.set(outrider__outcome=outcome, gen_ai__usage__output_tokens=self._token_count)
        fields = self._fields | {
            "status": outcome,
            "duration_seconds": round(self._clock() - self._began, 6),
            "completion_tokens": self._token_count,
        }
        log.info("sequence", extra={"fields": fields})
        self.span.__exit__(kind, error, trace_back)


def _outcome(error: BaseException | None) -> str:
    """Return how a sequence without a last chunk ended.

    This is an OutriderError's reason, "cancelled", or "internal" for any other exception.
    """
    if isinstance(error, OutriderError):
        return error.reason.name.lower()
    if error is None or isinstance(error, (GeneratorExit, asyncio.CancelledError)):
        return "cancelled"
    return "internal"
