"""Gives each request an id, by which it is found in answers, logs and traces."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

HEADER = "x-request-id"
"""The name of the HTTP header, and of the gRPC metadata."""
_OWN = re.compile(r"[!-~]{1,96}")


def request_id(headers: Mapping[str, str], prefix: str) -> str:
    """Return the caller's own id, or a new id that begins with the prefix.

    The caller's id is the header `x-request-id`, of 1 to 96 visible ASCII characters. Any other
    value is ignored. The names in `headers` are in lower case, or `headers` finds names in any
    case.
    """
    own = headers.get(HEADER, "")
    return own if _OWN.fullmatch(own) else f"{prefix}-{secrets.token_hex(16)}"
