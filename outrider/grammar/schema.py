"""Refuses JSON schemas that the backends would not enforce in full."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from outrider.errors import OutriderError, invalid
from outrider.grammar.repetition import check_pattern


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keywords that a grammar cannot express or that the backends ignore, found by compiling each.
_UNENFORCED = _names(
    "not if then else dependentRequired dependentSchemas dependencies contains minContains "
    "maxContains uniqueItems unevaluatedProperties unevaluatedItems $dynamicRef"
)
# A grammar enforces their syntax alone, as the specification allows: 31 February is a date.
_FORMATS = _names(
    "date date-time time duration email hostname ipv4 ipv6 uuid uri uri-reference json-pointer"
)
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# Keywords that the backends enforce only beside the type that they apply to.
_OF_TYPE = {
    "number": frozenset([*_BOUNDS, "multipleOf"]),
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "object": _names(
        "properties required additionalProperties patternProperties propertyNames minProperties "
        "maxProperties"
    ),
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems"]),
}
# The backends drop the keywords beside one of these.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
# Keywords that constrain nothing by themselves.
_NOTES = _names(
    "title description default examples $defs definitions $schema $id $anchor $comment "
    "deprecated readOnly writeOnly"
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# XGrammar keeps only the lowest 32 bits of a count. Counts up to this cost neither backend
# anything, nested or not.
_MAX_COUNT = 2**31 - 1
# The number of named properties, times the number that may precede each. XGrammar makes a rule for
# each such pair: 10,000 compile in 1 s, 20,000 in 10 s, and 40,000 in more than 30 s.
_MAX_PAIRS = 10_000
# XGrammar ignores multipleOf with a warning beyond this multiple, and beside a range that holds
# more numbers than this.
_MAX_MULTIPLE = 1024
_MAX_NUMBERS = 10_000
_UNENFORCED_IN_PATTERNS = ("(?=", "(?!", "(?<", '"')
_TYPE_NAMES: dict[type[Any], str] = {
    int: "number",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}
# Keywords that hold schemas: by name, in a list, and alone.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "propertyNames")
_MAX_NESTING = 64


def check_schema(schema: Any, field: str, depth: int = 0) -> None:
    """Check a schema and those in it; raises OutriderError(INVALID_VALUE) for an invalid keyword.

    The error names `field`, the request's parameter, and the keyword. `depth` counts the schemas
    around this one.
    """
    if depth > _MAX_NESTING:
        raise invalid(field, f"is nested more than {_MAX_NESTING} deep")
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


def _unenforceable(field: str, problem: str) -> OutriderError:
    return invalid(field, f"{problem}, which cannot be enforced")


def _check_keywords(schema: Mapping[str, Any], field: str) -> None:
    """Check one schema's keywords, not those of the schemas in it."""
    refused = sorted(_UNENFORCED & schema.keys())
    if refused:
        raise _unenforceable(field, f"uses {refused[0]}")
    if isinstance(schema.get("items"), list):
        raise invalid(field, "has a list of items, which cannot be enforced; use prefixItems")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        name = str(reference)[:80]
        raise invalid(field, f"refers to {name}; only references within the schema are followed")
    if "format" in schema and schema["format"] not in _FORMATS:
        raise _unenforceable(field, f"uses the format {str(schema['format'])[:40]!r}")
    if len(_list(schema, "allOf", field)) > 1:
        raise _unenforceable(field, "has allOf with more than one schema")
    _check_neighbours(schema, field)
    _check_string(schema, field)
    _check_counts(schema, field)
    _check_multiple(schema, field)
    known = _mapping(schema, "properties", field)
    missing = [name for name in _list(schema, "required", field) if name not in known]
    if missing:
        raise invalid(field, f"requires {str(missing[0])[:40]!r}, which is none of its properties")
    if not _disjoint(_list(schema, "oneOf", field)):
        problem = "has oneOf whose schemas may overlap"
        raise invalid(field, f"{problem}, which cannot be enforced; anyOf can")


def _check_neighbours(schema: Mapping[str, Any], field: str) -> None:
    """Refuse combinations of keywords that the backends do not enforce together."""
    for name in _ALONE:
        allowed = {name}
        if name in ("enum", "const"):
            allowed.add("type")
        beside = sorted(schema.keys() - _NOTES - allowed)
        if name in schema and beside:
            message = f"has {beside[0]} beside {name}, which cannot be enforced together"
            raise invalid(field, message)
    types = _types(schema)
    for kind, names in _OF_TYPE.items():
        present = sorted(names & schema.keys())
        if kind not in types and present:
            raise _unenforceable(field, f"has {present[0]} without a type of {kind}")
    values = _values(schema)
    if values and types and any(_type_of(value) not in types for value in values):
        raise invalid(field, "lists values that are not of its type")


def _check_string(schema: Mapping[str, Any], field: str) -> None:
    """Check lengths and patterns of strings."""
    has_length = "minLength" in schema or "maxLength" in schema
    if has_length and ("pattern" in schema or "format" in schema):
        message = "has a length beside pattern or format, which cannot be enforced together"
        raise invalid(field, message)
    pattern = schema.get("pattern", "")
    if not isinstance(pattern, str) or any(part in pattern for part in _UNENFORCED_IN_PATTERNS):
        raise _unenforceable(field, "has a pattern with lookaround or a quotation mark")
    for text in (pattern, *_mapping(schema, "patternProperties", field)):
        check_pattern(text, field)


def _check_counts(schema: Mapping[str, Any], field: str) -> None:
    """Check bounds on lengths and numbers of items and properties."""
    for name in _COUNTS:
        count = schema.get(name, 0)
        if not isinstance(count, int) or not 0 <= count <= _MAX_COUNT:
            range_text = f"it must be an integer from 0 to {_MAX_COUNT}"
            raise invalid(field, f"has {name} {str(count)[:20]}; {range_text}")
    named = len(_mapping(schema, "properties", field))
    if schema.get("minProperties", 0) or "maxProperties" in schema:
        pairs = named * min(named, schema.get("maxProperties", named))
        if pairs > _MAX_PAIRS:
            problem = f"has {named} properties beside minProperties or maxProperties"
            raise invalid(field, f"{problem}, which takes too long to compile")


def _check_multiple(schema: Mapping[str, Any], field: str) -> None:
    """Check multipleOf and the range beside it."""
    if "multipleOf" not in schema:
        return
    multiple = schema["multipleOf"]
    bounds = [schema[name] for name in _BOUNDS if name in schema]
    if schema.get("type") != "integer" or not all(map(_is_whole, [multiple, *bounds])):
        raise _unenforceable(field, "has multipleOf for other numbers than integers")
    if not 1 <= multiple <= _MAX_MULTIPLE:
        text = f"has multipleOf {str(multiple)[:20]}, which cannot be enforced"
        raise invalid(field, f"{text}; from 1 to {_MAX_MULTIPLE} it can")
    lowest = _inner_bounds(schema, "minimum", "exclusiveMinimum", 1)
    highest = _inner_bounds(schema, "maximum", "exclusiveMaximum", -1)
    if bounds and not (lowest and highest and min(highest) - max(lowest) < _MAX_NUMBERS):
        text = f"a range that is open or has over {_MAX_NUMBERS} numbers"
        raise _unenforceable(field, f"has multipleOf beside {text}")


def _inner_bounds(
    schema: Mapping[str, Any], inclusive: str, exclusive: str, step: int
) -> list[float]:
    """The bounds of a range of integers; `step` leads from an excluded number into the range."""
    bounds = []
    if inclusive in schema:
        bounds.append(schema[inclusive])
    if exclusive in schema:
        bounds.append(schema[exclusive] + step)
    return bounds


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _disjoint(schemas: list[Any]) -> bool:
    """Whether types or listed values show that no value satisfies two of the schemas."""
    return all(_is_disjoint(one, other) for one, other in combinations(schemas, 2))


def _is_disjoint(one: Any, other: Any) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    types = [_types(schema) for schema in (one, other)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    values = [_values(schema) for schema in (one, other)]
    return all(values) and not any(value in values[1] for value in values[0])


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that the schema lists in enum or const."""
    if "const" in schema and "enum" not in schema:
        return [schema["const"]]
    found = schema.get("enum", [])
    return found if isinstance(found, list) else []


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return _TYPE_NAMES[type(value)]


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The schema's types, with number for integer; empty where it names none."""
    kinds = schema.get("type", [])
    if isinstance(kinds, str):
        kinds = [kinds]
    elif not isinstance(kinds, list):
        kinds = []
    return {"number" if kind == "integer" else str(kind) for kind in set(kinds)}


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
