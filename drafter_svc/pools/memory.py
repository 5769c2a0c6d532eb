"""n-grams of texts in this process, with the semantics and option names of TensorRT-LLM's n-gram speculation.

A pool maps an n-gram to the places where it occurred; what follows there is the guess. A text is referred to, not copied, so a
continuation grows as its text does.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

# Of an n-gram's occurrences no more are kept: a lookup takes the newest or the oldest, and passes over short ones.
_KEPT = 16


_Place = tuple[list[int], int]
"""A text, and where in it an n-gram ended."""


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """`max_draft_len` tokens are guessed at once after a suffix of at most `max_matching_ngram_size` tokens.

    `is_keep_all` keeps several continuations of an n-gram, else only the newest; `is_use_oldest` prefers the oldest kept.
    """

    max_draft_len: int = 8
    max_matching_ngram_size: int = 3
    is_keep_all: bool = True
    is_use_oldest: bool = False


class MemoryPool:
    """n-grams of any number of texts, at most `max_entries` of them; the least recently used are forgotten first."""

    def __init__(self, options: NgramOptions, max_entries: int) -> None:
        self._options = options
        self._max_entries = max_entries
        # Most n-grams occur once, and a deque takes five times the room of what it would hold then.
        self._places: OrderedDict[tuple[int, ...], _Place | deque[_Place]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def index(self, text: list[int], start: int) -> None:
        """Take in the tokens of `text` from `start` on; `text` may grow later, but must not change otherwise."""
        sizes = range(1, self._options.max_matching_ngram_size + 1)
        for end in range(max(start, 1), len(text)):
            for size in sizes:
                if size > end:
                    break
                self._add(tuple(text[end - size : end]), text, end)
        while len(self._places) > self._max_entries:
            self._places.popitem(last=False)

    def _add(self, ngram: tuple[int, ...], text: list[int], end: int) -> None:
        places = self._places.get(ngram)
        if places is None:
            self._places[ngram] = (text, end)
            return
        self._places.move_to_end(ngram)
        if isinstance(places, tuple):
            places = self._places[ngram] = deque(
                [places], maxlen=_KEPT if self._options.is_keep_all else 1
            )
        # The oldest are kept when the oldest are wanted.
        if not (self._options.is_use_oldest and self._options.is_keep_all and len(places) == _KEPT):
            places.append((text, end))

    def continuation(self, context: Sequence[int], length: int) -> list[int]:
        """What followed the longest known suffix of `context`, at most `length` and `max_draft_len` tokens; empty when unknown."""
        length = min(length, self._options.max_draft_len)
        for size in range(min(self._options.max_matching_ngram_size, len(context)), 0, -1):
            if places := self._places_of(context[-size:]):
                return self._pick(places, length)
        return []

    def alternatives(
        self, context: Sequence[int], length: int, known: set[int], count: int
    ) -> list[list[int]]:
        """Up to `count` other continuations of `context`, none beginning with a token of `known` nor two with the same.

        Those of longer suffixes come first, then the newer ones.
        """
        length = min(length, self._options.max_draft_len)
        found: list[list[int]] = []
        seen = set(known)
        for size in range(min(self._options.max_matching_ngram_size, len(context)), 0, -1):
            for text, end in reversed(self._places_of(context[-size:])):
                run = text[end : end + length]
                if len(found) < count and run and run[0] not in seen:
                    seen.add(run[0])
                    found.append(run)
        return found

    def _places_of(self, ngram: Sequence[int]) -> Sequence[_Place]:
        places = self._places.get(tuple(ngram))
        if places is None:
            return ()
        return (places,) if isinstance(places, tuple) else places

    def _pick(self, places: Sequence[_Place], length: int) -> list[int]:
        """The preferred place's tokens; one that ends early gives way to one that does not."""
        best: list[int] = []
        for text, end in places if self._options.is_use_oldest else reversed(places):
            found = text[end : end + length]
            if len(found) > len(best):
                best = found
            if len(best) == length:
                break
        return best
