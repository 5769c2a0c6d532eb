r"""Translates the parts of a GBNF grammar that XGrammar reads otherwise.

It reads as many hexadecimal digits after \x as there are, and its own regular expressions.
"""

from __future__ import annotations

import ast
import re

from outrider.errors import invalid
from outrider.grammar.regex import full_match

_STRING = r'"(?:\\.|[^"\\])*"'
_PARTS = re.compile(
    rf"#[^\n\r]*|Regex(?P<open>\s*\(\s*)(?P<pattern>{_STRING})"
    rf"|(?P<text>{_STRING}|\[(?:\\.|[^\]\\])*\])|.",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x(?P<digits>[0-9A-Fa-f]{0,2})|.)", re.DOTALL)


def translate_gbnf(text: str, field: str) -> str:
    """Translate a grammar; raises OutriderError(INVALID_VALUE) for a construct in its regexes."""
    return _PARTS.sub(lambda part: _part(part, field), text)


def _part(part: re.Match[str], field: str) -> str:
    if part["pattern"]:
        try:
            pattern = ast.literal_eval(part["pattern"])
        except (SyntaxError, ValueError) as cause:
            raise invalid(field, "has a Regex with an invalid escape") from cause
        translated = full_match(pattern, field).replace("\\", "\\\\")
        return f'Regex{part["open"]}"{translated}"'
    if part["text"]:
        return _ESCAPE.sub(lambda escape: _escape(escape, field), part["text"])
    return part[0]


def _escape(escape: re.Match[str], field: str) -> str:
    digits = escape["digits"]
    if digits is None:
        return escape[0]
    if len(digits) < 2:
        raise invalid(field, r"has \x without two hexadecimal digits")
    return rf"\u00{digits}"
