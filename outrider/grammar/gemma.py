"""Writes rules for Gemma 4's objects: keys without quotation marks, texts between `<|"|>`."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from outrider.errors import OutriderError
from outrider.grammar.branches import Json, NotEnforceable, branches, json_type
from outrider.grammar.lark import EMPTY, TEXT, LarkRules, any_of, literal
from outrider.grammar.values import (
    BOUNDS,
    INTEGER,
    NUMBER,
    WORDS,
    check_object,
    members,
    text_terminal,
    types_of,
)

_QUOTE = '<|"|>'
_KEY = "[A-Za-z_][A-Za-z0-9_.-]*"
_COMMA = '","'
_JOINT = f" {_COMMA} "
_MAX_DEPTH = 64
# For arrays and for objects: the keywords that restrict them.
_INNER = {
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems"]),
    "object": frozenset(
        [
            *("properties", "patternProperties", "additionalProperties", "required"),
            *("minProperties", "maxProperties"),
        ]
    ),
}


class GemmaRules:
    """Adds rules for the values of schemas within `root` to `rules`.

    `refused` makes the error for a keyword that cannot be enforced. The methods raise this error or
    NotEnforceable.
    """

    def __init__(
        self, rules: LarkRules, root: Any, refused: Callable[[str], OutriderError]
    ) -> None:
        self._rules, self._root, self._refused = rules, root, refused
        self._depth = 0

    def object(self, schema: Json) -> str:
        """Return an expression for an object of a schema that has no alternatives at its top."""
        check_object(schema, self._refused)
        named = members(schema)
        rest = schema.get("additionalProperties", True)
        tails = {True: EMPTY, False: EMPTY}
        if self._allows_any(rest):
            others = "".join(f" & ~{literal(name)}" for name in named)
            key = self._rules.terminal(f"/{_KEY}/{others}")
            pair = self._rules.rule(f'{key} ":" {self._value(rest)}')
            tails = {True: f'({pair} ("," {pair})*)?', False: f'("," {pair})*'}
        for name, inner in reversed(named.items()):
            tails = self._with_pair(name, inner, tails, name in schema.get("required", []))
        return f'"{{" {tails[True]} "}}"'

    def _with_pair(
        self, name: str, schema: Any, tails: dict[bool, str], required: bool
    ) -> dict[bool, str]:
        """Put this property before each of `tails`, the rules for the rest of the object.

        `tails[True]` is for an object in which no property comes before the rest, `tails[False]`
        for an object in which one does.
        """
        if not self._allows_any(schema):
            return tails
        pair = f"{literal(self._key(name) + ':')} {self._value(schema)} {tails[False]}"
        found = {True: pair, False: f'"," {pair}'}
        if not required:
            found = {first: f"{found[first]} | {tails[first]}" for first in found}
        return {first: self._rules.rule(each) for first, each in found.items()}

    def _key(self, name: str) -> str:
        if not re.fullmatch(_KEY, name):
            raise self._refused(f"has the property {name[:40]!r}")
        return name

    def _value(self, schema: Any) -> str:
        """Return the name of a rule for a schema's values. A schema may contain itself."""
        return self._rules.recursive(f"gemma {json.dumps(schema)}", lambda: self._values(schema))

    def _values(self, schema: Any) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotEnforceable("has too many alternatives")
        found: list[str] = []
        for each in branches(schema, self._root):
            if "enum" in each:
                found += [self._listed(value, each) for value in each["enum"]]
                continue
            for kind in sorted(types_of(each)):
                found += self._of_type(kind, each)
        self._depth -= 1
        if not found:
            raise self._refused("allows no value for an argument")
        return any_of(list(dict.fromkeys(found)))

    def _of_type(self, kind: str, schema: Json) -> Sequence[str]:
        match kind:
            case "string":
                return [self._text(text_terminal({**schema, "type": "string"}))]
            case "number" | "integer":
                if bounds := {name: schema[name] for name in BOUNDS if name in schema}:
                    return [self._rules.json({"type": kind, **bounds})]
                return [self._rules.terminal(f"/{INTEGER if kind == 'integer' else NUMBER}/")]
            case "array":
                return self._array(schema)
            case "object":
                named = members(schema)
                if not all(self._allows_any(named[name]) for name in schema.get("required", [])):
                    return []
                return [self.object(schema)]
        return [literal(word) for word in WORDS[kind]]

    def _text(self, terminal: str) -> str:
        if terminal != TEXT:
            terminal = self._rules.terminal(f"{terminal} & ~(TEXT {literal(_QUOTE)} TEXT)")
        return f"{self._rules.mark(_QUOTE)} {self._rules.until(terminal, _QUOTE)}"

    def _allows_any(self, schema: Any) -> bool:
        return bool(branches(schema, self._root))

    def _array(self, schema: Json) -> Sequence[str]:
        rest = schema.get("items", True)
        if isinstance(rest, list):
            raise self._refused("has a list of items")
        first = list(itertools.takewhile(self._allows_any, schema.get("prefixItems", [])))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if len(first) < len(schema.get("prefixItems", [])) or not self._allows_any(rest):
            most = len(first) if most is None else min(most, len(first))
        if most is not None and least > most:
            return []
        found = ""
        if most is None or most > len(first):
            item = self._value(rest)
            more = f'("," {item}){{{max(0, least - len(first))},{_less(most, len(first))}}}'
            if not first:
                more = f'{item} ("," {item}){{{max(0, least - 1)},{_less(most, 1)}}}'
                more = more if least else f"({more})?"
            found = more
        for i, inner in reversed([*enumerate(first)][:most]):
            found = f"{_COMMA if i else ''} {self._value(inner)} {found}"
            found = found if i < least else f"({found})?"
        return [f'"[" {found} "]"']

    def _listed(self, value: Any, schema: Json) -> str:
        """Return an expression for a value that the schema lists in enum."""
        if isinstance(value, str):
            return self._text(text_terminal({**schema, "enum": [value]}))
        if isinstance(value, list | dict) and schema.keys() & _INNER[json_type(value)]:
            raise self._refused("lists an array or object beside keywords that restrict it")
        return self._literal(value)

    def _literal(self, value: Any) -> str:
        """Return an expression for a value that an enum lists."""
        match json_type(value):
            case "string":
                return self._text(literal(value))
            case "array":
                return f'"[" {_JOINT.join(map(self._literal, value))} "]"'
            case "object":
                pairs = [
                    f"{literal(self._key(key) + ':')} {self._literal(each)}"
                    for key, each in value.items()
                ]
                return f'"{{" {_JOINT.join(pairs)} "}}"'
        return literal(json.dumps(value))


def _less(most: int | None, count: int) -> str:
    return "" if most is None else str(most - count)
