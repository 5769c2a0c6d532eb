"""How often a regular expression or a grammar repeats a part, counts within counts multiplied: bounded before it is compiled.

Counts of a rule that another rule repeats are not multiplied: neither backend writes them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from outrider.errors import invalid

# Masks take time in proportion; and XGrammar takes the rest of a count beyond 32 bits for the count.
MOST_REPEATED = 10_000
# What does not end matches too, so that a text is read once: whoever hides a count in it has a grammar that is refused anyway.
# An escape may have braces of its own, as \u{1F600}; a class may begin with the bracket that elsewhere closes it.
_PATTERN = re.compile(
    r"\\[pPuUxX]\{[^{}]{0,64}\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|(?P<count>\{[\d,\s]*\})|(?P<bracket>[()])|.",
    re.DOTALL,
)
_STRING = r'"(?:\\.|[^"\\\n\r])*"?'
# What XGrammar takes between a rule's name and "::=", such as [max_tokens=10].
_ATTRIBUTES = r'\[(?:"[^"\n\r]{0,99}"|[^\]"\n\r]){0,99}\][ \t]*::='
_COMMENT = r"#[^\n\r]*"
_EBNF = re.compile(
    rf"{_COMMENT}|Regex(?=\s*\(\s*(?P<pattern>{_STRING}))|[\w.-]+(?:{_ATTRIBUTES})?|{_STRING}|\[(?:\\.|[^\]\\])*\]?"
    rf"|(?P<count>\{{(?:{_COMMENT}|[^}}#])*\}}?)|(?P<bracket>[()])|\S",
    re.DOTALL,
)


def check_pattern(pattern: str, field: str) -> None:
    """Raises OutriderError(INVALID_VALUE) for repetitions within repetitions that multiply to more than masks can bear."""
    _check_product(_PATTERN.finditer(pattern), field)


def check_ebnf(text: str, field: str) -> None:
    """The same for a grammar in GBNF, and for the regular expressions in it."""
    parts = list(_EBNF.finditer(text))
    _check_product(parts, field)
    for part in parts:
        if part["pattern"]:
            check_pattern(part["pattern"][1:-1].replace("\\\\", "\\"), field)


def check_times(times: int, field: str) -> None:
    """Raises OutriderError(INVALID_VALUE) for a part that comes more often than a repetition may."""
    if times > MOST_REPEATED:
        raise invalid(
            field,
            f"repeats more than {MOST_REPEATED} times, repetitions within repetitions multiplied",
        )


def _check_product(parts: Iterable[re.Match[str]], field: str) -> None:
    largest, last = (
        [1],
        1,
    )  # of each bracket that is open, the text itself first; and of the part that a count would repeat
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
