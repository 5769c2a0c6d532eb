"""Decides for each grammar: which backend serves it, what that backend is given, what is refused.

LLGuidance serves JSON schemas, regular expressions and choices: it applies patterns to characters,
intersects schemas and bounds the work of each mask. XGrammar serves GBNF and structural tags, since
its authors define what these two languages mean. Some constructs mean one thing to a backend and
another to Python or JSON Schema. This module translates such a construct, or refuses the grammar
and names the keyword.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outrider.errors import invalid
from outrider.grammar.gbnf import translate_gbnf
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.regex import full_match
from outrider.grammar.repetition import check_ebnf, check_pattern, check_times
from outrider.grammar.schema import translate_schema
from outrider.grammar.schema_xgrammar import check_for_xgrammar


def translate(grammar: Grammar) -> Grammar:
    """The grammar that its backend must compile, so that it means what the given one means.

    Raises OutriderError(INVALID_VALUE) that names the grammar's field and the keyword or construct
    that cannot be enforced.
    """
    field = grammar.field
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = translate_schema(_json(grammar.text, field), field, quoted=False)
            return replace(grammar, text=json.dumps(schema))
        case GrammarKind.REGEX:
            return replace(grammar, text=_regex(grammar.text, field))
        case GrammarKind.EBNF:
            return replace(grammar, text=_gbnf(grammar.text, field))
        case GrammarKind.STRUCTURAL_TAG:
            tag = _Tag(field).translate(_json(grammar.text, field))
            return replace(grammar, text=json.dumps(tag))
        case _:
            return grammar


def _schema_for_xgrammar(schema: Any, field: str) -> Any:
    translated = translate_schema(schema, field, quoted=True)
    check_for_xgrammar(translated, field)
    return translated


def _regex(pattern: str, field: str) -> str:
    check_pattern(pattern, field)
    return full_match(pattern, field)


def _gbnf(text: str, field: str) -> str:
    check_ebnf(text, field)
    return translate_gbnf(text, field)


class _Tag:
    """Translates the schemas, patterns and grammars within a structural tag."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._parts: dict[str, Callable[[Any], Any]] = {
            "json_schema": lambda schema: _schema_for_xgrammar(schema, field),
            "pattern": lambda pattern: _regex(pattern, field),
            "grammar": lambda text: _gbnf(text, field),
        }

    def translate(self, tag: Any, repeated: int = 1) -> Any:
        if isinstance(tag, list):
            return [self.translate(part, repeated) for part in tag]
        if not isinstance(tag, dict):
            return tag
        if tag.get("type") == "repeat":
            counts = [tag[name] for name in ("min", "max") if isinstance(tag.get(name), int)]
            repeated *= max([1, *counts])
            check_times(repeated, self._field)
        return {key: self._part(key, value, repeated) for key, value in tag.items()}

    def _part(self, key: str, value: Any, repeated: int) -> Any:
        if key == "json_schema" or (key in self._parts and isinstance(value, str)):
            return self._parts[key](value)
        return self.translate(value, repeated)


def _json(text: str, field: str) -> Any:
    def refuse(constant: str) -> Any:
        raise invalid(field, f"has {constant}, which is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as cause:
        raise invalid(field, f"is not JSON: {cause}") from cause
