"""JSON-schema keywords that a grammar would silently leave out: refused by name, since the answer might then break the schema."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from outrider.errors import invalid

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
    ["date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference", "json-pointer"]
)
_ONLY_OF_OBJECTS = ("patternProperties", "propertyNames", "minProperties", "maxProperties")
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
        raise invalid(field, "has a list of items, which cannot be enforced; its name today is prefixItems")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise invalid(field, f"refers to {str(reference)[:80]}; only references within the schema are followed")
    if "format" in schema and schema["format"] not in _FORMATS:
        raise invalid(field, f"uses the format {str(schema['format'])[:40]!r}, which cannot be enforced")
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        raise invalid(field, "has pattern beside minLength or maxLength, which cannot be enforced together")
    if len(_list(schema, "allOf", field)) > 1:
        raise invalid(field, "has allOf with more than one schema, which cannot be enforced")
    if schema.get("type") != "object" and (loose := [name for name in _ONLY_OF_OBJECTS if name in schema]):
        raise invalid(field, f"has {loose[0]} without type object, which cannot be enforced")
    if not _disjoint(_list(schema, "oneOf", field)):
        raise invalid(field, "has oneOf whose schemas may overlap, which cannot be enforced; anyOf can")


def _disjoint(schemas: list[Any]) -> bool:
    """Whether the schemas' types, or the values they list, tell them apart."""
    return all(_apart(one, other) for one, other in combinations(schemas, 2))


def _apart(one: Any, other: Any) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    types = [_types(schema) for schema in (one, other)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    values = [schema.get("enum", [schema["const"]] if "const" in schema else []) for schema in (one, other)]
    return all(values) and not any(value in values[1] for value in values[0])


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
