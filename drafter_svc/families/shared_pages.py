"""Lets the event loop and the model's thread use the KV cache's pages at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock

from outrider.lm.pages import KVSequence, PagePool


class SharedPagePool:
    """A PagePool behind a lock, so that two threads' calls do not overlap.

    A lock is enough: one thread at a time uses a sequence, and calls for other sequences do not
    touch the sequence's pages. The class wraps a PagePool instead of deriving from it, because
    mypyc may have compiled PagePool, and Python code cannot subclass a compiled class.
    """

    def __init__(self, page_count: int, page_size: int) -> None:
        self.page_count = page_count
        self._pool = PagePool(page_count, page_size)
        self._lock = Lock()

    @property
    def free_count(self) -> int:
        """Like PagePool.free_count."""
        with self._lock:
            return self._pool.free_count

    @property
    def used_count(self) -> int:
        """Like PagePool.used_count."""
        with self._lock:
            return self._pool.used_count

    def reserve(self, sequence: KVSequence, length: int) -> bool:
        """Like PagePool.reserve."""
        with self._lock:
            return self._pool.reserve(sequence, length)

    def fork(self, sequence: KVSequence, length: int) -> KVSequence:
        """Like PagePool.fork."""
        with self._lock:
            return self._pool.fork(sequence, length)

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Like PagePool.truncate."""
        with self._lock:
            self._pool.truncate(sequence, length)

    def free(self, sequence: KVSequence) -> None:
        """Like PagePool.free."""
        with self._lock:
            self._pool.free(sequence)

    def match_prefix(self, sequence: KVSequence, token_ids: Sequence[int], salt: str) -> int:
        """Like PagePool.match_prefix."""
        with self._lock:
            return self._pool.match_prefix(sequence, token_ids, salt)

    def cache_pages(self, sequence: KVSequence, token_ids: Sequence[int], salt: str) -> None:
        """Like PagePool.cache_pages."""
        with self._lock:
            self._pool.cache_pages(sequence, token_ids, salt)

    def check_integrity(self, sequences: Iterable[KVSequence] = ()) -> None:
        """Like PagePool.check_integrity."""
        with self._lock:
            self._pool.check_integrity(sequences)
