"""Refuses translated JSON schemas that XGrammar would not enforce in full.

It serves the schemas within structural tags; LLGuidance serves all other schemas. Found by
compiling each keyword, alone and beside others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.errors import invalid
from outrider.grammar.schema import BOUNDS, type_of, types_of, unenforceable, values_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keywords that are enforced only beside the type that they apply to.
_OF_TYPE = {
    "number": frozenset([*BOUNDS, "multipleOf"]),
    "string": _names("minLength maxLength pattern"),
    "object": _names(
        "properties required additionalProperties patternProperties minProperties maxProperties"
    ),
    "array": _names("items prefixItems minItems maxItems"),
}
# The backend drops the keywords beside such a keyword.
_ALONE = ("$ref", "anyOf", "allOf", "enum", "const")
# Keywords that constrain nothing by themselves.
_NOTES = _names(
    "title description default examples $defs definitions $schema $anchor $comment deprecated "
    "readOnly writeOnly"
)
# The number of named properties, times the number that may precede each. There is a rule for each
# such pair: 10,000 compile in 1 s, 20,000 in 10 s, and 40,000 in more than 30 s.
_MAX_PAIRS = 10_000
# multipleOf is ignored beside a range that holds more numbers than this.
_MAX_NUMBERS = 10_000
# Bounds are written with this many decimals.
_DECIMALS = 6


def check_for_xgrammar(schema: Any, field: str) -> None:
    """Check a translated schema and the schemas in it; raises OutriderError(INVALID_VALUE)."""
    if not isinstance(schema, Mapping):
        return
    _check_neighbours(schema, field)
    _check_objects(schema, field)
    _check_numbers(schema, field)
    for inner in _inner(schema):
        check_for_xgrammar(inner, field)


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        yield from schema.get(name, {}).values()
    for name in ("anyOf", "allOf", "prefixItems"):
        yield from schema.get(name, [])
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield schema[name]


def _check_neighbours(schema: Mapping[str, Any], field: str) -> None:
    """Refuse keywords, and combinations of keywords, that are not enforced."""
    if "oneOf" in schema:
        raise unenforceable(field, "has oneOf whose schemas may overlap")
    if len(schema.get("allOf", [])) > 1:
        raise unenforceable(field, "has allOf with more than one schema")
    if isinstance(schema.get("items"), list):
        raise unenforceable(field, "has a list of items")
    if "$ref" in schema and not f"{schema['$ref']}/".startswith("#/"):
        raise unenforceable(field, f"has $ref {schema['$ref'][:80]!r} to an anchor")
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        raise unenforceable(field, "has a length beside pattern or format")
    for name in _ALONE:
        allowed = {name, "type"} if name in ("enum", "const") else {name}
        beside = sorted(schema.keys() - _NOTES - allowed)
        if name in schema and beside:
            raise unenforceable(field, f"has {beside[0]} beside {name}")
    _check_types(schema, field)


def _check_types(schema: Mapping[str, Any], field: str) -> None:
    types = types_of(schema)
    for kind, names in _OF_TYPE.items():
        present = sorted(names & schema.keys())
        if kind not in types and present:
            raise unenforceable(field, f"has {present[0]} without a type of {kind}")
    values = values_of(schema)
    if types and any(type_of(value) not in types for value in values):
        raise invalid(field, "lists values that are not of its type")


def _check_objects(schema: Mapping[str, Any], field: str) -> None:
    named = schema.get("properties", {})
    missing = [name for name in schema.get("required", []) if name not in named]
    if missing:
        raise invalid(field, f"requires {str(missing[0])[:40]!r}, which is none of its properties")
    for name in named:
        if json.dumps(name, ensure_ascii=False) != f'"{name}"':
            raise unenforceable(field, f"has the property {name[:40]!r}, which needs an escape")
    opened = schema.get("additionalProperties", False) is not False
    if named and (opened or "patternProperties" in schema):
        # A model may write a named property again, as a property whose name is open.
        open_by = "additionalProperties" if opened else "patternProperties"
        raise unenforceable(field, f"has {open_by} beside named properties")
    if schema.get("minProperties", 0) or "maxProperties" in schema:
        pairs = len(named) * min(len(named), schema.get("maxProperties", len(named)))
        if pairs > _MAX_PAIRS:
            problem = f"has {len(named)} properties beside minProperties or maxProperties"
            raise invalid(field, f"{problem}, which takes too long to compile")


def _check_numbers(schema: Mapping[str, Any], field: str) -> None:
    for value in _numbers(values_of(schema)):
        if isinstance(value, float) and format(value, ".17g") != f"{value:g}":
            # It would be written with 17 digits, as 1.1000000000000001.
            raise unenforceable(field, f"lists the number {value}, which is no binary fraction")
    bounds = [schema[name] for name in BOUNDS if name in schema]
    if any(isinstance(bound, bool) or round(bound, _DECIMALS) != bound for bound in bounds):
        problem = f"has a bound that is no number of at most {_DECIMALS} decimals"
        raise unenforceable(field, problem)
    if "multipleOf" not in schema:
        return
    if schema.get("type") != "integer" or any(bound != int(bound) for bound in bounds):
        raise unenforceable(field, "has multipleOf for other numbers than integers")
    lowest = _inner_bounds(schema, "minimum", "exclusiveMinimum", 1)
    highest = _inner_bounds(schema, "maximum", "exclusiveMaximum", -1)
    if bounds and not (lowest and highest and min(highest) - max(lowest) < _MAX_NUMBERS):
        text = f"a range that is open or has over {_MAX_NUMBERS} numbers"
        raise unenforceable(field, f"has multipleOf beside {text}")


def _numbers(value: Any) -> Iterator[float]:
    """All numbers within a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


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
