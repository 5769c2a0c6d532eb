"""Every error a caller can see: one table of (reason, gRPC status, HTTP status, OpenAI type)."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as dataclass_field
from enum import Enum
from typing import NamedTuple

DOMAIN = "outrider"


class Kind(NamedTuple):
    """How one reason looks on each protocol. `status` is the name of a gRPC status code."""

    status: str
    http: int
    openai_type: str


class Reason(Enum):
    """What went wrong, as google.rpc.ErrorInfo.reason and as OpenAI's `code` (in lower case)."""

    INVALID_VALUE = Kind("INVALID_ARGUMENT", 400, "invalid_request_error")
    UNKNOWN_PARAMETER = Kind("INVALID_ARGUMENT", 400, "invalid_request_error")
    UNSUPPORTED_PARAMETER = Kind("INVALID_ARGUMENT", 400, "invalid_request_error")
    MALFORMED_REQUEST = Kind("INVALID_ARGUMENT", 400, "invalid_request_error")
    CONTEXT_LENGTH_EXCEEDED = Kind("INVALID_ARGUMENT", 400, "invalid_request_error")
    MODEL_NOT_FOUND = Kind("NOT_FOUND", 404, "invalid_request_error")
    DRAFTER_NOT_FOUND = Kind("NOT_FOUND", 404, "invalid_request_error")
    HOST_NOT_ALLOWED = Kind("PERMISSION_DENIED", 403, "invalid_request_error")
    ORIGIN_NOT_ALLOWED = Kind("PERMISSION_DENIED", 403, "invalid_request_error")
    ROUTE_NOT_FOUND = Kind("UNIMPLEMENTED", 404, "invalid_request_error")
    METHOD_NOT_ALLOWED = Kind("UNIMPLEMENTED", 405, "invalid_request_error")
    REQUEST_TIMEOUT = Kind("DEADLINE_EXCEEDED", 408, "invalid_request_error")
    REQUEST_TOO_LARGE = Kind("INVALID_ARGUMENT", 413, "invalid_request_error")
    HEADERS_TOO_LARGE = Kind("INVALID_ARGUMENT", 431, "invalid_request_error")
    TOKENIZER_MISMATCH = Kind("FAILED_PRECONDITION", 400, "invalid_request_error")
    DRAFTER_ID_TAKEN = Kind("ALREADY_EXISTS", 409, "invalid_request_error")
    PROTOCOL_VIOLATION = Kind("INVALID_ARGUMENT", 400, "invalid_request_error")
    QUARANTINED = Kind("RESOURCE_EXHAUSTED", 429, "rate_limit_error")
    SLOW_READER = Kind("RESOURCE_EXHAUSTED", 429, "rate_limit_error")
    OVERLOADED = Kind("RESOURCE_EXHAUSTED", 429, "rate_limit_error")
    CLIENT_GONE = Kind("CANCELLED", 499, "invalid_request_error")
    NOT_READY = Kind("UNAVAILABLE", 503, "service_unavailable_error")
    DRAINING = Kind("UNAVAILABLE", 503, "service_unavailable_error")
    VERIFIER_UNAVAILABLE = Kind("UNAVAILABLE", 503, "service_unavailable_error")
    LOGITS_NOT_FINITE = Kind("INTERNAL", 500, "internal_server_error")
    INTERNAL = Kind("INTERNAL", 500, "internal_server_error")

    # Two reasons may look alike on the wire; without this, Enum would make them one.
    def __new__(cls, status: str, http: int, openai_type: str) -> Reason:
        member = object.__new__(cls)
        member._value_ = len(cls.__members__)
        member.kind = Kind(status, http, openai_type)
        return member

    kind: Kind


@dataclass
class OutriderError(Exception):
    """An error with a reason a person can act on.

    `message` names the field and the limit; `field` is the parameter's path, when one is at fault; `retry_after_s` says when to
    come back, when that helps.
    """

    reason: Reason
    message: str
    field: str | None = None
    retry_after_s: float | None = None
    metadata: dict[str, str] = dataclass_field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def invalid(field_name: str, message: str) -> OutriderError:
    """INVALID_VALUE for the field at fault; the message should say what it takes."""
    return OutriderError(Reason.INVALID_VALUE, f"{field_name} {message}", field_name)
