"""Why a verifier cannot take requests: in detail for operators, and what callers hear of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.process.tls import Tls, explain
from outrider.protocol.errors import OutriderError, Reason

_SHOWN_CHARACTERS = 400
_SAID = {
    Reason.NOT_READY: "no verifier is ready",
    Reason.DRAINING: "the verifier is about to stop",
    Reason.VERIFIER_UNAVAILABLE: "the verifier does not answer",
    Reason.MODEL_CHANGED: "the verifier's model has changed",
}


def for_callers(problem: OutriderError) -> OutriderError:
    """A new error of the same reason, without addresses, files and causes.

    Any tenant may see it. The log and /readyz have the rest.
    """
    message = f"{_SAID[problem.reason]}; operators see why at /readyz"
    return OutriderError(problem.reason, message, retry_after_s=problem.retry_after_s)


def unanswered(address: str, error: OutriderError, tls: Tls | None) -> OutriderError:
    """The problem of a verifier whose call or connection failed with `error`."""
    message = f"verifier {address} does not answer: {explain(error.message, tls)}"
    return OutriderError(Reason.VERIFIER_UNAVAILABLE, message, retry_after_s=1.0)


def unreadable(address: str, cause: Exception) -> OutriderError:
    """The problem of a verifier whose answer cannot be read."""
    reason = f"{type(cause).__name__}: {cause}"
    message = f"verifier {address} gives an answer that cannot be read: {reason}"
    message = message[:_SHOWN_CHARACTERS]
    return OutriderError(Reason.VERIFIER_UNAVAILABLE, message, retry_after_s=1.0)


def explain_differing(model: str, groups: Mapping[str, Sequence[str]]) -> str:
    """The problem of a model whose replicas, grouped by fingerprint, write different texts."""
    shown = "; ".join(", ".join(sorted(addresses)) for addresses in groups.values())
    cause = "other weights, dtype, version or acceptance settings"
    return f"verifiers of {model} have {cause}: {shown}; none continues the others' answers"
