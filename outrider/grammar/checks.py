"""Refuses grammars that the backends accept without enforcing them, and counts that are too large.

Works on the texts alone. Only a worker process runs these checks, because a hostile text can make
some of them slow.
"""

from __future__ import annotations

import json
from typing import Any

from outrider.errors import invalid
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.repetition import check_ebnf, check_pattern, check_times
from outrider.grammar.schema import check_schema


def check(grammar: Grammar) -> None:
    """Check a grammar before it is compiled; raises OutriderError that names its field."""
    field = grammar.field
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        check_schema(_json(grammar.text, field), field)
    elif grammar.kind is GrammarKind.STRUCTURAL_TAG:
        _check_tag(_json(grammar.text, field), field)
    elif grammar.kind is GrammarKind.REGEX:
        check_pattern(grammar.text, field)
    elif grammar.kind is GrammarKind.EBNF:
        check_ebnf(grammar.text, field)


def _check_tag(tag: Any, field: str, repeated: int = 1) -> None:
    """Check all schemas, patterns, grammars and repetitions within a structural tag."""
    if isinstance(tag, list):
        for part in tag:
            _check_tag(part, field, repeated)
    if not isinstance(tag, dict):
        return
    if tag.get("type") == "repeat":
        counts = [tag[name] for name in ("min", "max") if isinstance(tag.get(name), int)]
        repeated *= max([1, *counts])
        check_times(repeated, field)
    for key, value in tag.items():
        if key == "json_schema":
            check_schema(value, field)
        elif key == "pattern" and isinstance(value, str):
            check_pattern(value, field)
        elif key == "grammar" and isinstance(value, str):
            check_ebnf(value, field)
        else:
            _check_tag(value, field, repeated)


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise invalid(field, f"is not JSON: {cause}") from cause
