"""Bounds the repetition counts of regular expressions and grammars before they are compiled.

Nested counts are multiplied, and neighbouring counts added. If a rule repeats another rule, the
counts within that other rule are not multiplied, because LLGuidance does not expand that rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from outrider.errors import invalid

# The time for a mask grows with the count.
MAX_REPETITIONS = 10_000
# Unterminated parts match as well, so that one pass reads any text. No count can hide in such a
# part, because LLGuidance refuses a grammar with an unterminated part. An escape may have braces of
# its own, as in \u{1F600}. A character class may begin with the bracket that elsewhere closes it.
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
_COMMENT = r"#[^\n\r]*"
_EBNF = re.compile(
    rf"{_COMMENT}"
    r"|[\w.-]+"
    rf"|{_STRING}"
    r"|\[(?:\\.|[^\]\\])*\]?"
    rf"|(?P<count>\{{(?:{_COMMENT}|[^}}#])*\}}?)"
    r"|(?P<bracket>[()])"
    r"|\S",
    re.DOTALL,
)


def check_pattern(pattern: str, field: str) -> None:
    """Check a regular expression; raise OutriderError(INVALID_VALUE) for too many repetitions."""
    _check_sum(_PATTERN.finditer(pattern), field)


def check_ebnf(text: str, field: str) -> None:
    """Check a grammar in GBNF, as `check_pattern` does."""
    _check_sum(_EBNF.finditer(text), field)


def check_times(times: int, field: str) -> None:
    """Check a number of repetitions; raise OutriderError(INVALID_VALUE) beyond the limit."""
    if times > MAX_REPETITIONS:
        how = "nested counts multiplied and neighbouring ones added"
        raise invalid(field, f"repeats more than {MAX_REPETITIONS} times, {how}")


def _check_sum(parts: Iterable[re.Match[str]], field: str) -> None:
    """Check how many copies all counts make: nested counts multiply, neighbours add up."""
    # The sum within each open bracket; the first entry is for the whole text.
    sums = [0]
    # The number of copies that the next count would repeat, and how many of them the sum contains
    # already.
    last, counted = 1, 0
    for part in parts:
        if part["count"]:
            counts = re.findall(r"\d+", re.sub(_COMMENT, "", part["count"]))
            last *= max([1, *map(int, counts)])
            sums[-1] += last - counted
            counted = last
        elif part["bracket"] == "(":
            sums.append(0)
            last, counted = 1, 0
        elif part["bracket"] == ")" and len(sums) > 1:
            counted = sums.pop()
            last = max(1, counted)
            sums[-1] += counted
        else:
            last, counted = 1, 0
        check_times(sums[-1], field)
