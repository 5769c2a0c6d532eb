r"""Translates GBNF, llama.cpp's language, to Lark with LLGuidance's own translation.

LLGuidance's translation accepts few escapes, so this module first writes every character in a form
that the translation accepts. Each part without recursion becomes a regular expression, so its texts
are exactly GBNF's. But between parts with recursion, a part without recursion takes the longest
text that it can, whereas GBNF would try shorter texts too.
"""

from __future__ import annotations

import re

from outrider.errors import invalid

_PARTS = re.compile(
    r"(?P<comment>#[^\n\r]*)"
    r'|(?P<text>"(?:\\.|[^"\\])*")'
    r"|\[(?P<negated>\^?)(?P<members>(?:\\.|[^\]\\])*)\]"
    r"|(?P<name>[\w-]+)"
    r"|(?P<any>\.)"
    r"|.",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-"}
_SHORT = {character: f"\\{letter}" for letter, character in _LETTERS.items() if letter in 'nrt"\\'}
_ROOT = "root-of-all"


def translate_gbnf(text: str, field: str) -> str:
    """Translate a grammar; raise OutriderError(INVALID_VALUE) if it is no GBNF."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    names = re.findall(r"([\w-]+)\s*::=", _PARTS.sub(_name_alone, text))
    if len(set(names)) < len(names):
        raise invalid(field, "defines a rule twice")
    # LLGuidance would not make the rule `root` a regular expression, so it gets another name.
    parts = _PARTS.sub(lambda part: _part(part, field), text)
    try:
        return gbnf_to_lark(f"{parts}\nroot ::= {_ROOT}\n")
    # The translation raises plain exceptions.
    except Exception as cause:
        raise invalid(field, f"is no GBNF: {str(cause)[:200]}") from cause


def _name_alone(part: re.Match[str]) -> str:
    return "" if part["comment"] or part["text"] or part["members"] is not None else part[0]


def _part(part: re.Match[str], field: str) -> str:
    if part["text"]:
        return f'"{_characters(part["text"][1:-1], field)}"'
    if part["members"] is not None:
        return f"[{part['negated']}{_members(part['members'], field)}]"
    if part["any"]:
        return f"[\\x00-{chr(0x10FFFF)}]"
    return _ROOT if part["name"] == "root" else part[0]


def _characters(text: str, field: str) -> str:
    """Write the characters of a quoted text as LLGuidance's translation accepts them."""
    return "".join(_quoted(_character(each, field)) for each in _ESCAPE.finditer(text))


def _members(text: str, field: str) -> str:
    """Write the members of a character class as LLGuidance's translation accepts them."""
    parts = list(_ESCAPE.finditer(text))
    inner = range(1, len(parts) - 1)
    return "".join(
        "-" if i in inner and each[0] == "-" else _written(_character(each, field))
        for i, each in enumerate(parts)
    )


def _character(part: re.Match[str], field: str) -> str:
    *codes, letter, plain = part.groups()
    if plain:
        return plain
    if letter:
        if letter not in _LETTERS:
            raise invalid(field, f"has the escape \\{letter}")
        return _LETTERS[letter]
    number = int(next(filter(None, codes)), 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise invalid(field, f"has the character {part[0]}, which no text can hold")
    return chr(number)


def _quoted(character: str) -> str:
    """Write a character as LLGuidance's translation accepts it within a quoted text."""
    if character in _SHORT:
        return _SHORT[character]
    return character if character >= " " and character != "\x7f" else _written(character)


def _written(character: str) -> str:
    """Write a character as LLGuidance's translation accepts it within a character class."""
    is_plain = character.isalnum() or ord(character) > 0x7F or character in " _"
    return character if is_plain else rf"\x{ord(character):02x}"
