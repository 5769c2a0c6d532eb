"""A schema that only endless values satisfy is refused; recursion that may end is not refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from outrider.errors import OutriderError
from tests.shared.grammar_texts import compiler, schema, walk

SELF = {"$ref": "#"}


def an_object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that must have these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def with_parts(top: Any, **parts: Any) -> dict[str, Any]:
    """Return a schema with these definitions."""
    return {**top, "$defs": parts}


def to(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


ENDLESS: list[Any] = [
    SELF,
    {"allOf": [SELF]},
    {"anyOf": [SELF, {"allOf": [SELF]}]},
    an_object(a=SELF),
    an_object(a={"type": "integer"}, b=an_object(c=SELF)),
    {"type": ["object", "array"], "required": ["a"], "additionalProperties": SELF, "minItems": 1}
    | {"items": SELF},
    {"type": "object", "required": ["a"], "additionalProperties": SELF},
    {"type": "object", "minProperties": 1, "additionalProperties": SELF},
    {"type": "object", "minProperties": 2, "properties": {"a": {}, "b": SELF}}
    | {"additionalProperties": False},
    {"type": "array", "items": SELF, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}, SELF], "minItems": 2},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "minItems": 2}
    | {"items": [{"type": "null"}], "additionalItems": SELF},
    with_parts(to("a"), a=an_object(b=to("b")), b=an_object(a=to("a"))),
    with_parts(to("a"), a=to("b"), b=to("c"), c=to("a")),
    with_parts({"$ref": "#x"}, x={"$anchor": "x", **an_object(y={"$ref": "#x"})}),
    with_parts({"oneOf": [to("a"), to("b")]}, a=an_object(a=to("b")), b=an_object(b=to("a"))),
    {"type": "object", "required": ["a"], "properties": {"a": False}},
]

FINITE: list[Any] = [
    an_object(a={"anyOf": [SELF, {"type": "null"}]}),
    {"type": "object", "properties": {"a": SELF}, "additionalProperties": False},
    {"type": "array", "items": SELF, "maxItems": 2},
    {"type": ["object", "null"], "required": ["a"], "properties": {"a": SELF}},
    with_parts(to("a"), a=an_object(b=to("b")), b={"type": ["integer", "array"], "items": to("a")}),
    with_parts(an_object(a=to("z")), z={"anyOf": [to("y"), {"const": 1}]}, y=an_object(a=to("z"))),
    an_object(a={"enum": [1, {"a": None}]}),
]


@pytest.mark.parametrize("value", ENDLESS, ids=lambda value: json.dumps(value)[:60])
def test_a_schema_without_a_finite_text_is_refused(value: Any) -> None:
    with pytest.raises(OutriderError, match=r"json_schema allows no text (that ends|at all)"):
        compiler().compile(schema(value))


@pytest.mark.parametrize("value", FINITE, ids=lambda value: json.dumps(value)[:60])
def test_recursion_that_may_end_is_taken(value: Any) -> None:
    compiled = compiler().compile(schema(value))
    assert any(walk(compiled, random.Random(seed)) is not None for seed in range(20))


def test_a_long_chain_is_judged_in_the_time_of_a_compile() -> None:
    """This chain refers to earlier schemas, which takes many passes. Later schemas take one."""
    parts = {str(i): an_object(a=to(str(i - 1))) for i in range(1, 700)}
    with pytest.raises(OutriderError, match="no text that ends"):
        compiler().compile(schema(with_parts(to("699"), **parts, **{"0": to("699")})))
