"""Limits how many sequences each API key runs at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.access.key_file import KeyEntry
from outrider.errors import OutriderError, Reason, invalid

_RETRY_S = 1.0


class KeySlots:
    """Counts the sequences that each key has under way at this gateway."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        """The number of sequences under way of each key, keyed by the key's id."""

    @contextmanager
    def held(self, key: KeyEntry | None, count: int) -> Iterator[None]:
        """Count a request's sequences during the block; without a key there is no limit.

        Raises OutriderError: INVALID_VALUE if the key may never run `count` sequences at once,
        RATE_LIMIT_EXCEEDED if too many are under way already.
        """
        if key is None:
            yield
            return
        self._check(key, count)
        self.taken[key.id] += count
        try:
            yield
        finally:
            self.taken[key.id] -= count
            if self.taken[key.id] == 0:
                del self.taken[key.id]

    def _check(self, key: KeyEntry, count: int) -> None:
        most = key.concurrent_sequences
        running = self.taken[key.id]
        if most is None or running + count <= most:
            return
        if count > most:
            problem = f"asks for {count} sequences, but the API key may run {most} at once"
            raise invalid("n", problem)
        message = f"the API key may run {most} sequences at once, and {running} are running"
        raise OutriderError(Reason.RATE_LIMIT_EXCEEDED, message, retry_after_s=_RETRY_S)
