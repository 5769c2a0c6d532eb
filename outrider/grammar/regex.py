r"""Translates regular expressions into a small dialect.

Python's parser reads them, so that no unknown construct passes. The result matches whole texts. It
has literals, classes of ranges, groups, alternatives and counts, but no anchors, flags or
shorthands. A pattern within a JSON schema is ECMAScript's, and searches a string. Where Python and
ECMAScript differ, the result matches only what both match, since validators are written in either
language. A regular expression that is a whole grammar means Python's `re.fullmatch`.
"""

from __future__ import annotations

# The docs promise that a pattern means what it means to Python's `re`, so the private parser of
# `re` reads patterns. We know of no maintained library that gives the syntax tree of Python's
# patterns: `regex` shows none, and interegular and greenery read only a part of the language.
import re
import warnings
from collections.abc import Callable, Sequence
from enum import Enum, auto
from re import _constants as sre  # type: ignore[attr-defined]  # The parser is not public.
from re import _parser  # type: ignore[attr-defined]  # As above.
from typing import Any

from outrider.errors import OutriderError, invalid
from outrider.grammar import characters as sets
from outrider.grammar.characters import Ranges

# The limit of a translation's length. A shorthand such as \w becomes 760 ranges, and a pattern may
# have 65,536 characters.
_MAX_CHARACTERS = 1_000_000
_CATEGORIES = {
    sre.CATEGORY_DIGIT: "d",
    sre.CATEGORY_WORD: "w",
    sre.CATEGORY_SPACE: "s",
    sre.CATEGORY_NOT_DIGIT: "D",
    sre.CATEGORY_NOT_WORD: "W",
    sre.CATEGORY_NOT_SPACE: "S",
}
_TYPES = re.ASCII | re.UNICODE | re.LOCALE
_STARTS = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
_ENDS = (sre.AT_END, sre.AT_END_STRING)
_UNSUPPORTED = {
    sre.ASSERT: "lookaround",
    sre.ASSERT_NOT: "lookaround",
    sre.GROUPREF: "a backreference",
    sre.GROUPREF_EXISTS: "a conditional group",
    sre.ATOMIC_GROUP: "an atomic group",
    sre.POSSESSIVE_REPEAT: "a possessive quantifier",
}
# ECMAScript and Python interpret these differently, without an error in either: in ECMAScript, "[]"
# and "[^]" are complete classes, and "{,3}" is no count.
_ECMASCRIPT_ONLY = re.compile(r"\\.|(\[\^?\])|\[(?:\\.|[^\]\\])*\]?|(\{,\d+\})|.", re.DOTALL)


class _Edge(Enum):
    """What lies beyond one end of a part: more of the pattern, the text's end, or any text."""

    INSIDE = auto()
    ANCHORED = auto()
    OPEN = auto()


def full_match(pattern: str, field: str) -> str:
    """Translate a whole regular expression; raise OutriderError(INVALID_VALUE) if refused."""
    return _Translator(field, "", in_json=False).translate(pattern)


def schema_pattern(pattern: str, field: str) -> str:
    """Translate a JSON schema's pattern, which searches a string; raise what `full_match` raises.

    The result matches the string's characters, not their escapes in JSON.
    """
    found = next((m for m in _ECMASCRIPT_ONLY.finditer(pattern) if m[1] or m[2]), None)
    if found:
        part = found[1] or found[2]
        problem = f"has the pattern {pattern[:60]!r}: {part} means different things in ECMAScript"
        raise invalid(field, f"{problem} and Python")
    name = f" in the pattern {pattern[:60]!r}"
    return _Translator(field, name, in_json=True).translate(pattern)


def schema_text(text: str, keyword: str, field: str) -> None:
    """Raise OutriderError(INVALID_VALUE) if a schema's text has a character that is not allowed."""
    bad = next((c for c in text if not any(a <= ord(c) <= b for a, b in sets.IN_JSON)), None)
    if bad is not None:
        raise invalid(field, f"has {keyword} with {bad!r}, which the grammar cannot write")


def literal(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return "".join(c if c.isalnum() else rf"\U{ord(c):08x}" for c in text)


class _Translator:
    def __init__(self, field: str, where: str, *, in_json: bool) -> None:
        self._field, self._where = field, where
        self._in_json = in_json
        self._size = 0

    def translate(self, pattern: str) -> str:
        try:
            with warnings.catch_warnings():
                # The parser warns of what a later Python might mean by "[[".
                warnings.simplefilter("ignore", FutureWarning)
                parsed = _parser.parse(pattern)
            edge = _Edge.OPEN if self._in_json else _Edge.ANCHORED
            return self._sequence(list(parsed), parsed.state.flags, edge, edge)
        except (re.error, OverflowError) as cause:
            raise self._refused(f"is no regular expression: {str(cause)[:100]}") from cause
        except RecursionError as cause:
            raise self._refused("is nested too deep") from cause

    def _refused(self, problem: str) -> OutriderError:
        return invalid(self._field, f"{problem}{self._where}")

    def _sequence(self, items: list[Any], flags: int, left: _Edge, right: _Edge) -> str:
        """Translate items that follow each other, with `left` and `right` at their ends."""
        while items and items[0][0] is sre.AT and items[0][1] in _STARTS:
            left = self._anchored(left, items.pop(0)[1])
        while items and items[-1][0] is sre.AT and items[-1][1] in _ENDS:
            right = self._anchored(right, items.pop()[1])
        if not items:
            return self._rest(left) + self._rest(right)
        last = len(items) - 1
        return "".join(
            self._item(
                item,
                flags,
                left if i == 0 else _Edge.INSIDE,
                right if i == last else _Edge.INSIDE,
            )
            for i, item in enumerate(items)
        )

    def _anchored(self, edge: _Edge, anchor: Any) -> _Edge:
        if edge is _Edge.INSIDE:
            raise self._refused(f"has {_anchor_name(anchor)} where the text cannot begin or end")
        return _Edge.ANCHORED

    def _rest(self, edge: _Edge) -> str:
        """Return an expression for the text that a search may skip before or after its match."""
        return self._set(sets.ALL) + "*" if edge is _Edge.OPEN else ""

    def _item(self, item: tuple[Any, Any], flags: int, left: _Edge, right: _Edge) -> str:
        kind, value = item
        if kind is sre.SUBPATTERN:
            _, added, removed, inner = value
            if added & _TYPES:
                # As in `re`, the group's own flag replaces an outer "a" or "u".
                flags &= ~_TYPES
            flags = (flags | added) & ~removed
            return f"(?:{self._sequence(list(inner), flags, left, right)})"
        if kind is sre.BRANCH:
            branches = [self._sequence(list(part), flags, left, right) for part in value[1]]
            return f"(?:{'|'.join(branches)})"
        return self._rest(left) + self._inner(kind, value, flags) + self._rest(right)

    def _inner(self, kind: Any, value: Any, flags: int) -> str:
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, inner = value
            part = self._sequence(list(inner), flags, _Edge.INSIDE, _Edge.INSIDE)
            return f"(?:{part}){_count(least, None if most is sre.MAXREPEAT else most)}"
        if kind is sre.AT:
            raise self._refused(f"has {_anchor_name(value)} where it cannot be enforced")
        if kind in _UNSUPPORTED:
            raise self._refused(f"has {_UNSUPPORTED[kind]}, which cannot be enforced,")
        return self._set(self._members(kind, value, flags))

    def _members(self, kind: Any, value: Any, flags: int) -> Ranges:
        """Return the characters that one literal, dot or class matches."""
        if kind is sre.ANY:
            if flags & re.DOTALL:
                return sets.ALL
            return sets.ECMASCRIPT_DOT if self._in_json else sets.PYTHON_DOT
        if kind is sre.IN:
            found = self._class(value, flags, lambda letter: _python_class(letter, flags))
            if not self._in_json:
                return found
            return sets.common(found, self._class(value, flags, _ecmascript_class))
        if kind in (sre.LITERAL, sre.NOT_LITERAL):
            negated = [(sre.NEGATE, None)] if kind is sre.NOT_LITERAL else []
            return self._class([*negated, (sre.LITERAL, value)], flags, _ecmascript_class)
        raise self._refused(f"has {str(kind).lower()}, which cannot be enforced,")

    def _class(
        self, items: Sequence[tuple[Any, Any]], flags: int, shorthand: Callable[[str], Ranges]
    ) -> Ranges:
        ranges: list[tuple[int, int]] = []
        shorthands: list[tuple[int, int]] = []
        for kind, value in items:
            if kind is sre.LITERAL:
                ranges.append((value, value))
            elif kind is sre.RANGE:
                ranges.append(value)
            elif kind is sre.CATEGORY:
                shorthands.extend(shorthand(_CATEGORIES[value]))
        found = sets.characters(ranges)
        if flags & re.IGNORECASE:
            found = sets.any_case(found, ascii_only=bool(flags & re.ASCII))
        # The flag "i" does not widen \w: U+0345 is no word character, though it is another case of
        # U+0399.
        found = sets.characters([*found, *shorthands])
        return sets.complement(found) if items[0][0] is sre.NEGATE else found

    def _set(self, found: Ranges) -> str:
        """Write a set of characters as a class; refuse an empty set."""
        if self._in_json:
            found = sets.common(found, sets.IN_JSON)
        if not found:
            problem = "has a character that the text cannot hold, such as a surrogate"
            raise self._refused(problem + " or a control character," if self._in_json else problem)
        text = _class_text(found)
        self._size += len(text)
        if self._size > _MAX_CHARACTERS:
            raise self._refused(f"stands for more than {_MAX_CHARACTERS} characters")
        return text


def _python_class(letter: str, flags: int) -> Ranges:
    found = sets.python_class(letter.lower(), ascii_only=bool(flags & re.ASCII))
    return found if letter.islower() else sets.complement(found)


def _ecmascript_class(letter: str) -> Ranges:
    found = sets.ecmascript_class(letter.lower())
    return found if letter.islower() else sets.complement(found)


def _anchor_name(anchor: Any) -> str:
    if anchor in (sre.AT_BOUNDARY, sre.AT_NON_BOUNDARY):
        return r"\b or \B"
    return r"^ or \A" if anchor in _STARTS else r"$ or \Z"


def _count(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _class_text(found: Ranges) -> str:
    if found == sets.ALL:
        return r"[\u{0}-\u{10ffff}]"
    if len(found) == 1 and found[0][0] == found[0][1] and chr(found[0][0]).isalnum():
        return chr(found[0][0]) if found[0][0] < 0x80 else rf"\u{{{found[0][0]:x}}}"
    return f"[{''.join(_range_text(low, high) for low, high in found)}]"


def _range_text(low: int, high: int) -> str:
    start = rf"\u{{{low:x}}}"
    return start if low == high else rf"{start}-\u{{{high:x}}}"
