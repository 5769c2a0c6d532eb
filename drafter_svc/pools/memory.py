"""An n-gram pool in this process, with the options of TensorRT-LLM's n-gram speculation.

A pool maps an n-gram to the places where it occurred. The guess is the tokens that follow at such a
place. A pool refers to a text and does not copy the text, so the tokens that a place offers grow
with the text. The event loop makes all calls.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

# The number of occurrences that are kept for each n-gram. A lookup takes the newest occurrence; it
# takes an older one only if too few tokens follow the newest.
_MAX_OCCURRENCES = 16
# If less probability than this is left for the shorter suffixes, they are ignored.
_LEAST_SHARE = 0.1

_Occurrence = tuple[list[int], int]
"""A sequence's tokens, and the position after an n-gram in them."""


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """The options for keeping and finding n-grams."""

    max_draft_len: int = 8
    """The maximum number of tokens of a guess."""
    max_matching_ngram_size: int = 3
    """The number of tokens of the longest n-gram."""


@dataclass(slots=True)
class Continuation:
    """Tokens that followed a context, each with its probability by the pool's counts.

    The first token's probability is conditional on the context. Each further token's probability is
    conditional on the token before it.
    """

    tokens: list[int]
    confidences: list[float]


class MemoryPool:
    """A pool of at most `max_entries` n-grams, taken from any number of texts.

    The least recently used n-grams are dropped first.
    """

    def __init__(self, options: NgramOptions, max_entries: int) -> None:
        self._options = options
        self._max_entries = max_entries
        # Most n-grams occur once. A deque of one occurrence takes five times the memory of the
        # occurrence itself.
        self._occurrences: OrderedDict[tuple[int, ...], _Occurrence | deque[_Occurrence]]
        self._occurrences = OrderedDict()

    def __len__(self) -> int:
        return len(self._occurrences)

    def index(self, text: list[int], start: int) -> None:
        """Add the tokens of `text` from `start` on. After this, `text` may only grow, in place."""
        sizes = range(1, self._options.max_matching_ngram_size + 1)
        for end in range(max(start, 1), len(text)):
            for size in sizes:
                if size > end:
                    break
                self._add(tuple(text[end - size : end]), text, end)
        while len(self._occurrences) > self._max_entries:
            self._occurrences.popitem(last=False)

    def _add(self, ngram: tuple[int, ...], text: list[int], end: int) -> None:
        found = self._occurrences.get(ngram)
        if found is None:
            self._occurrences[ngram] = (text, end)
            return
        self._occurrences.move_to_end(ngram)
        if isinstance(found, tuple):
            # A full deque drops its oldest occurrence.
            found = self._occurrences[ngram] = deque([found], _MAX_OCCURRENCES)
        found.append((text, end))

    def continuation(self, context: Sequence[int], length: int) -> list[int]:
        """Return the tokens that followed the longest known suffix of `context`.

        The result is empty if no suffix is known. The result has at most `length` tokens, and at
        most `max_draft_len`.
        """
        length = min(length, self._options.max_draft_len)
        for size in range(min(self._options.max_matching_ngram_size, len(context)), 0, -1):
            if found := self._find(context[-size:]):
                return self._pick(found, length)
        return []

    def alternatives(
        self, context: Sequence[int], length: int, known: set[int], count: int
    ) -> list[list[int]]:
        """Return up to `count` continuations of `context` that begin with different tokens.

        No continuation begins with a token of `known`, and each has at most `length` tokens.
        Continuations of longer suffixes come first; for one suffix, newer continuations come first.
        """
        length = min(length, self._options.max_draft_len)
        found: list[list[int]] = []
        seen = set(known)
        for size in range(min(self._options.max_matching_ngram_size, len(context)), 0, -1):
            for text, end in reversed(self._find(context[-size:])):
                run = text[end : end + length]
                if len(found) < count and run and run[0] not in seen:
                    seen.add(run[0])
                    found.append(run)
        return found

    def shares(
        self, context: Sequence[int], length: int, chosen: int
    ) -> tuple[float, list[Continuation]]:
        """Return the probability of the token `chosen` after `context`, and other continuations.

        The others begin with different tokens and have at most `length` tokens. Probabilities come
        from PPM's method A (Cleary and Witten, "Data Compression Using Adaptive Coding and Partial
        String Matching", 1984): a token that followed c of n occurrences of the longest suffix has
        the probability c / (n + 1). The remaining 1 / (n + 1) is divided in the same way among the
        tokens that followed only shorter suffixes. A token that the pool lacks has probability 0.
        """
        length = min(length, self._options.max_draft_len)
        share = 0.0
        others: list[Continuation] = []
        seen: set[int] = set()
        left = 1.0
        for size in range(min(self._options.max_matching_ngram_size, len(context)), 0, -1):
            runs: dict[int, list[_Occurrence]] = {}
            for place in reversed(self._find(context[-size:])):
                token = place[0][place[1]]
                if token not in seen:
                    runs.setdefault(token, []).append(place)
            if not runs:
                continue
            each = left / (1 + sum([len(places) for places in runs.values()]))
            for token, places in runs.items():
                if token == chosen:
                    share = each * len(places)
                else:
                    text, end = places[0]
                    tokens = text[end : end + length]
                    # The probabilities treat the newest occurrence's tokens as if they had followed
                    # all places.
                    further = len(places) / (len(places) + 1)
                    confidences = [each * len(places), *[further] * (len(tokens) - 1)]
                    others.append(Continuation(tokens, confidences))
            seen.update(runs)
            left = each
            if left < _LEAST_SHARE:
                break
        return share, others

    def _find(self, ngram: Sequence[int]) -> Sequence[_Occurrence]:
        """Return the kept occurrences of an n-gram, the oldest first."""
        found = self._occurrences.get(tuple(ngram))
        if found is None:
            return ()
        return (found,) if isinstance(found, tuple) else found

    def _pick(self, occurrences: Sequence[_Occurrence], length: int) -> list[int]:
        """Return `length` tokens after the newest occurrence that `length` tokens follow.

        If there is no such occurrence, return all tokens after the occurrence that is followed by
        the most tokens.
        """
        best: list[int] = []
        for text, end in reversed(occurrences):
            continuation = text[end : end + length]
            if len(continuation) > len(best):
                best = continuation
            if len(best) == length:
                break
        return best
