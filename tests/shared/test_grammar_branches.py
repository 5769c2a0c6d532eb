"""Each alternative of a schema allows only what every part of the schema allows."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.grammar.branches import NotEnforceable, branches

NULL = {"type": ["null"]}


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        ([{"minimum": 5}, {"minimum": 3}], {"minimum": 5}),
        ([{"exclusiveMaximum": 3}, {"exclusiveMaximum": 5}], {"exclusiveMaximum": 3}),
        ([{"minItems": 3}, {"minItems": 1, "maxItems": 4}], {"minItems": 3, "maxItems": 4}),
        ([{"multipleOf": 4}, {"multipleOf": 6}], {"multipleOf": 12}),
        ([{"enum": [1, "a", None]}, {"type": ["string", "null"]}], {"enum": ["a", None]}),
        ([{"enum": [1, 2, 8]}, {"minimum": 2}, {"multipleOf": 4}], {"enum": [8]}),
        ([{"enum": ["a", "abc"]}, {"minLength": 2}], {"enum": ["abc"]}),
        ([{"enum": [1.5, 2.0, 3]}, {"type": "integer"}], {"enum": [2, 3]}),
        ([{"const": "a"}, {"enum": ["a", "b"]}], {"enum": ["a"]}),
        ([{"items": {"type": "null"}}, {"minItems": 1}], {"items": {"type": "null"}}),
        ([{"minimum": 5, "maximum": 3}, {"type": ["integer", "string"]}], {"type": ["string"]}),
        ([{"minimum": 1, "maximum": 4}, {"multipleOf": 5, "type": ["number", "null"]}], NULL),
        ([{"minLength": 3}, {"maxLength": 2, "type": ["null", "string"]}], NULL),
    ],
)
def test_all_parts_of_all_of_bind(parts: list[dict[str, Any]], merged: dict[str, Any]) -> None:
    schema = {"allOf": parts}
    [found] = branches(schema, schema)
    assert {key: found[key] for key in merged} == merged


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"enum": [1, 2]}, {"minimum": 3}]},
        {"const": "a", "enum": ["b"]},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
    ],
)
def test_a_schema_that_contradicts_itself_has_no_alternative(schema: dict[str, Any]) -> None:
    assert branches(schema, schema) == []


def test_of_several_alternatives_only_possible_ones_are_left() -> None:
    narrow = {"anyOf": [{"minimum": 0, "maximum": 3}, {"minimum": 4, "maximum": 7}]}
    schema = {"type": "integer", "allOf": [{"minimum": 5, "maximum": 9}, narrow]}
    assert branches(schema, schema) == [{"type": "integer", "minimum": 5, "maximum": 7}]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"allOf": [{"items": {"type": "null"}}, {"items": {"minimum": 3}}]}, "two places"),
        ({"oneOf": [{"minimum": 0}, {"maximum": 9}]}, "overlap"),
    ],
)
def test_what_rules_cannot_enforce_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotEnforceable, match=reason):
        branches(schema, schema)


@pytest.mark.parametrize("keyword", ["properties", "additionalProperties"])
def test_schemas_that_contain_themselves_twice_do_not_grow(keyword: str) -> None:
    inner: Any = {"$ref": "#/$defs/N"}
    part = {keyword: {"c": inner} if keyword == "properties" else inner}
    schema: Any = {"$defs": {"N": {"allOf": [part, {**part, "minProperties": 1}]}}, **inner}
    for _ in range(30):
        [found] = branches(schema, {"$defs": {"N": {"allOf": [part, {**part, "title": "x"}]}}})
        schema = found[keyword]["c"] if keyword == "properties" else found[keyword]
    assert len(str(schema)) < 1000
