"""A cache that holds compiled grammars up to a size in bytes.

The cache evicts the least recently used grammars first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from outrider.grammar.backends import Compiled
from outrider.grammar.kinds import Grammar

# The size of the Python objects around a grammar. It is counted too, because there may be many
# small grammars.
_ENTRY_BYTES = 4096


class GrammarCache:
    """A thread-safe cache.

    `size_bytes` is the size of all its grammars, at most `capacity_bytes`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[Grammar, tuple[Compiled, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.size_bytes = 0

    def get(self, grammar: Grammar) -> Compiled | None:
        """Return the cached grammar and mark it as just used; None if it is not cached."""
        with self._lock:
            entry = self._entries.get(grammar)
            if entry is None:
                return None
            self._entries.move_to_end(grammar)
            return entry[0]

    def add(self, grammar: Grammar, compiled: Compiled) -> Compiled:
        """Cache a compiled grammar unless it exceeds the whole capacity.

        Returns this grammar, or the equal grammar that another thread has cached before.
        """
        source_size = len(grammar.text) + sum(map(len, grammar.choices))
        size = compiled.size_bytes + _ENTRY_BYTES + source_size
        with self._lock:
            entry = self._entries.get(grammar)
            if entry is not None:
                return entry[0]
            if size > self._capacity:
                return compiled
            self._entries[grammar] = compiled, size
            self.size_bytes += size
            while self.size_bytes > self._capacity:
                _, (_, freed) = self._entries.popitem(last=False)
                self.size_bytes -= freed
        return compiled
