"""Compiled grammars that are remembered, up to a number of bytes; the one that was not asked for the longest goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict

from outrider.grammar.backends import Compiled
from outrider.messages import Grammar

# What Python's own objects around a grammar take, so that very many very small ones are not counted as nothing.
_ENTRY_BYTES = 4096


class GrammarCache:
    """For any thread. `size_bytes` is what the grammars in it take together, at most `capacity_bytes`."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[Grammar, tuple[Compiled, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.size_bytes = 0

    def get(self, grammar: Grammar) -> Compiled | None:
        """Asked for now, so that others go before it."""
        with self._lock:
            if (entry := self._entries.get(grammar)) is None:
                return None
            self._entries.move_to_end(grammar)
            return entry[0]

    def add(self, grammar: Grammar, compiled: Compiled) -> Compiled:
        """Remember what was compiled, unless it is larger than all there is room for; returns it, or what was there already."""
        size = (
            compiled.size_bytes + _ENTRY_BYTES + len(grammar.text) + sum(map(len, grammar.choices))
        )
        with self._lock:
            if (entry := self._entries.get(grammar)) is not None:
                return entry[0]
            if size > self._capacity:
                return compiled
            self._entries[grammar] = compiled, size
            self.size_bytes += size
            while self.size_bytes > self._capacity:
                _, (_, freed) = self._entries.popitem(last=False)
                self.size_bytes -= freed
        return compiled
