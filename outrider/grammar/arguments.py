"""Writes rules for a call's arguments in the styles that are not JSON: tags, and Gemma's objects.

The gateway's reader turns each text that a rule matches into a value of the schema. The reader
decides by the schema's types whether a parameter is a string or JSON, so the rules leave out
strings that the reader would take for JSON. Rules may be narrower than the schema, but never wider.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from outrider.errors import OutriderError, invalid
from outrider.grammar.branches import (
    ALL_TYPES,
    Json,
    NotEnforceable,
    Types,
    alone,
    branches,
    json_type,
)
from outrider.grammar.gemma import GemmaRules
from outrider.grammar.lark import BLANKS, EMPTY, TEXT, LarkRules, any_of, literal
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

_DSML = "｜DSML｜"


@dataclass(frozen=True, slots=True)
class Tags:
    """The way in which a style writes a parameter.

    `begin` contains {key}, and perhaps {blanks} and {text}. {text} stands for "true" or "false".
    """

    begin: str
    end: str
    trims: bool = False
    """True if a line break next to a tag belongs to the layout, not to the value."""

    @property
    def key_end(self) -> str:
        """The character that ends a key."""
        return self.begin.partition("{key}")[2][0]

    @property
    def says_text(self) -> bool:
        """True if the tag says whether a value is a string."""
        return "{text}" in self.begin


TAGS = {
    "qwen_xml": Tags("<parameter={key}>", "</parameter>", trims=True),
    "minimax_xml": Tags('<parameter name="{key}">', "</parameter>"),
    "glm_xml": Tags("<arg_key>{key}</arg_key>{blanks}<arg_value>", "</arg_value>"),
    "deepseek_xml": Tags(
        f'<{_DSML}parameter name="{{key}}" string="{{text}}">', f"</{_DSML}parameter>"
    ),
    "deepseek_v4_1_xml": Tags(
        f'<{_DSML} parameter name="{{key}}" string="{{text}}">', f"</{_DSML} parameter>"
    ),
}
"""The styles with tags, keyed by name."""

# Keywords that do not restrict a value.
_NOTES = {"description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_CONTAINERS = ("array", "object")
_SCALARS = ("null", "boolean", "integer", "number")
# No property can have this name, since a tag cannot contain it.
_NO_NAME = "\0"


class ArgumentRules:
    """Adds rules for arguments to `rules`. Raises OutriderError that names `field`."""

    def __init__(self, field: str, rules: LarkRules) -> None:
        self._field, self._rules = field, rules
        self._root: Any = {}
        self._types = Types(self._root)
        # The property names of all alternatives of the schema.
        self._names: list[str] = []

    def expression(self, schema: Json, style: str) -> str:
        """Return an expression for a translated schema's arguments, with blanks between tags."""
        self._root, self._types = schema, Types(schema)
        try:
            objects = [each for each in branches(schema, schema) if self._is_possible(each)]
            if not objects:
                raise invalid(self._field, "allows no object as a call's arguments")
            if style == "gemma":
                return any_of(
                    [
                        GemmaRules(self._rules, schema, self._refused).object(each)
                        for each in objects
                    ]
                )
            self._names = list(dict.fromkeys(n for each in objects for n in members(each)))
            options = [self._object(each, TAGS[style]) for each in objects]
        except NotEnforceable as cause:
            raise self._refused(str(cause)) from cause
        return f"{BLANKS} ({' | '.join(dict.fromkeys(options))})"

    def _refused(self, problem: str) -> OutriderError:
        return invalid(self._field, f"{problem}, which cannot be enforced in this format of calls")

    def _is_possible(self, schema: Json) -> bool:
        """Return whether an object can satisfy the schema."""
        named = members(schema)
        return "object" in types_of(schema) and all(
            self._allows_any(named[name]) for name in schema.get("required", [])
        )

    def _allows_any(self, schema: Any) -> bool:
        return bool(self._types.of(schema) and branches(schema, self._root))

    def _object(self, schema: Json, tags: Tags) -> str:
        check_object(schema, self._refused)
        required = schema.get("required", [])
        parts = []
        for name, inner in members(schema).items():
            if not self._allows_any(inner):
                continue
            if not name or tags.key_end in name or any(c < " " for c in name):
                raise self._refused(f"has the property {name[:40]!r}")
            part = f"{self._rules.rule(self._parameter(name, inner, tags))} {BLANKS}"
            parts.append(part if name in required else f"({part})?")
        rest = schema.get("additionalProperties", True)
        if rest is not False:
            parts.append(f"({self._rules.rule(self._parameter('', rest, tags))} {BLANKS})*")
        return " ".join(parts) or EMPTY

    def _parameter(self, name: str, schema: Any, tags: Tags) -> str:
        """Return the body of a rule for a parameter with any of its values.

        If `name` is empty, the rule is for any parameter that the schema does not name.
        """
        types = self._types.of(schema)
        if not tags.says_text:
            read = self._types.of_property(name or _NO_NAME) | types
            return f"{self._begin(name, tags)} {self._value(schema, types, read, tags)}"
        options = []
        if "string" in types and (terminal := self._text(schema)):
            text = self._rules.until(self._named(terminal, tags), tags.end)
            options.append(f"{self._begin(name, tags, 'true')} {text}")
        if others := types - {"string"}:
            begin = self._begin(name, tags, "false")
            options.append(f"{begin} {BLANKS} {self._json(schema, others)} {self._closed(tags)}")
        if not options:
            raise self._refused("allows no value for an argument")
        return " | ".join(options)

    def _begin(self, name: str, tags: Tags, is_text: str = "") -> str:
        parts = []
        for piece in tags.begin.replace("{text}", is_text).split("{blanks}"):
            before, found, after = piece.partition("{key}")
            if not found or name:
                parts.append(self._rules.mark(before + (name if found else "") + after))
                continue
            others = "".join(f" & ~{literal(each)}" for each in self._names)
            key = self._rules.terminal(rf"/[^\x00-\x1f{re.escape(tags.key_end)}]+/{others}")
            parts.append(f"{self._rules.mark(before)} {key} {self._rules.mark(after)}")
        return f" {BLANKS} ".join(parts)

    def _closed(self, tags: Tags) -> str:
        return f"{BLANKS} {self._rules.mark(tags.end)}"

    def _value(self, schema: Any, types: frozenset[str], read: frozenset[str], tags: Tags) -> str:
        """Return an expression for a value of these types and its closing tag.

        The reader expects the types `read`.
        """
        if "string" not in read:
            return f"{BLANKS} {self._json(schema, types)} {self._closed(tags)}"
        if any(each.keys() <= _NOTES for each in branches(schema, self._root)):
            return self._rules.until(TEXT, tags.end)
        text = self._text(schema) if "string" in types else ""
        others = read - {"string"}
        if text and others:
            text = f"({text}) & ~({' | '.join(_readable(others))})"
        words = self._words(schema, types - {"string"})
        found = " | ".join([*([text] if text else []), *words])
        options = [self._laid_out(found, tags)] if found else []
        # If a value may have every type, the reader takes all text up to the first closing tag,
        # even if this tag is within a JSON string. So such a value cannot be an array or object
        # here.
        if (containers := types & {*_CONTAINERS}) and not read >= ALL_TYPES:
            inner = self._json(schema, containers)
            options.append(self._either_laid_out(inner, tags))
        if not options:
            raise self._refused("has a value of any type that is only JSON")
        return f"({' | '.join(options)})"

    def _laid_out(self, terminal: str, tags: Tags) -> str:
        if not tags.trims or terminal == TEXT:
            return self._rules.until(self._named(terminal, tags), tags.end)
        apart = self._rules.until(self._named(terminal, tags), f"\n{tags.end}")
        close = self._named(rf"({terminal}) & ~/\n(?s:.*)|(?s:.*)\n/", tags)
        return f'"\\n" {apart} | {self._rules.until(close, tags.end)}'

    def _either_laid_out(self, inner: str, tags: Tags) -> str:
        end = self._rules.mark(tags.end)
        return f'"\\n"? {inner} "\\n"? {end}' if tags.trims else f"{inner} {end}"

    def _named(self, terminal: str, tags: Tags) -> str:
        """Return a terminal for those texts of `terminal` that do not contain the closing tag.

        TEXT is returned as it is, because it ends at the closing tag anyway.
        """
        if terminal == TEXT:
            return TEXT
        return self._rules.terminal(f"({terminal}) & ~(TEXT {literal(tags.end)} TEXT)")

    def _json(self, schema: Any, types: frozenset[str]) -> str:
        """Return an expression for the schema's values of these types, as JSON."""
        found = alone(schema, self._root)
        if self._types.of(schema) != types:
            found = alone({"allOf": [schema], "type": sorted(types)}, self._root)
        return self._rules.json(found)

    def _text(self, schema: Any) -> str:
        """Return the body of a terminal for the schema's strings; "" if it allows none."""
        found = [text_terminal(each) for each in branches(schema, self._root)]
        options = list(dict.fromkeys(each for each in found if each))
        return TEXT if TEXT in options else " | ".join(options)

    def _words(self, schema: Any, types: frozenset[str]) -> list[str]:
        """Return terminals for null, the booleans and the numbers that a schema allows."""
        found = []
        for each in branches(schema, self._root):
            kinds = types_of(each) & types
            if "enum" in each:
                values = [value for value in each["enum"] if json_type(value) in _SCALARS]
                found += [literal(json.dumps(value)) for value in values]
                continue
            # These terminals cannot bound a number, so numbers with bounds are left out.
            is_open = not each.keys() & {*BOUNDS}
            found += [literal(word) for kind in sorted(kinds) for word in WORDS.get(kind, ())]
            if kinds & {"number", "integer"} and is_open:
                found.append(f"/{NUMBER if 'number' in kinds else INTEGER}/")
        return list(dict.fromkeys(found))


def _readable(types: frozenset[str]) -> list[str]:
    """Return terminals for strings that the reader would take for values of these types."""
    found = [literal(word) for kind in sorted(types) for word in WORDS.get(kind, ())]
    if types & {"number", "integer"}:
        found.append(f"/{NUMBER}/")
    if types & {*_CONTAINERS}:
        found.append(r"/[\[{](?s:.*)/")
    return found
