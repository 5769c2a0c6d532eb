"""Ten schemas of the kinds that applications ask for: calls, records, settings and documents."""

from __future__ import annotations

import json
from typing import Any

from outrider.grammar.kinds import Grammar, GrammarKind

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_CLOSED: Schema = {"type": "object", "additionalProperties": False}
_POINT: Schema = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3}

EVERYDAY: dict[str, Schema] = {
    "a call of a function": {
        **_CLOSED,
        "properties": {
            "name": {"const": "get_weather"},
            "arguments": {
                **_CLOSED,
                "properties": {"city": _TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["city"],
            },
        },
        "required": ["name", "arguments"],
    },
    "a choice of calls": {
        "anyOf": [
            {**_CLOSED, "properties": {"tool": {"const": tool}, "input": value}}
            for tool, value in (("add", {"type": "integer"}), ("say", _TEXT))
        ]
    },
    "a package": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z][a-z0-9-]*$", "maxLength": 214},
            "version": {"type": "string", "pattern": "^\\d+\\.\\d+\\.\\d+$"},
            "private": {"type": "boolean"},
            "dependencies": {"type": "object", "additionalProperties": _TEXT},
            "keywords": {"type": "array", "items": _TEXT},
        },
        "required": ["name", "version"],
    },
    "a feature on a map": {
        **_CLOSED,
        "properties": {
            "type": {"const": "Feature"},
            "geometry": {
                "oneOf": [
                    {"type": "null"},
                    {
                        **_CLOSED,
                        "properties": {"type": {"const": "Point"}, "coordinates": _POINT},
                        "required": ["type", "coordinates"],
                    },
                ]
            },
            "properties": {"type": ["object", "null"]},
        },
        "required": ["type", "geometry"],
    },
    "a tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                **_CLOSED,
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value"],
            }
        },
    },
    "an event": {
        **_CLOSED,
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "at": {"type": "string", "format": "date-time"},
            "from": {"type": "string", "format": "email"},
            "level": {"type": "integer", "minimum": 0, "exclusiveMaximum": 8},
            "share": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["id", "at"],
    },
    "an order": {
        **_CLOSED,
        "properties": {
            "number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
            "state": {"enum": ["new", "paid", "sent", "returned", None]},
            "lines": {
                "type": "array",
                "items": {
                    **_CLOSED,
                    "properties": {
                        "article": {"type": "string", "minLength": 1, "maxLength": 40},
                        "count": {"type": "integer", "minimum": 1, "maximum": 999},
                        "price": {"type": "number"},
                    },
                    "required": ["article", "count", "price"],
                },
                "minItems": 1,
                "maxItems": 20,
            },
        },
        "required": ["number", "state", "lines"],
    },
    "labels": {
        "type": "object",
        "patternProperties": {"^[a-z]+/[a-z]+$": {"type": "string", "maxLength": 63}},
        "additionalProperties": False,
    },
    "an inherited record": {
        "allOf": [
            {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
            {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]},
        ]
    },
    "a row of a table": {
        "type": "array",
        "prefixItems": [_TEXT, {"type": "integer", "multipleOf": 5}, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
}


def grammar_for(schema: Any) -> Grammar:
    """Return the grammar of a schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
