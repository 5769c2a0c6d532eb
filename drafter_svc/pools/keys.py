"""How n-grams are named in Redis: nameless without the pool's secret, apart by tenant, and spread over a cluster's slots.

A key is `outrider:NAMESPACE:{TENANT.BUCKET}` and a digest of 16 bytes; without the digest it names the bucket's index. The digest
is a keyed hash of tenant, tokenizer fingerprint and n-gram; TENANT is one of the tenant alone, so that its keys can be found again.
The hash is keyed BLAKE2b (RFC 7693), a message authentication code as HMAC is, at less than half the time from Python. A bucket is
chosen by the n-gram's last token, which all n-grams that end a text have in common: they share a slot, and their index is in it.
"""

from __future__ import annotations

import base64
import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import invalid

BUCKETS = 16
DIGEST_BYTES = 16
_MIN_SECRET_BYTES = 16


def read_secret(path: Path | None) -> bytes:
    """The pool's secret, without the end of the line; raises OutriderError(INVALID_VALUE)."""
    if path is None:
        raise invalid(
            "pool-secret-file",
            "must be given with redis: n-grams are kept there under keys made with this secret",
        )
    try:
        secret = path.read_bytes().rstrip(b"\r\n")
    except OSError as cause:
        raise invalid("pool-secret-file", f"{path} cannot be read: {cause.strerror}") from cause
    if len(secret) < _MIN_SECRET_BYTES:
        raise invalid("pool-secret-file", f"{path} must hold at least {_MIN_SECRET_BYTES} bytes")
    return secret


class TenantKeys:
    """Keys of one tenant's n-grams of one tokenizer, in one namespace. `begun` is the hash of all but the n-gram."""

    def __init__(self, prefix: bytes, begun: hashlib.blake2b) -> None:
        self._indexes = tuple(b"%s%d}" % (prefix, bucket) for bucket in range(BUCKETS))
        self._begun = begun

    def index(self, ngram: Sequence[int]) -> bytes:
        """The key of the index that the n-gram belongs in, which is also how its own key begins."""
        return self._indexes[ngram[-1] % BUCKETS]

    def keys(self, ngrams: Sequence[Sequence[int]]) -> list[bytes]:
        """The keys of n-grams that end in the same token, which share a slot."""
        index, keys = self.index(ngrams[0]), []
        for ngram in ngrams:
            digest = self._begun.copy()
            digest.update(array("I", ngram).tobytes())
            keys.append(index + digest.digest())
        return keys


class PoolKeys:
    """Keys of every tenant; with `public`, all tenants are one, which no tenant's name is."""

    def __init__(self, secret: bytes, namespace: str = "default", *, public: bool = False) -> None:
        # BLAKE2b takes keys of at most 64 bytes.
        self._secret = hashlib.sha256(secret).digest()
        self._namespace = namespace.encode()
        self._public = public

    def tenant(self, name: str, fingerprint: str) -> TenantKeys:
        """The tenant's keys under a tokenizer's fingerprint."""
        owner = self._owner(name)
        # Of fixed length, so that no n-gram can be taken for a part of it.
        scope = hashlib.sha256(b"%d:%s%s" % (len(owner), owner, fingerprint.encode())).digest()
        begun = hashlib.blake2b(
            scope, digest_size=DIGEST_BYTES, key=self._secret, person=b"outrider ngram"
        )
        return TenantKeys(b"outrider:%s:%s" % (self._namespace, self._tag(owner)), begun)

    def pattern(self, name: str) -> bytes:
        """What SCAN is to match to find all of the tenant's keys, of every namespace and tokenizer."""
        return b"outrider:*:%s*" % self._tag(self._owner(name))

    def _owner(self, name: str) -> bytes:
        return b"public" if self._public else b"tenant:" + name.encode()

    def _tag(self, owner: bytes) -> bytes:
        digest = hashlib.blake2b(
            owner, digest_size=9, key=self._secret, person=b"outrider owner"
        ).digest()
        return b"{%s." % base64.urlsafe_b64encode(digest)


def is_index(key: bytes) -> bool:
    """Whether a key of a pool is a bucket's index."""
    return key.index(b"}") == len(key) - 1
