"""Finds the text that a grammar forces, in the tokens in which a model would write it.

This module works with grammars, layouts and tokens, not with sequences or streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from drafter_svc.families.json_whitespace import WHITESPACE, Layout, Place
from outrider.grammar.backends import MaskLimit, TextMatcher

# The maximum number of continuations to guess at one place, such as the values of an enum or the
# names of tools.
_MOST_CHOICES = 8
# There are more than `_MOST_CHOICES` of these bytes. If each of them may follow, the text can go on
# in too many ways, and no mask is computed, because masks of free text take longest.
_PROBES = b"abcdefghi"
# The maximum numbers of paths, and of masks that are computed to find them.
_MOST_PATHS = 8
_MOST_STEPS = 48
# A path less probable than this is not followed.
_LEAST_CHANCE = 0.1


@dataclass(eq=False, slots=True)
class Path:
    """A text that may follow the committed text.

    `chances` has the probability of the byte at each offset where the grammar left a choice. `ends`
    says that the text ends after the path. `is_cut` says that the path has its maximum length, so
    the grammar may force more text after it. If neither is true, the grammar leaves open what
    follows, and the path's last token may become a longer token.
    """

    matcher: TextMatcher
    text: bytes = b""
    chances: tuple[tuple[int, float], ...] = ()
    chance: float = 1.0
    ends: bool = False
    is_cut: bool = False

    def chance_within(self, begin: int, end: int) -> float:
        """Return the probability of the bytes from `begin` to `end`, given all earlier bytes."""
        return math.prod([chance for at, chance in self.chances if begin <= at < end])

    def forked(self, more: bytes, chance: float) -> Path | None:
        """Return the path continued with `more`; None if the grammar forbids that."""
        matcher = self.matcher.fork()
        if not matcher.accept_bytes(more):
            return None
        chances = (*self.chances, (len(self.text), chance))
        return Path(matcher, self.text + more, chances, self.chance * chance)

    def ended(self, chance: float) -> Path:
        """Return the path followed by the end of the text."""
        chances = (*self.chances, (len(self.text), chance))
        total = self.chance * chance
        return Path(self.matcher, self.text, chances, total, ends=True)


class ForcedText:
    """Finds text that must follow, and text that may follow where there are few ways to go on.

    `stop_token_ids` end a text. A mask has `mask_width` int32 numbers.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], stop_token_ids: Iterable[int], mask_width: int
    ) -> None:
        ids = {text: token for token, text in enumerate(token_bytes) if len(text) == 1}
        self._probes = [ids[bytes([byte])] for byte in _PROBES if bytes([byte]) in ids]
        self._bytes = np.array([text[0] for text in ids], np.uint8)
        self._ids = np.array([*ids.values(), *stop_token_ids], np.int64)
        self._mask = np.zeros((1, mask_width), np.int32)

    def paths(self, matcher: TextMatcher, layout: Layout, most_bytes: int) -> list[Path]:
        """Return texts that may follow, of up to about `most_bytes` bytes, likeliest first."""
        waiting = [Path(matcher)]
        found: list[Path] = []
        for _ in range(_MOST_STEPS):
            if not waiting:
                break
            path = waiting.pop(0)
            more = [] if path.ends else self._grow(path, layout, most_bytes)
            more = [other for other in more if other.chance >= _LEAST_CHANCE]
            if not more:
                found.append(path)
            waiting = sorted([*waiting, *more], key=lambda other: -other.chance)
            del waiting[_MOST_PATHS - len(found) :]
        return sorted([*found, *waiting], key=lambda path: -path.chance)

    def _grow(self, path: Path, layout: Layout, most_bytes: int) -> list[Path]:
        """Extend `path` itself by the text that must follow it.

        If the grammar then leaves a few ways to go on, return a longer path for each.
        """
        forced = path.matcher.jump_forward()[: max(0, most_bytes - len(path.text))]
        if forced:
            path.matcher = path.matcher.fork()
            if not path.matcher.accept_bytes(forced):
                return []
            path.text += forced
        if len(path.text) >= most_bytes:
            path.is_cut = True
            return []
        if self._is_free(path.matcher):
            return []
        following, may_end = self._allowed(path.matcher)
        solid = [byte for byte in following if byte not in WHITESPACE]
        count = len(solid) + may_end
        if not 0 < count <= _MOST_CHOICES:
            return []
        found = [path.ended(1 / count)] if may_end else []
        place = Place.after(layout.text + path.text)
        for byte in solid:
            whitespace = [(b"", 1.0)]
            if len(solid) < len(following) or place.whitespace:
                whitespace = layout.guesses(place, byte)[: 1 if count > 1 else None]
            more = [
                path.forked(text + bytes([byte]), chance / count) for text, chance in whitespace
            ]
            found += [other for other in more if other is not None]
        return found

    def _is_free(self, matcher: TextMatcher) -> bool:
        """Return whether there are too many ways to go on, judged by `_PROBES` without a mask."""
        for token in self._probes:
            if not matcher.accept(token):
                return False
            matcher.rollback(1)
        return len(self._probes) > _MOST_CHOICES

    def _allowed(self, matcher: TextMatcher) -> tuple[bytes, bool]:
        """Return the bytes that may follow, and whether the text may end.

        The mask bits of tokens of one byte show which bytes may follow. A byte that is not a token
        counts as forbidden.
        """
        self._mask[0] = 0
        with suppress(MaskLimit):
            matcher.fill(self._mask, 0)
        bits = (self._mask[0][self._ids // 32] >> self._ids % 32 & 1).astype(bool)
        count = len(self._bytes)
        return self._bytes[bits[:count]].tobytes(), bool(bits[count:].any())


class Speller:
    """Writes texts in tokens as a model would."""

    def __init__(self, tokenizer: Tokenizer, token_bytes: Sequence[bytes]) -> None:
        self._tokenizer = tokenizer
        self.token_bytes = token_bytes

    def spelled(self, context: bytes, text: bytes) -> list[int]:
        """Return the tokens in which `text` continues `context`; none if no tokens stand for it.

        A tokenizer may join the end of the context with the text. The context's tokens are
        committed already, so then the text is encoded without its context.
        """
        # If the context ends within a character, the text begins within the same character.
        whole = text.decode(errors="ignore")
        wanted = whole.encode()
        if not text.startswith(wanted):
            return []
        for before in (context.decode(errors="ignore"), ""):
            ids = self._tokenizer.encode(before + whole, add_special_tokens=False).ids
            at = len(ids)
            size = 0
            while size < len(wanted) and at > 0:
                at -= 1
                size += len(self.token_bytes[ids[at]])
            if b"".join([self.token_bytes[token] for token in ids[at:]]) == wanted:
                return list(ids[at:])
        return []
