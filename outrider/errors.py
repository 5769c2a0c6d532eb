"""The table of all errors that a caller can see.

Each error has a reason, a gRPC status, a retry rule, an HTTP status and an OpenAI type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from enum import Enum
from typing import NamedTuple

DOMAIN = "outrider.dev"
# RetryInfo's delay where the server has no estimate.
_RETRY_S = 1.0


class Retry(Enum):
    """Whether and when to retry; protos/outrider/v1/errors.proto tells clients what to do."""

    NEVER = "never"
    RETRY_INFO = "RetryInfo"
    BACKOFF = "backoff"


class Kind(NamedTuple):
    """The form of one reason in each protocol. `status` is the name of a gRPC status code."""

    status: str
    retry: Retry
    http: int
    openai_type: str


class Reason(Enum):
    """The names of outrider.v1.ErrorReason without their prefix.

    In lower case, a name is the `code` of the error in OpenAI's API.
    """

    INVALID_VALUE = "INVALID_ARGUMENT", Retry.NEVER, 400, "invalid_request_error"
    UNKNOWN_PARAMETER = "INVALID_ARGUMENT", Retry.NEVER, 400, "invalid_request_error"
    UNSUPPORTED_PARAMETER = "INVALID_ARGUMENT", Retry.NEVER, 400, "invalid_request_error"
    MALFORMED_REQUEST = "INVALID_ARGUMENT", Retry.NEVER, 400, "invalid_request_error"
    CONTEXT_LENGTH_EXCEEDED = "INVALID_ARGUMENT", Retry.NEVER, 400, "invalid_request_error"
    MODEL_NOT_FOUND = "NOT_FOUND", Retry.NEVER, 404, "invalid_request_error"
    DRAFTER_NOT_FOUND = "NOT_FOUND", Retry.NEVER, 404, "invalid_request_error"
    HOST_NOT_ALLOWED = "PERMISSION_DENIED", Retry.NEVER, 403, "invalid_request_error"
    ORIGIN_NOT_ALLOWED = "PERMISSION_DENIED", Retry.NEVER, 403, "invalid_request_error"
    INVALID_API_KEY = "UNAUTHENTICATED", Retry.NEVER, 401, "invalid_request_error"
    INSUFFICIENT_PERMISSIONS = "PERMISSION_DENIED", Retry.NEVER, 403, "invalid_request_error"
    CERTIFICATE_NOT_ALLOWED = "PERMISSION_DENIED", Retry.NEVER, 403, "invalid_request_error"
    ROUTE_NOT_FOUND = "UNIMPLEMENTED", Retry.NEVER, 404, "invalid_request_error"
    METHOD_NOT_ALLOWED = "UNIMPLEMENTED", Retry.NEVER, 405, "invalid_request_error"
    REQUEST_TIMEOUT = "DEADLINE_EXCEEDED", Retry.BACKOFF, 408, "invalid_request_error"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED", Retry.BACKOFF, 504, "timeout_error"
    REQUEST_TOO_LARGE = "RESOURCE_EXHAUSTED", Retry.NEVER, 413, "invalid_request_error"
    HEADERS_TOO_LARGE = "INVALID_ARGUMENT", Retry.NEVER, 431, "invalid_request_error"
    UNSUPPORTED_ENCODING = "INVALID_ARGUMENT", Retry.NEVER, 415, "invalid_request_error"
    TOKENIZER_MISMATCH = "FAILED_PRECONDITION", Retry.NEVER, 400, "invalid_request_error"
    DRAFTER_ID_TAKEN = "ALREADY_EXISTS", Retry.BACKOFF, 409, "invalid_request_error"
    PROTOCOL_VIOLATION = "INVALID_ARGUMENT", Retry.BACKOFF, 400, "invalid_request_error"
    QUARANTINED = "RESOURCE_EXHAUSTED", Retry.RETRY_INFO, 429, "rate_limit_error"
    SLOW_READER = "RESOURCE_EXHAUSTED", Retry.BACKOFF, 429, "rate_limit_error"
    OVERLOADED = "RESOURCE_EXHAUSTED", Retry.RETRY_INFO, 429, "rate_limit_error"
    RATE_LIMIT_EXCEEDED = "RESOURCE_EXHAUSTED", Retry.RETRY_INFO, 429, "rate_limit_error"
    CLIENT_GONE = "CANCELLED", Retry.NEVER, 499, "invalid_request_error"
    NOT_READY = "UNAVAILABLE", Retry.RETRY_INFO, 503, "service_unavailable_error"
    DRAINING = "UNAVAILABLE", Retry.RETRY_INFO, 503, "service_unavailable_error"
    VERIFIER_UNAVAILABLE = "UNAVAILABLE", Retry.BACKOFF, 503, "service_unavailable_error"
    MODEL_CHANGED = "ABORTED", Retry.BACKOFF, 503, "service_unavailable_error"
    LOGITS_NOT_FINITE = "INTERNAL", Retry.NEVER, 500, "internal_server_error"
    INTERNAL = "INTERNAL", Retry.BACKOFF, 500, "internal_server_error"

    # Two reasons may have equal columns. Without distinct values, Enum would make them aliases.
    def __new__(cls, status: str, retry: Retry, http: int, openai_type: str) -> Reason:
        member = object.__new__(cls)
        member._value_ = len(cls.__members__)
        member.kind = Kind(status, retry, http, openai_type)
        return member

    kind: Kind


@dataclass
class OutriderError(Exception):
    """An error that names its reason and how to avoid it.

    `message` names the field and the limit, where there are any. `field` is the path of the
    parameter at fault, or None. `retry_after_s` is the time to wait before a retry, where the
    server knows it; it is always set where the reason's rule is RETRY_INFO. `retry` is the reason's
    rule; if a peer of a later version sent a reason that this version does not know, it is the rule
    that came with the reason.
    """

    reason: Reason
    message: str
    field: str | None = None
    retry_after_s: float | None = None
    metadata: dict[str, str] = dataclass_field(default_factory=dict)
    retry: Retry = dataclass_field(init=False)

    def __post_init__(self) -> None:
        self.retry = self.reason.kind.retry
        if self.retry_after_s is None and self.reason.kind.retry is Retry.RETRY_INFO:
            self.retry_after_s = _RETRY_S

    def __str__(self) -> str:
        return self.message

    def within(self, path: str) -> OutriderError:
        """Return this error for an outer message that has the faulty message at `path`.

        The path is put before the field, and before the error's message, which begins with the
        field.
        """
        return replace(self, message=f"{path}.{self.message}", field=f"{path}.{self.field}")


def invalid(field_name: str, message: str) -> OutriderError:
    """Return an INVALID_VALUE error for this field; `message` says which values are valid."""
    return OutriderError(Reason.INVALID_VALUE, f"{field_name} {message}", field_name)
