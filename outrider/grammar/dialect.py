"""Decides what a grammar means: which Lark text LLGuidance gets, and which grammars are refused.

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
from outrider.grammar.lark import (
    SpecialTokens,
    any_of,
    behind_thought,
    json_rule,
    literal,
    regex_rule,
)
from outrider.grammar.regex import full_match
from outrider.grammar.repetition import check_ebnf, check_pattern
from outrider.grammar.schema import translate_schema
from outrider.grammar.tags import translate_tag


def translate(grammar: Grammar, specials: SpecialTokens) -> Grammar:
    """Return the grammar with its text translated to LLGuidance's Lark; its meaning is the same.

    Raises OutriderError(INVALID_VALUE) that names the grammar's field and the keyword or construct
    that cannot be enforced.
    """
    text = _lark(grammar, specials)
    if grammar.thought is not None:
        text = behind_thought(text, grammar.thought, specials)
    return replace(grammar, text=text, choices=())


def _lark(grammar: Grammar, specials: SpecialTokens) -> str:
    field = grammar.field
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"start: {json_rule(translate_schema(_json(grammar.text, field), field))}"
        case GrammarKind.JSON_OBJECT:
            return f"start: {json_rule({'type': 'object'})}"
        case GrammarKind.REGEX:
            return f"start: {regex_rule(_regex(grammar.text, field))}"
        case GrammarKind.EBNF:
            return _gbnf(grammar.text, field)
        case GrammarKind.CHOICE:
            return f"start: {any_of(map(literal, grammar.choices))}"
        case GrammarKind.STRUCTURAL_TAG:
            return translate_tag(_json(grammar.text, field), field, specials)


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
