"""The keys of n-grams and texts in Redis.

A key is `outrider:{TENANT.BUCKET}` followed by a digest of 16 bytes. Without the digest it is the
key of the bucket's index.

- The digest is a keyed hash of tenant, tokenizer fingerprint and n-gram or text, so nobody can
  compute it without the pool's secret. TENANT is a keyed hash of only the tenant, so that all keys
  of a tenant can be found.
- The hash is keyed BLAKE2b (RFC 7693), a message authentication code like HMAC. In Python it takes
  less than half of HMAC's time.
- The braces are a cluster's hash tag: a bucket, index included, is in one slot. The n-gram's last
  token chooses the bucket. So all n-grams at the end of a text share a slot, and one command looks
  them up. All texts of a tenant and tokenizer have one bucket, so one command lists them.
"""

from __future__ import annotations

import base64
import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import invalid
from outrider.process.files import read_file

BUCKETS = 16
DIGEST_BYTES = 16
_MIN_SECRET_BYTES = 16


def read_secret(path: Path | None) -> bytes:
    """Return the pool's secret, without a line end.

    Raises OutriderError(INVALID_VALUE) if there is none, or if it is too short.
    """
    if path is None:
        message = "must be given with redis: keys in Redis are made with this secret"
        raise invalid("pool-secret-file", message)
    try:
        secret = read_file(path).rstrip(b"\r\n")
    except OSError as cause:
        raise invalid("pool-secret-file", f"{path} cannot be read: {cause.strerror}") from cause
    if len(secret) < _MIN_SECRET_BYTES:
        raise invalid("pool-secret-file", f"{path} must hold at least {_MIN_SECRET_BYTES} bytes")
    return secret


class TenantKeys:
    """Makes the keys of one tenant's n-grams, for one tokenizer."""

    def __init__(self, prefix: bytes, begun: hashlib.blake2b) -> None:
        """`begun` is the keyed hash of everything but the n-gram."""
        self._indexes = tuple(b"%s%d}" % (prefix, bucket) for bucket in range(BUCKETS))
        self._begun = begun

    def index(self, ngram: Sequence[int]) -> bytes:
        """Return the key of the index of the n-gram's bucket. The n-gram's key begins with it."""
        return self._indexes[ngram[-1] % BUCKETS]

    def keys(self, ngrams: Sequence[Sequence[int]]) -> list[bytes]:
        """Return the keys of n-grams that all end in the same token. They share a slot."""
        index = self.index(ngrams[0])
        keys = []
        for ngram in ngrams:
            digest = self._begun.copy()
            digest.update(array("I", ngram).tobytes())
            keys.append(index + digest.digest())
        return keys


class TextKeys:
    """Makes the keys of one tenant's texts, for one tokenizer."""

    def __init__(self, prefix: bytes, begun: hashlib.blake2b) -> None:
        """`begun` is the keyed hash of everything but the text."""
        self.index = b"%s%s}" % (prefix, base64.urlsafe_b64encode(begun.digest()[:9]))
        """The key of the texts' index. A text's own key is this key and the text's digest."""
        self._begun = begun

    def digest(self, text: Sequence[int]) -> bytes:
        """Return the digest of a text. Without the pool's secret nobody can compute it."""
        digest = self._begun.copy()
        digest.update(array("I", text).tobytes())
        return digest.digest()


class PoolKeys:
    """Makes the keys of all tenants.

    With `public`, all tenants share the keys of the public pool.
    """

    def __init__(self, secret: bytes, *, public: bool = False) -> None:
        # BLAKE2b takes keys of at most 64 bytes.
        self._secret = hashlib.sha256(secret).digest()
        self._public = public

    def tenant(self, name: str, fingerprint: str) -> TenantKeys:
        """Return the keys of a tenant's n-grams for the tokenizer with this fingerprint."""
        return TenantKeys(*self._scope(name, fingerprint, b"outrider ngram"))

    def texts(self, name: str, fingerprint: str) -> TextKeys:
        """Return the keys of a tenant's texts for the tokenizer with this fingerprint."""
        return TextKeys(*self._scope(name, fingerprint, b"outrider text"))

    def _scope(self, name: str, fingerprint: str, kind: bytes) -> tuple[bytes, hashlib.blake2b]:
        """Return the beginning of the tenant's keys, and a begun hash for one kind of keys."""
        owner = self._owner(name)
        # The scope has a fixed length, so no part of an n-gram can be taken for a part of the
        # scope.
        scope = hashlib.sha256(b"%d:%s%s" % (len(owner), owner, fingerprint.encode())).digest()
        begun = hashlib.blake2b(scope, digest_size=DIGEST_BYTES, key=self._secret, person=kind)
        return b"outrider:%s" % self._tag(owner), begun

    def pattern(self, name: str) -> bytes:
        """Return the glob for SCAN that matches all keys of a tenant, of every tokenizer."""
        return b"outrider:%s*" % self._tag(self._owner(name))

    def _owner(self, name: str) -> bytes:
        """Return a name for the keys' owner; the public pool's name differs from each tenant's."""
        return b"public" if self._public else b"tenant:" + name.encode()

    def _tag(self, owner: bytes) -> bytes:
        digest = hashlib.blake2b(
            owner, digest_size=9, key=self._secret, person=b"outrider owner"
        ).digest()
        return b"{%s." % base64.urlsafe_b64encode(digest)


def is_index(key: bytes) -> bool:
    """Return whether a key of a pool is a bucket's index."""
    return key.index(b"}") == len(key) - 1
