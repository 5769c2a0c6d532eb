"""Whose request it is. Caches and n-gram pools are private to a tenant, and a tenant is whoever shares an API key."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

_DIGITS = 32


def tenant_of(headers: Mapping[str, str]) -> str:
    """The tenant of a request by its `authorization: Bearer KEY`; empty, the default tenant, without a key.

    The name is a digest of the key, `key-` and the first 32 hex digits of its SHA-256: it tells tenants apart in logs, traces and
    Redis without giving their keys away. Headers are looked up in lower case.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        return ""
    return f"key-{hashlib.sha256(key.strip().encode()).hexdigest()[:_DIGITS]}"
