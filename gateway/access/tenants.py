"""Tell tenants apart by their API key. Caches and n-gram pools are private to a tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

_DIGITS = 32


def tenant_of(headers: Mapping[str, str]) -> str:
    """The tenant of a request with `authorization: Bearer KEY`; empty (the default) without a key.

    The name is `key-` and the first 32 hex digits of the key's SHA-256, so logs, traces and Redis
    do not reveal keys. `headers` have lower-case names.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        return ""
    return f"key-{hashlib.sha256(key.strip().encode()).hexdigest()[:_DIGITS]}"
