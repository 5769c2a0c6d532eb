"""How long a caller waits for its answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.protocol.errors import invalid

LEAST_TIMEOUT_S = 1
"""The least `timeout` of a body. A caller with less patience can hang up."""
# OpenAI's clients say here when they give up: in Python, and in all other languages.
_CLIENT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a caller waits for the whole answer, and for its first token."""

    total_s: float | None = None
    first_s: float | None = None

    def ends_at(self, now: float) -> float:
        """When the caller waits no longer; infinity if it says nothing."""
        return math.inf if self.total_s is None else now + self.total_s

    def suffices(self, wait_s: float, answer_s: float) -> bool:
        """Whether it waits `wait_s` for its turn, and then `answer_s` for the answer."""
        if self.first_s is not None and wait_s > self.first_s:
            return False
        return self.total_s is None or wait_s + answer_s <= self.total_s


def http_patience(
    timeout: float | None, headers: Mapping[str, str], *, stream: bool | None
) -> Patience:
    """The patience of a request with this `timeout` in its body and these headers.

    OpenAI's clients wait for the first byte as long as their header says. Without `stream`, that is
    the whole answer. Raises OutriderError(INVALID_VALUE) for a timeout below LEAST_TIMEOUT_S.
    """
    if timeout is not None and not timeout >= LEAST_TIMEOUT_S:
        raise invalid("timeout", f"must be at least {LEAST_TIMEOUT_S} (seconds), not {timeout}")
    named = [_seconds(headers[name]) for name in _CLIENT_HEADERS if name in headers]
    client_s = min([seconds for seconds in named if seconds is not None], default=None)
    if stream:
        return Patience(timeout, client_s)
    both = [seconds for seconds in (timeout, client_s) if seconds is not None]
    return Patience(min(both, default=None))


def _seconds(text: str) -> float | None:
    """A header's positive number; None for anything else, since it is the client's own note."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None
