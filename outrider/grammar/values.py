"""Parts that the rules for values share in every style: terminals, and the members of objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.errors import OutriderError
from outrider.grammar.branches import Json, Types
from outrider.grammar.lark import TEXT, literal

INTEGER = "-?(?:0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
WORDS = {"null": ("null",), "boolean": ("true", "false")}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def types_of(schema: Json) -> frozenset[str]:
    """Return the types of a schema that refers to no other schema."""
    return Types(schema).of(schema)


def members(schema: Json) -> dict[str, Any]:
    """Return the properties that an object of the schema may or must have, keyed by name."""
    found = dict(schema.get("properties", {}))
    rest = schema.get("additionalProperties", True)
    return found | {name: rest for name in schema.get("required", []) if name not in found}


def check_object(schema: Json, refused: Callable[[str], OutriderError]) -> None:
    """Raise `refused(problem)` for a keyword of objects that the rules do not enforce."""
    if "enum" in schema:
        raise refused("has enum or const for the arguments")
    if "patternProperties" in schema:
        raise refused("has patternProperties or propertyNames")
    if schema.get("minProperties", 0) > len(schema.get("required", [])):
        raise refused("has minProperties")
    if "maxProperties" in schema:
        raise refused("has maxProperties")


def text_terminal(branch: Json) -> str:
    """Return a terminal for the texts of a schema without alternatives; "" if it allows no text."""
    if "string" not in types_of(branch):
        return ""
    # Translated patterns have an anchor at either end, and match the whole text.
    parts = [f"/{pattern[1:-1]}/" for pattern in branch.get("patterns", [])]
    if "enum" in branch:
        texts = [value for value in branch["enum"] if isinstance(value, str)]
        parts.append(f"({' | '.join(map(literal, texts))})")
    least, most = branch.get("minLength", 0), branch.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.){{{least},{most}}}/")
    return f"({' & '.join(parts)})" if parts else TEXT
