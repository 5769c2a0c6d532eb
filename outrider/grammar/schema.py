"""Translates JSON schemas so that LLGuidance interprets them correctly, or refuses a keyword.

Patterns are written in a small dialect (see `regex`). Formats and propertyNames become patterns.
oneOf becomes anyOf where no value can satisfy two of its schemas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from outrider.errors import OutriderError, invalid
from outrider.grammar.endless import is_endless
from outrider.grammar.formats import PATTERNS, UNENFORCED
from outrider.grammar.regex import literal, schema_pattern, schema_text
from outrider.grammar.repetition import check_pattern
from outrider.grammar.schema_versions import Draft, check_form, check_references, draft_of

# Keywords that LLGuidance does not enforce.
_UNENFORCED = frozenset(
    [
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("contains", "minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems"),
        *("$dynamicRef", "$recursiveRef"),
    ]
)
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Keywords that do not restrict a value, or that are translated to other keywords. LLGuidance would
# take options from x-guidance.
_DROPPED = ("x-guidance", "$id", "id", "format", "propertyNames", "uniqueItems")
# The largest count that most implementations take.
_MAX_COUNT = 2**31 - 1
# Above the first number, 64-bit floats leave out some integers. Below the second number, a decimal
# fraction is so long that LLGuidance cannot compile a range.
_MAX_NUMBER = 2**53
_MIN_NUMBER = 1e-15
# The number of states that a mask needs grows with the multiple, and LLGuidance keeps a common
# multiple in 32 bits.
_MAX_MULTIPLE = 1024
_MAX_COMMON_MULTIPLE = 2**31 - 1
_MAX_NESTING = 64
# Keywords whose value may be an object of named schemas, a list of schemas, or one schema.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "propertyNames")
_TYPE_NAMES: dict[type[Any], str] = {
    int: "number",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}


def translate_schema(schema: Any, field: str) -> Any:
    """Check a JSON schema and translate it.

    Raises OutriderError(INVALID_VALUE) that names `field`, the request's parameter, and the
    keyword.
    """
    if schema is False:
        raise invalid(field, "allows no text at all")
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise invalid(field, f"must be an object or a boolean, not {type(schema).__name__}")
    draft = draft_of(schema, field)
    check_references(schema, field)
    translator = _Translator(field, draft)
    translated = translator.translate(schema, ())
    translator.check_references()
    check_form(schema, draft, field)
    translator.check_end()
    return translated


def unenforceable(field: str, problem: str) -> OutriderError:
    """Return the error for a schema that is valid, but that cannot be enforced."""
    return invalid(field, f"{problem}, which cannot be enforced")


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the schema's types, with number in place of integer; empty if it names no type."""
    kinds = schema.get("type", [])
    if isinstance(kinds, str):
        kinds = [kinds]
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that the schema lists in enum or const."""
    if "const" in schema and "enum" not in schema:
        return [schema["const"]]
    return list(schema.get("enum", []))


def type_of(value: Any) -> str:
    """Return the type of a JSON value; number for every number, also for an integer."""
    if isinstance(value, bool):
        return "boolean"
    return _TYPE_NAMES[type(value)]


class _Translator:
    """Translates one schema and the schemas in it."""

    def __init__(self, field: str, draft: Draft) -> None:
        self._field, self._draft = field, draft
        self._places: dict[tuple[str, ...], Any] = {}
        self._anchors: list[tuple[str, Any]] = []
        self._references: list[str] = []
        self._common_multiple = 1

    def translate(self, schema: Any, place: tuple[str, ...], depth: int = 0) -> Any:
        """Return the translated schema; `place` is its path within the whole schema."""
        if depth > _MAX_NESTING:
            raise invalid(self._field, f"is nested more than {_MAX_NESTING} deep")
        self._places[place] = schema
        if not isinstance(schema, Mapping):
            # The schema is a boolean: the metaschema's check refuses all other values.
            return schema
        self._check(schema, place)
        found = dict(schema)
        for name in _DROPPED:
            found.pop(name, None)
        if place:
            found.pop("$schema", None)
        self._translate_inner(found, place, depth + 1)
        _translate_bounds(found)
        self._translate_strings(schema, found)
        self._translate_names(schema, found)
        if not _overlapping(schema.get("oneOf")):
            _add(found, "anyOf", found.pop("oneOf", None))
        return found

    def check_references(self) -> None:
        """Check that each reference leads to exactly one of the translated schemas."""
        for reference in self._references:
            if len(self._found(reference)) != 1:
                problem = f"has $ref {reference[:80]!r}, which leads to no schema in it"
                raise invalid(self._field, problem)

    def check_end(self) -> None:
        """Check that some value of the schema is finite.

        Call it after the form and references are checked.
        """
        if is_endless(list(self._places.values()), lambda reference: self._found(reference)[0]):
            problem = "allows no text that ends: each value must hold another of its kind"
            raise invalid(self._field, problem)

    def _found(self, reference: str) -> list[Any]:
        """Return the schemas that a reference leads to."""
        name = reference[1:]
        place = tuple(_unescaped(part) for part in name.split("/")[1:])
        if "/" in name or not name:
            return [self._places[place]] if place in self._places else []
        return [schema for anchor, schema in self._anchors if anchor == name]

    def _translate_inner(self, found: dict[str, Any], place: tuple[str, ...], depth: int) -> None:
        for name in _MAPS:
            if isinstance(found.get(name), Mapping):
                found[name] = {
                    key: self.translate(inner, (*place, name, key), depth)
                    for key, inner in found[name].items()
                }
        for name in _LISTS:
            if isinstance(found.get(name), list):
                found[name] = [
                    self.translate(inner, (*place, name, str(i)), depth)
                    for i, inner in enumerate(found[name])
                ]
        for name in _SINGLE:
            if isinstance(found.get(name), Mapping):
                found[name] = self.translate(found[name], (*place, name), depth)

    def _translate_strings(self, schema: Mapping[str, Any], found: dict[str, Any]) -> None:
        """Translate patterns, and formats to patterns."""
        if isinstance(schema.get("pattern"), str):
            found["pattern"] = self._pattern(schema["pattern"])
        if (form := _enforced_format(schema)) is not None:
            pattern = self._pattern(form)
            if "pattern" in found:
                _add(found, "allOf", [{"pattern": pattern}])
            else:
                found["pattern"] = pattern
        patterns = schema.get("patternProperties")
        if isinstance(patterns, Mapping):
            translated = [self._pattern(pattern) for pattern in patterns]
            if len(set(translated)) < len(translated):
                raise unenforceable(self._field, "has patternProperties with equal patterns")
            found["patternProperties"] = dict(
                zip(translated, found["patternProperties"].values(), strict=True)
            )

    def _translate_names(self, schema: Mapping[str, Any], found: dict[str, Any]) -> None:
        """Translate propertyNames to patternProperties."""
        names = schema.get("propertyNames", True)
        if names is True or names == {}:
            return
        keywords = ("pattern", "format", "enum", "const", "type")
        used = [] if names is False else [key for key in names if key in keywords[:4]]
        alone = not schema.keys() & {"properties", "patternProperties", "required"}
        if names is False or not alone or len(used) != 1 or names.keys() - {*keywords}:
            problem = "has propertyNames that are more than one pattern, format, enum or const"
            raise unenforceable(self._field, f"{problem}, or are beside named properties")
        if names.get("type", "string") != "string":
            raise unenforceable(self._field, "has propertyNames of another type than string")
        key, value = used[0], names[used[0]]
        if key in ("enum", "const"):
            texts = [text for text in values_of(names) if isinstance(text, str)]
            pattern = f"^(?:{'|'.join(map(literal, texts))})$"
        else:
            found_pattern = value if key == "pattern" else _enforced_format(names)
            if found_pattern is None:
                raise unenforceable(self._field, f"has propertyNames of the format {value!r}")
            pattern = found_pattern
        rest = found.get("additionalProperties", True)
        found["patternProperties"] = {self._pattern(pattern): rest}
        found["additionalProperties"] = False

    def _pattern(self, pattern: str) -> str:
        check_pattern(pattern, self._field)
        return f"^(?:{schema_pattern(pattern, self._field)})$"

    def _check(self, schema: Mapping[str, Any], place: tuple[str, ...]) -> None:
        """Check the keywords of one schema, without the schemas in it."""
        refused = sorted(_UNENFORCED & schema.keys())
        if schema.get("uniqueItems"):
            refused.append("uniqueItems")
        if refused:
            raise unenforceable(self._field, f"uses {refused[0]}")
        if place and ("$id" in schema or isinstance(schema.get("id"), str)):
            raise unenforceable(self._field, "has $id within the schema")
        if "$schema" in schema and draft_of(schema, self._field) is not self._draft:
            raise unenforceable(self._field, "has $schema of another draft within the schema")
        if isinstance(schema.get("$ref"), str):
            self._references.append(schema["$ref"])
        if isinstance(schema.get("$anchor"), str):
            self._anchors.append((schema["$anchor"], schema))
        form = schema.get("format")
        if isinstance(form, str) and form in UNENFORCED and _may_be_text(schema):
            raise unenforceable(self._field, f"uses the format {form!r}")
        self._check_counts(schema)
        self._check_numbers(schema)
        for keyword in ("const", "enum", "properties", "required"):
            if keyword in schema:
                self._check_value(schema[keyword], keyword, names_only=keyword == "properties")

    def _check_counts(self, schema: Mapping[str, Any]) -> None:
        """Check bounds on lengths and numbers of items and properties."""
        for name in _COUNTS:
            count = schema.get(name, 0)
            if not isinstance(count, int) or not 0 <= count <= _MAX_COUNT:
                range_text = f"it must be an integer from 0 to {_MAX_COUNT}"
                raise invalid(self._field, f"has {name} {str(count)[:20]}; {range_text}")
        required = schema.get("required", [])
        named = len(required) if isinstance(required, list) else 0
        closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
        if schema.get("minProperties", 0) > named + 1 and not closed:
            # A model may write the same name twice, which counts as one property.
            problem = "has minProperties of more than one property whose name is open"
            raise unenforceable(self._field, problem)

    def _check_numbers(self, schema: Mapping[str, Any]) -> None:
        """Check bounds and multiples."""
        for name in BOUNDS:
            if name in schema:
                self._check_number(schema[name], name)
        if "multipleOf" not in schema:
            return
        multiple = schema["multipleOf"]
        if not isinstance(multiple, int | float) or not 1 <= multiple <= _MAX_MULTIPLE:
            range_text = f"from 1 to {_MAX_MULTIPLE} it can"
            problem = f"has multipleOf {str(multiple)[:20]}"
            raise invalid(self._field, f"{problem}, which cannot be enforced; {range_text}")
        if multiple != int(multiple):
            raise unenforceable(self._field, f"has multipleOf {multiple}, which is no integer")
        self._common_multiple = math.lcm(self._common_multiple, int(multiple))
        if self._common_multiple > _MAX_COMMON_MULTIPLE:
            raise unenforceable(self._field, "has too many different multipleOf")

    def _check_number(self, value: Any, keyword: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            # A draft-4 exclusiveMinimum may be a boolean; the metaschema refuses other values.
            return
        size = abs(value)
        if size and not _MIN_NUMBER <= size <= _MAX_NUMBER:
            range_text = f"numbers from {_MIN_NUMBER:g} to {_MAX_NUMBER} can"
            problem = f"has {keyword} {str(value)[:20]}, which cannot be enforced"
            raise invalid(self._field, f"{problem}; {range_text}")

    def _check_value(self, value: Any, keyword: str, *, names_only: bool = False) -> None:
        """Check a keyword's numbers and strings; with `names_only`, only its property names."""
        if isinstance(value, str):
            schema_text(value, keyword, self._field)
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                schema_text(name, keyword, self._field)
                if not names_only:
                    self._check_value(inner, keyword)
        elif isinstance(value, list):
            for inner in value:
                self._check_value(inner, keyword)
        else:
            self._check_number(value, keyword)


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    types = types_of(schema) if isinstance(schema.get("type", ""), str | list) else set()
    return not types or "string" in types


def _enforced_format(schema: Mapping[str, Any]) -> str | None:
    """Return the pattern of the schema's format; None for a format that is not enforced."""
    form = schema.get("format")
    return PATTERNS.get(form) if isinstance(form, str) and _may_be_text(schema) else None


def _translate_bounds(schema: dict[str, Any]) -> None:
    """Write each exclusive bound as a number, and none of them as 0.

    In draft 4 an exclusive bound is a flag beside the inclusive bound. LLGuidance allows 0 in a
    range that excludes 0 and ends below 1, so the enforceable number nearest to 0 replaces 0.
    """
    for exclusive, inclusive, least, inner in (
        ("exclusiveMinimum", "minimum", _MIN_NUMBER, max),
        ("exclusiveMaximum", "maximum", -_MIN_NUMBER, min),
    ):
        if isinstance(schema.get(exclusive), bool):
            is_set = schema.pop(exclusive)
            if is_set and inclusive in schema:
                schema[exclusive] = schema.pop(inclusive)
        if schema.get(exclusive) == 0:
            del schema[exclusive]
            schema[inclusive] = inner(schema.get(inclusive, least), least)


def _add(schema: dict[str, Any], keyword: str, parts: Sequence[Any] | None) -> None:
    """Add a keyword with a list of schemas; if the schema has it already, both lists apply."""
    if parts is None:
        return
    if keyword not in schema:
        schema[keyword] = list(parts)
    elif keyword == "allOf":
        schema[keyword] = [*schema[keyword], *parts]
    else:
        _add(schema, "allOf", [{keyword: list(parts)}])


def _unescaped(part: str) -> str:
    """Return a part of a JSON pointer in a URI's fragment, with all escapes decoded."""
    from urllib.parse import unquote

    return unquote(part).replace("~1", "/").replace("~0", "~")


def _overlapping(schemas: Any) -> bool:
    """Return whether a value may satisfy two of the schemas of oneOf."""
    if not isinstance(schemas, list):
        return False
    return not all(_is_disjoint(one, other) for one, other in combinations(schemas, 2))


def _is_disjoint(one: Any, other: Any) -> bool:
    """True if types or listed values show that no value satisfies both schemas."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    types = [_known_types(schema) for schema in (one, other)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    values = [_known_values(schema) for schema in (one, other)]
    return all(values) and not any(value in values[1] for value in values[0])


def _known_types(schema: Mapping[str, Any]) -> set[str]:
    kinds = schema.get("type")
    return types_of(schema) if isinstance(kinds, str | list) else set()


def _known_values(schema: Mapping[str, Any]) -> list[Any]:
    return values_of(schema) if isinstance(schema.get("enum", []), list) else []
