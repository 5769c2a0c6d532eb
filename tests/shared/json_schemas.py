"""Random JSON schemas, made of the keywords that the backends support, as in JSON Schema's tests.

Every schema allows only texts of bounded length, so answers end whatever the model writes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "size", "kind", "tags", "id", "note", "x", "y", "left", "right", "count", "unit")


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """Return `count` different schemas; the same seed gives the same schemas."""
    rng = random.Random(seed)
    found: dict[str, Schema] = {}
    while len(found) < count:
        make = rng.choice((_object, _object, _array, _tuple, _leaf, _union, _recursive, _referring))
        schema = make(rng, 2)
        found.setdefault(json.dumps(schema, sort_keys=True), schema)
    return list(found.values())


def _any(rng: random.Random, depth: int) -> Schema:
    Maker = Callable[[random.Random, int], Schema]
    makers: tuple[Maker, ...] = (_leaf, _leaf, _object, _array, _tuple, _union)
    return rng.choice(makers if depth > 0 else (_leaf,))(rng, depth - 1)


def _leaf(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-20, 50)
    return rng.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)},
            {
                "type": "integer",
                "exclusiveMinimum": low,
                "exclusiveMaximum": low + rng.randint(2, 30),
            },
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": rng.randint(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": rng.randint(2, 9)},
            {
                "type": "string",
                "pattern": rng.choice(
                    (
                        "^[a-c]{1,4}$",
                        "^v[0-9]\\.[0-9]$",
                        "^(red|green|blue)$",
                        "^[A-Z]{2}-[0-9]{3}$",
                    )
                ),
            },
            {"type": "string", "format": "uuid"},
            {"enum": rng.sample(["a", "bc", 1, 2.5, None, True, "déf"], rng.randint(1, 4))},
            {"const": rng.choice(("fixed", 7, None, [1, 2], {"k": "v"}))},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        )
    )


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _any(rng, depth),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [_any(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 5}]}
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _recursive(rng: random.Random, depth: int) -> Schema:
    """Return the schema of a linked list of at most 4 nodes; the model chooses where it ends."""
    value = _leaf(rng, 0)
    node = {
        "type": "object",
        "properties": {"v": value},
        "required": ["v"],
        "additionalProperties": False,
    }
    inner: Schema = {"$ref": "#/$defs/end"}
    for _ in range(rng.randint(1, 3)):
        inner = {
            "type": "object",
            "properties": {"v": value, "next": inner},
            "required": ["v"],
            "additionalProperties": False,
        }
    return inner | {"$defs": {"end": node}}


def _referring(rng: random.Random, depth: int) -> Schema:
    return {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/part"},
            "b": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"part": _any(rng, 1)},
    }
