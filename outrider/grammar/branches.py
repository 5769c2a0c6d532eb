"""Takes a JSON schema apart: the types of its values, and its alternatives.

This module works with JSON Schema alone. The gateway uses `Types` for schemas that nobody has
checked yet, and that may be hostile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
ALL_TYPES = frozenset(["null", "boolean", "number", "string", "array", "object"])
"""Every type; `number` stands for `integer` too."""
_MAX_BRANCHES = 256
_TOO_MANY = "has too many alternatives"
_MAX_DEPTH = 64


class NotEnforceable(Exception):
    """Rules cannot enforce a schema. The message says why."""


def json_type(value: Any) -> str:
    """Return the type of a JSON value; `integer` for a number that Python reads as an int."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "array" if isinstance(value, list) else "object"


class Types:
    """Finds the types that values of a schema, or of a schema in it, may have."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: dict[str, frozenset[str]] = {}

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Return the types of the schema's values: names of ALL_TYPES, and perhaps `integer`."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return frozenset() if schema is False else ALL_TYPES
        found = ALL_TYPES
        named = schema.get("type")
        if named is not None:
            found = frozenset(name for name in _list(named) or [named] if isinstance(name, str))
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            found = _common(found, frozenset(map(json_type, values)))
        for part in _list(schema.get("allOf")):
            found = _common(found, self.of(part, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            options = _list(schema.get(keyword))
            if options:
                each = [self.of(option, depth + 1) for option in options]
                found = _common(found, frozenset().union(*each))
        if isinstance(schema.get("$ref"), str):
            found = _common(found, self._of_reference(schema["$ref"], depth))
        return found

    def _of_reference(self, reference: str, depth: int) -> frozenset[str]:
        if reference not in self._found:
            # If the schema refers to itself, the inner reference finds this empty set.
            self._found[reference] = frozenset()
            self._found[reference] = self.of(resolved(self._root, reference), depth + 1)
        return self._found[reference]

    def of_property(self, name: str) -> frozenset[str]:
        """Return the types that the property `name` may have in an object of the whole schema."""
        return self._of_property(self._root, name, [], 0)

    def _of_property(self, schema: Any, name: str, seen: list[str], depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ALL_TYPES
        properties = schema.get("properties")
        found = ALL_TYPES
        if isinstance(properties, Mapping) and name in properties:
            found = self.of(properties[name])
        elif "additionalProperties" in schema:
            found = self.of(schema["additionalProperties"])
        parts = _list(schema.get("allOf"))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.append(reference)
            parts = [*parts, resolved(self._root, reference)]
        for part in parts:
            found = _common(found, self._of_property(part, name, seen, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            options = _list(schema.get(keyword))
            if options:
                each = [self._of_property(option, name, seen, depth + 1) for option in options]
                found = _common(found, frozenset().union(*each))
        return found


def _common(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    found = one & other
    if "integer" in one | other and "number" in one | other:
        both = all("integer" in kinds or "number" in kinds for kinds in (one, other))
        found |= {"integer"} if both and "number" not in found else frozenset()
    return found


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def resolved(root: Any, reference: str) -> Any:
    """Return the schema in `root` that a reference leads to; the schema True if there is none."""
    from urllib.parse import unquote

    found = root
    if not reference.startswith("#"):
        return True
    if not reference.startswith("#/") and reference != "#":
        return _anchored(root, reference[1:])
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return True
    return found


def _anchored(root: Any, name: str) -> Any:
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            if each.get("$anchor") == name:
                return each
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)
    return True


def alone(schema: Any, root: Any, prefix: str = "") -> dict[str, Any]:
    """Return the schema with its own $defs, which have all schemas to which it refers.

    The result needs no root. The names in $defs begin with `prefix`.
    """
    moved = _Moved(root, prefix)
    found = moved.schema(schema if isinstance(schema, Mapping) else {})
    if moved.definitions:
        found["$defs"] = moved.definitions
    if isinstance(root, Mapping) and "$schema" in root:
        found["$schema"] = root["$schema"]
    return found


class _Moved:
    """Copies schemas. `definitions` collects the schemas to which they refer within the root."""

    def __init__(self, root: Any, prefix: str) -> None:
        self._root, self._prefix = root, prefix
        self._names: dict[str, str] = {}
        self.definitions: dict[str, Any] = {}

    def schema(self, value: Json) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, each in value.items():
            if key in ("properties", "patternProperties"):
                made[key] = {name: self._any(inner) for name, inner in each.items()}
            elif key not in ("$defs", "definitions", "$anchor", "$schema"):
                made[key] = each if key in ("enum", "const", "default") else self._any(each)
        if isinstance(value.get("$ref"), str):
            made["$ref"] = f"#/$defs/{self._name(value['$ref'])}"
        return made

    def _any(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._any(each) for each in value]
        return self.schema(value) if isinstance(value, Mapping) else value

    def _name(self, reference: str) -> str:
        if reference not in self._names:
            name = self._names[reference] = f"{self._prefix}{len(self._names)}"
            self.definitions[name] = self._any(resolved(self._root, reference))
        return self._names[reference]


def branches(schema: Any, root: Any, depth: int = 0) -> list[Json]:
    """Return the alternatives of a schema, without anyOf, allOf and references at their top.

    A pattern becomes the list `patterns`. An alternative whose types and bounds no value can
    satisfy is left out. Raises NotEnforceable.
    """
    if depth > _MAX_DEPTH:
        raise NotEnforceable(_TOO_MANY)
    if not isinstance(schema, Mapping):
        return [] if schema is False else [{}]
    # The translator has left oneOf only where a value may satisfy two of its schemas.
    if "oneOf" in schema:
        raise NotEnforceable("has a oneOf whose schemas overlap")
    own = {key: each for key, each in schema.items() if key not in _MIXED}
    if "const" in own:
        const = own.pop("const")
        own["enum"] = _common_values([const], own.get("enum", [const]))
    if "pattern" in own:
        own["patterns"] = [own.pop("pattern")]
    found: list[Json] = [own]
    parts: list[list[Json]] = [branches(each, root, depth + 1) for each in schema.get("allOf", [])]
    if "$ref" in schema:
        parts.append(branches(resolved(root, schema["$ref"]), root, depth + 1))
    if "anyOf" in schema:
        options = [branches(option, root, depth + 1) for option in schema["anyOf"]]
        parts.append([branch for option in options for branch in option])
    for part in parts:
        found = [_both(one, other) for one in found for other in part]
        if len(found) > _MAX_BRANCHES:
            raise NotEnforceable(_TOO_MANY)
    return [branch for branch in map(_narrowed, found) if branch is not None]


def _narrowed(branch: Json) -> Json | None:
    """Return the schema without the types and listed values that its other keywords forbid.

    Return None if nothing is left.
    """
    named = Types({}).of(branch)
    kinds = named - _impossible_kinds(branch)
    if "enum" in branch:
        listed = _allowed_values(branch, kinds)
        return {**branch, "enum": listed} if listed else None
    if kinds == named:
        return branch if kinds else None
    return {**branch, "type": sorted(kinds)} if kinds else None


def _allowed_values(branch: Json, kinds: frozenset[str]) -> list[Any]:
    """Return the listed values of these types that the bounds allow."""
    from jsonschema import Draft202012Validator

    bounds = Draft202012Validator({each: branch[each] for each in _BOUNDS if each in branch})
    found = []
    for value in branch["enum"]:
        if isinstance(value, float) and "number" not in kinds and value.is_integer():
            # A whole number may be written with a fraction of zero.
            value = int(value)
        is_fraction = isinstance(value, float) and "number" not in kinds
        is_of_type = bool(_common(kinds, frozenset([json_type(value)])))
        if is_of_type and not is_fraction and bounds.is_valid(value):
            found.append(value)
    return found


def _impossible_kinds(branch: Json) -> frozenset[str]:
    """Return the types of which the bounds allow no value."""
    found = set()
    for kind, name in (("string", "Length"), ("array", "Items"), ("object", "Properties")):
        if branch.get(f"min{name}", 0) > branch.get(f"max{name}", math.inf):
            found.add(kind)
    least = max(branch.get("minimum", -math.inf), branch.get("exclusiveMinimum", -math.inf))
    most = min(branch.get("maximum", math.inf), branch.get("exclusiveMaximum", math.inf))
    excluded = [branch[each] for each in ("exclusiveMinimum", "exclusiveMaximum") if each in branch]
    if least > most or (least == most and least in excluded):
        found |= {"number", "integer"}
    elif math.isfinite(least) and math.isfinite(most):
        step = int(branch.get("multipleOf", 1))
        first = -(-least // step) * step
        first += step if first in excluded else 0
        if first > most or first in excluded:
            found |= {"integer", "number"} if "multipleOf" in branch else {"integer"}
    return frozenset(found)


_MIXED = ("$ref", "anyOf", "oneOf", "allOf", "$defs", "definitions", "$anchor", "$schema", "title")
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
# Keywords that bound a number or a text.
_BOUNDS = (*_LEAST[:3], *_MOST[:3], "multipleOf")
_ITEMS = ("items", "prefixItems")
_MERGES: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(_LEAST, max),
    **dict.fromkeys(_MOST, min),
    # The translator has refused multiples that are no whole numbers.
    "multipleOf": lambda one, other: math.lcm(int(one), int(other)),
    "type": lambda one, other: sorted(_common(_named_types(one), _named_types(other))),
    "enum": lambda one, other: _common_values(one, other),
    "required": lambda one, other: [*one, *(name for name in other if name not in one)],
    "patterns": lambda one, other: [*one, *other],
}


def _both(one: Json, other: Json) -> Json:
    """Return a schema that allows what both schemas allow. Raises NotEnforceable."""
    found = {**one, **other}
    for keyword in one.keys() & other.keys() & _MERGES.keys():
        found[keyword] = _MERGES[keyword](one[keyword], other[keyword])
    _merge_objects(one, other, found)
    items = [{key: each[key] for key in _ITEMS if key in each} for each in (one, other)]
    if all(items) and items[0] != items[1]:
        raise NotEnforceable("restricts the items of an array in two places")
    return found


def _named_types(value: Any) -> frozenset[str]:
    return frozenset(_list(value) or [value])


def _common_values(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    texts = {json.dumps(value, sort_keys=True) for value in other}
    return [value for value in one if json.dumps(value, sort_keys=True) in texts]


def _merge_objects(one: Json, other: Json, found: dict[str, Any]) -> None:
    """Merge the properties. A property that only one schema names is additional in the other."""
    keywords = ("properties", "additionalProperties")
    if not any(keyword in schema for keyword in keywords for schema in (one, other)):
        return
    names = [*one.get("properties", {}), *other.get("properties", {})]
    found["properties"] = {
        name: _all([_property(one, name), _property(other, name)]) for name in dict.fromkeys(names)
    }
    rest = [schema.get("additionalProperties", True) for schema in (one, other)]
    found["additionalProperties"] = _all(rest)


def _property(schema: Json, name: str) -> Any:
    return schema.get("properties", {}).get(name, schema.get("additionalProperties", True))


def _all(schemas: Sequence[Any]) -> Any:
    """Return a schema that allows only what all of these schemas allow."""
    held: list[Any] = []
    for schema in schemas:
        # Nested lists would double at each level of a schema that contains itself.
        is_list = isinstance(schema, Mapping) and schema.keys() == {"allOf"}
        parts = schema["allOf"] if is_list else [schema]
        held += [part for part in parts if part is not True and part != {} and part not in held]
    if False in held:
        return False
    if len(held) > 1:
        return {"allOf": held}
    return held[0] if held else True
