"""Sets of characters, as Python's `re` and ECMAScript mean them.

A set is a sorted tuple of ranges of code points, both ends included. It has no surrogates, since
UTF-8 cannot write them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, lru_cache

Ranges = tuple[tuple[int, int], ...]

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
# JSON has short escapes for five control characters. Grammars forbid \u escapes: with \u0061 in
# place of "a", a model could write a property's name, and the grammar would read another name.
_JSON_CONTROLS = ((0x08, 0x0A), (0x0C, 0x0D))


def characters(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the set of the characters in `ranges`, which may overlap, without surrogates."""
    parts: list[tuple[int, int]] = []
    for low, high in ranges:
        parts.append((low, min(high, _SURROGATES[0] - 1)))
        parts.append((max(low, _SURROGATES[1] + 1), high))
    found: list[tuple[int, int]] = []
    for low, high in sorted(part for part in parts if part[0] <= part[1]):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Return all characters that are not in the set."""
    found = []
    start = 0
    for low, high in characters([*ranges, _SURROGATES]):
        found.append((start, low - 1))
        start = high + 1
    return characters([*found, (start, _LAST)])


def common(one: Ranges, other: Ranges) -> Ranges:
    """Return the characters that are in both sets."""
    return complement(characters([*complement(one), *complement(other)]))


ALL = characters([(0, _LAST)])
# The characters that a grammar allows in a JSON string's value. A model writes each of them in only
# one form, raw or as a short escape. Control characters without a short escape are left out.
IN_JSON = common(ALL, characters([(0x20, 0x7E), (0x80, _LAST), *_JSON_CONTROLS]))
# "." without the flag "s".
PYTHON_DOT = complement(((0x0A, 0x0A),))
ECMASCRIPT_DOT = complement(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)))
_ECMASCRIPT_SPACE = characters(
    [
        (0x09, 0x0D),
        (0x2000, 0x200A),
        (0x2028, 0x2029),
        *((ord(c), ord(c)) for c in " \xa0\u1680\u202f\u205f\u3000\ufeff"),
    ]
)
_ECMASCRIPT = {
    "d": characters([(0x30, 0x39)]),
    "w": characters([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]),
    "s": _ECMASCRIPT_SPACE,
}


def ecmascript_class(letter: str) -> Ranges:
    r"""Return the characters of \d, \w or \s in ECMAScript."""
    return _ECMASCRIPT[letter]


@cache
def python_class(letter: str, *, ascii_only: bool) -> Ranges:
    r"""Return the characters of \d, \w or \s in a Python string pattern."""
    pattern = re.compile(rf"\{letter}+", re.ASCII if ascii_only else 0)
    text = "".join(map(chr, range(_LAST + 1)))
    return characters((m.start(), m.end() - 1) for m in pattern.finditer(text))


@cache
def _cased() -> str:
    """Return all characters that some change of case would change."""
    every = map(chr, range(_LAST + 1))
    return "".join(c for c in every if c.lower() != c or c.upper() != c or c.title() != c)


@lru_cache(1024)
def any_case(ranges: Ranges, *, ascii_only: bool) -> Ranges:
    """Return all characters that a class of these ranges matches under Python's flag "i"."""
    if not ranges:
        return ranges
    source = "".join(rf"\U{low:08x}-\U{high:08x}" for low, high in ranges)
    pattern = re.compile(f"[{source}]", re.IGNORECASE | (re.ASCII if ascii_only else 0))
    others = [(ord(c), ord(c)) for c in _cased() if pattern.match(c)]
    return characters([*ranges, *others])
