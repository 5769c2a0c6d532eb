"""Decides what a grammar means: what LLGuidance is given for it, and what is refused.

Some constructs mean one thing to LLGuidance and another to Python or JSON Schema. This module
translates such a construct, or refuses the grammar and names the keyword.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from outrider.errors import invalid
from outrider.grammar.gbnf import translate_gbnf
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.lark import SpecialTokens
from outrider.grammar.regex import full_match
from outrider.grammar.repetition import check_ebnf, check_pattern
from outrider.grammar.schema import translate_schema
from outrider.grammar.tags import translate_tag


def translate(grammar: Grammar, specials: SpecialTokens) -> Grammar:
    """The grammar that LLGuidance must compile, so that it means what the given one means.

    Raises OutriderError(INVALID_VALUE) that names the grammar's field and the keyword or construct
    that cannot be enforced.
    """
    field = grammar.field
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = translate_schema(_json(grammar.text, field), field)
            return replace(grammar, text=json.dumps(schema))
        case GrammarKind.REGEX:
            return replace(grammar, text=_regex(grammar.text, field))
        case GrammarKind.EBNF:
            return replace(grammar, text=_gbnf(grammar.text, field))
        case GrammarKind.STRUCTURAL_TAG:
            tag = translate_tag(_json(grammar.text, field), field, specials)
            return replace(grammar, text=tag)
        case _:
            return grammar


def _regex(pattern: str, field: str) -> str:
    check_pattern(pattern, field)
    return full_match(pattern, field)


def _gbnf(text: str, field: str) -> str:
    check_ebnf(text, field)
    return translate_gbnf(text, field)


def _json(text: str, field: str) -> Any:
    def refuse(constant: str) -> Any:
        raise invalid(field, f"has {constant}, which is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as cause:
        raise invalid(field, f"is not JSON: {cause}") from cause
