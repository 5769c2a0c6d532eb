"""Alternatives of a schema: each allows no more than all parts of the schema allow together."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.grammar.branches import branches


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        ([{"minimum": 5}, {"minimum": 3}], {"minimum": 5}),
        ([{"exclusiveMaximum": 3}, {"exclusiveMaximum": 5}], {"exclusiveMaximum": 3}),
        ([{"minItems": 3}, {"minItems": 1, "maxItems": 4}], {"minItems": 3, "maxItems": 4}),
        ([{"multipleOf": 4}, {"multipleOf": 6}], {"multipleOf": 12}),
        ([{"multipleOf": 0.4}, {"multipleOf": 0.6}], {"multipleOf": 1.2}),
        ([{"enum": [1, "a", None]}, {"type": ["string", "null"]}], {"enum": ["a", None]}),
        ([{"enum": [1, 2, 8]}, {"minimum": 2}, {"multipleOf": 4}], {"enum": [8]}),
        ([{"enum": ["a", "abc"]}, {"minLength": 2}], {"enum": ["abc"]}),
        (
            [{"items": {"type": "integer"}}, {"items": {"minimum": 3}}],
            {"items": {"allOf": [{"type": "integer"}, {"minimum": 3}]}},
        ),
        (
            [{"prefixItems": [{"type": "null"}], "items": False}, {"items": {"minimum": 3}}],
            {"prefixItems": [{"allOf": [{"type": "null"}, {"minimum": 3}]}], "items": False},
        ),
    ],
)
def test_all_parts_of_all_of_bind(parts: list[dict[str, Any]], merged: dict[str, Any]) -> None:
    schema = {"allOf": parts}
    [found] = branches(schema, schema)
    assert {key: found[key] for key in merged} == merged


def test_listed_values_that_no_other_part_allows_leave_no_alternative() -> None:
    schema = {"allOf": [{"enum": [1, 2]}, {"minimum": 3}]}
    assert branches(schema, schema) == []
