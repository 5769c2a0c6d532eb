"""Bounds the repetition counts of regular expressions and grammars before they are compiled.

Nested counts are multiplied. The count of a rule that another rule repeats is not, because neither
backend expands it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from outrider.errors import invalid

# The time for a mask grows with the count, and XGrammar keeps only the lowest 32 bits of a count.
MAX_REPETITIONS = 10_000
# Unterminated parts match as well, so that one pass reads any text; the backends refuse such
# grammars, so that no count can hide in them. An escape may have braces of its own, as \u{1F600}.
# A character class may begin with the bracket that elsewhere closes it.
_PATTERN = re.compile(
    r"\\[pPuUxX]\{[^{}]{0,64}\}"
    r"|\\."
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]?"
    r"|(?P<count>\{[\d,\s]*\})"
    r"|(?P<bracket>[()])"
    r"|.",
    re.DOTALL,
)
_STRING = r'"(?:\\.|[^"\\\n\r])*"?'
# XGrammar's attributes between a rule's name and "::=", such as [max_tokens=10].
_ATTRIBUTES = r'\[(?:"[^"\n\r]{0,99}"|[^\]"\n\r]){0,99}\][ \t]*::='
_COMMENT = r"#[^\n\r]*"
_EBNF = re.compile(
    rf"{_COMMENT}"
    rf"|Regex(?=\s*\(\s*(?P<pattern>{_STRING}))"
    rf"|[\w.-]+(?:{_ATTRIBUTES})?"
    rf"|{_STRING}"
    r"|\[(?:\\.|[^\]\\])*\]?"
    rf"|(?P<count>\{{(?:{_COMMENT}|[^}}#])*\}}?)"
    r"|(?P<bracket>[()])"
    r"|\S",
    re.DOTALL,
)


def check_pattern(pattern: str, field: str) -> None:
    """Check a regular expression; raises OutriderError(INVALID_VALUE) for too many repetitions."""
    _check_product(_PATTERN.finditer(pattern), field)


def check_ebnf(text: str, field: str) -> None:
    """Check a grammar in GBNF and the regular expressions in it, as `check_pattern` does."""
    parts = list(_EBNF.finditer(text))
    _check_product(parts, field)
    for part in parts:
        if part["pattern"]:
            check_pattern(part["pattern"][1:-1].replace("\\\\", "\\"), field)


def check_times(times: int, field: str) -> None:
    """Check the number of repetitions of one part; raises OutriderError(INVALID_VALUE)."""
    if times > MAX_REPETITIONS:
        raise invalid(field, f"repeats more than {MAX_REPETITIONS} times, nested counts multiplied")


def _check_product(parts: Iterable[re.Match[str]], field: str) -> None:
    """Check the largest product of nested counts."""
    # The largest product within each open bracket; the first entry is the whole text.
    largest = [1]
    # The product within the part that a following count would repeat.
    last = 1
    for part in parts:
        if part["count"]:
            counts = re.findall(r"\d+", re.sub(_COMMENT, "", part["count"]))
            last *= max([1, *map(int, counts)])
            check_times(last, field)
        elif part["bracket"] == "(":
            largest.append(1)
            last = 1
        elif part["bracket"] == ")" and len(largest) > 1:
            last = largest.pop()
        else:
            last = 1
        largest[-1] = max(largest[-1], last)
