"""Arguments in tags become JSON, whatever the model writes and the tool's schema says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.tools.formats import FORMATS
from gateway.tools.reader import AnswerReader, CallArguments, Reading

ODD_SCHEMAS: list[dict[str, Any]] = [
    {"properties": None},
    {"properties": []},
    {"properties": {"x": {"type": None}}},
    {"properties": {"x": {"type": 3}}},
    {"properties": {"x": {"anyOf": None}}},
    {"properties": {"x": {"enum": 5}}},
    {"properties": {"x": 7}},
]


def arguments(schema: dict[str, Any], value: str) -> str:
    form = FORMATS["qwen_3_coder"]
    reader = AnswerReader(Reading(form, {"f": schema}))
    marks = form.calls[0]
    tags = f"<parameter=x>\n{value}\n</parameter>"
    text = marks.begin.replace("{name}", "f") + tags + marks.end
    parts = [*reader.push(text), *reader.finish()]
    return "".join(part.text for part in parts if isinstance(part, CallArguments))


def strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    text.encode()
    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("schema", ODD_SCHEMAS, ids=str)
def test_an_odd_schema_stands_for_any_value(schema: dict[str, Any]) -> None:
    assert strict(arguments(schema, "5")) == {"x": 5}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_json_cannot_hold_is_a_text(value: str) -> None:
    assert strict(arguments({}, value)) == {"x": value}


def test_half_of_a_surrogate_pair_stays_an_escape() -> None:
    assert strict(arguments({}, '["\\ud800"]')) == {"x": ["\ud800"]}
