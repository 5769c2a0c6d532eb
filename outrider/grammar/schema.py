"""JSON-schema keywords that a grammar would silently leave out: refused by name, since the answer might then break the schema."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from outrider.errors import invalid
from outrider.grammar.repetition import check_pattern

# Not expressible, or not expressed by the backends (found by compiling each and looking at the grammar).
_UNENFORCED = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
    ]
)
# Kept to as far as a grammar goes, as the specification allows: of a date that there is no 31st of February is not known.
_FORMATS = frozenset(
    [
        "date",
        "date-time",
        "time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "uri-reference",
        "json-pointer",
    ]
)
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# Keywords that the backends keep to only beside the type they speak of.
_OF_TYPE = {
    "number": frozenset([*_BOUNDS, "multipleOf"]),
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "object": frozenset(
        [
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
        ]
    ),
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems"]),
}
# A schema that has one of these is that alone: what stands beside it would be dropped.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_NOTES = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "$defs",
        "definitions",
        "$schema",
        "$id",
        "$anchor",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
    ]
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# XGrammar takes the rest of a count beyond 32 bits for the count. Smaller ones cost neither backend anything, within others or not.
_MOST_COUNT = 2**31 - 1
# Of the properties with a name, times as many of them as may stand before each: XGrammar makes a rule for each pair. A product of
# 10,000 compiles in 1 s, one of 20,000 in 10 s, and of 40,000 in more than 30 s.
_MOST_PAIRS = 10_000
# XGrammar leaves multipleOf out, with a warning, beyond these: the multiple, and the numbers in a range that stands beside it.
_MOST_MULTIPLE, _MOST_NUMBERS = 1024, 10_000
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "propertyNames")
_DEEPEST = 64


def check_schema(schema: Any, field: str, depth: int = 0) -> None:
    """Raises OutriderError(INVALID_VALUE) that names the field and the keyword."""
    if depth > _DEEPEST:
        raise invalid(field, f"is nested more than {_DEEPEST} deep")
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise invalid(field, f"must be an object or a boolean, not {type(schema).__name__}")
    _check_keywords(schema, field)
    for name in _MAPS:
        for inner in _mapping(schema, name, field).values():
            check_schema(inner, field, depth + 1)
    for name in _LISTS:
        for inner in _list(schema, name, field):
            check_schema(inner, field, depth + 1)
    for name in _SINGLE:
        if name in schema and not isinstance(schema[name], list):
            check_schema(schema[name], field, depth + 1)


def _check_keywords(schema: Mapping[str, Any], field: str) -> None:
    if refused := sorted(_UNENFORCED & schema.keys()):
        raise invalid(field, f"uses {refused[0]}, which cannot be enforced")
    if isinstance(schema.get("items"), list):
        raise invalid(
            field, "has a list of items, which cannot be enforced; its name today is prefixItems"
        )
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise invalid(
            field,
            f"refers to {str(reference)[:80]}; only references within the schema are followed",
        )
    if "format" in schema and schema["format"] not in _FORMATS:
        raise invalid(
            field, f"uses the format {str(schema['format'])[:40]!r}, which cannot be enforced"
        )
    if len(_list(schema, "allOf", field)) > 1:
        raise invalid(field, "has allOf with more than one schema, which cannot be enforced")
    _check_company(schema, field)
    _check_string(schema, field)
    _check_counts(schema, field)
    _check_multiple(schema, field)
    known = _mapping(schema, "properties", field)
    if missing := [name for name in _list(schema, "required", field) if name not in known]:
        raise invalid(field, f"requires {str(missing[0])[:40]!r}, which is none of its properties")
    if not _disjoint(_list(schema, "oneOf", field)):
        raise invalid(
            field, "has oneOf whose schemas may overlap, which cannot be enforced; anyOf can"
        )


def _check_company(schema: Mapping[str, Any], field: str) -> None:
    """What stands beside a keyword may keep it from being enforced."""
    for name in _ALONE:
        beside = sorted(
            schema.keys() - _NOTES - {name, *(["type"] if name in ("enum", "const") else [])}
        )
        if name in schema and beside:
            raise invalid(
                field, f"has {beside[0]} beside {name}, which cannot be enforced together"
            )
    types = _types(schema)
    for kind, names in _OF_TYPE.items():
        if kind not in types and (loose := sorted(names & schema.keys())):
            raise invalid(
                field, f"has {loose[0]} without a type of {kind}, which cannot be enforced"
            )
    values = _values(schema)
    if values and types and any(_type_of(value) not in types for value in values):
        raise invalid(field, "lists values that are not of its type")


def _check_string(schema: Mapping[str, Any], field: str) -> None:
    lengths = "minLength" in schema or "maxLength" in schema
    if lengths and ("pattern" in schema or "format" in schema):
        raise invalid(
            field, "has a length beside pattern or format, which cannot be enforced together"
        )
    pattern = schema.get("pattern", "")
    if (
        not isinstance(pattern, str)
        or "(?=" in pattern
        or "(?!" in pattern
        or "(?<" in pattern
        or '"' in pattern
    ):
        raise invalid(
            field, "has a pattern with lookaround or a quotation mark, which cannot be enforced"
        )
    for text in (pattern, *_mapping(schema, "patternProperties", field)):
        check_pattern(text, field)


def _check_counts(schema: Mapping[str, Any], field: str) -> None:
    for name in _COUNTS:
        count = schema.get(name, 0)
        if not isinstance(count, int) or not 0 <= count <= _MOST_COUNT:
            raise invalid(
                field,
                f"has {name} {str(count)[:20]}; it must be an integer from 0 to {_MOST_COUNT}",
            )
    named = len(_mapping(schema, "properties", field))
    if schema.get("minProperties", 0) or "maxProperties" in schema:
        pairs = named * min(named, schema.get("maxProperties", named))
        if pairs > _MOST_PAIRS:
            raise invalid(
                field,
                f"has {named} properties beside minProperties or maxProperties, which takes too long to compile",
            )


def _check_multiple(schema: Mapping[str, Any], field: str) -> None:
    if "multipleOf" not in schema:
        return
    multiple, bounds = schema["multipleOf"], [name for name in _BOUNDS if name in schema]
    if schema.get("type") != "integer" or not all(
        _whole(schema[name]) for name in ("multipleOf", *bounds)
    ):
        raise invalid(
            field, "has multipleOf for other numbers than integers, which cannot be enforced"
        )
    if not 1 <= multiple <= _MOST_MULTIPLE:
        raise invalid(
            field,
            f"has multipleOf {str(multiple)[:20]}, which cannot be enforced; from 1 to {_MOST_MULTIPLE} it can",
        )
    least = [
        schema[name] + step
        for name, step in (("minimum", 0), ("exclusiveMinimum", 1))
        if name in schema
    ]
    most = [
        schema[name] - step
        for name, step in (("maximum", 0), ("exclusiveMaximum", 1))
        if name in schema
    ]
    if bounds and not (least and most and min(most) - max(least) < _MOST_NUMBERS):
        raise invalid(
            field,
            f"has multipleOf beside a range that is open or has over {_MOST_NUMBERS} numbers, which cannot be enforced",
        )


def _whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _disjoint(schemas: list[Any]) -> bool:
    """Whether the schemas' types, or the values they list, tell them apart."""
    return all(_apart(one, other) for one, other in combinations(schemas, 2))


def _apart(one: Any, other: Any) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    types = [_types(schema) for schema in (one, other)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    values = [_values(schema) for schema in (one, other)]
    return all(values) and not any(value in values[1] for value in values[0])


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """Those that the schema lists."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return found if isinstance(found, list) else []


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {
        int: "number",
        float: "number",
        str: "string",
        dict: "object",
        list: "array",
        type(None): "null",
    }
    return names[type(value)]


def _types(schema: Mapping[str, Any]) -> set[str]:
    kinds = schema.get("type", [])
    found = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
    return {"number" if kind == "integer" else str(kind) for kind in found}


def _mapping(schema: Mapping[str, Any], name: str, field: str) -> Mapping[str, Any]:
    found = schema.get(name, {})
    if not isinstance(found, Mapping):
        raise invalid(field, f"has {name} that is no object")
    return found


def _list(schema: Mapping[str, Any], name: str, field: str) -> list[Any]:
    found = schema.get(name, [])
    if not isinstance(found, list):
        raise invalid(field, f"has {name} that is no list")
    return found
