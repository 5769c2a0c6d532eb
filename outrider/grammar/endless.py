"""Finds schemas that only endless values satisfy, such as an object that must contain itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Values of these types hold other values, and may be endless. Values of all other types are finite.
_NESTED = {"object", "array"}

Find = Callable[[str], Any]


def is_endless(schemas: list[Any], find: Find) -> bool:
    """True if no finite value satisfies the first schema, which contains the other schemas.

    All schemas are well-formed, and `find` returns the schema that a reference leads to. A schema
    is finite if all schemas that it needs are finite. Schemas that need nothing are found first,
    then schemas that need only these, and so on.
    """
    finite: set[int] = set()
    waiting = [schema for schema in schemas if isinstance(schema, Mapping)]
    while waiting:
        # Inner schemas come after the outer schemas that need them, so begin at the end.
        left = [one for one in reversed(waiting) if not _Finite(finite, find).note(one)]
        left.reverse()
        if len(left) == len(waiting):
            break
        waiting = left
    return bool(waiting) and waiting[0] is schemas[0]


class _Finite:
    """Records which schemas are known to be finite."""

    def __init__(self, known: set[int], find: Find) -> None:
        self._known = known
        self._find = find

    def note(self, schema: Mapping[str, Any]) -> bool:
        """Note a schema as finite if all schemas that it needs are; return whether it is finite."""
        if self._parts(schema) and self._own(schema):
            self._known.add(id(schema))
        return id(schema) in self._known

    def _is(self, schema: Any) -> bool:
        """Return whether an inner schema is known to be finite."""
        return id(schema) in self._known if isinstance(schema, Mapping) else schema is not False

    def _parts(self, schema: Mapping[str, Any]) -> bool:
        """Return whether the schemas that apply to the same value are finite.

        Of alternatives, one finite schema suffices.
        """
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._is(self._find(reference)):
            return False
        if not all(map(self._is, _list(schema, "allOf"))):
            return False
        choices = [_list(schema, name) for name in ("anyOf", "oneOf") if name in schema]
        return all(any(map(self._is, each)) or not each for each in choices)

    def _own(self, schema: Mapping[str, Any]) -> bool:
        """Return whether the schema's other keywords allow a finite value."""
        types = schema.get("type", [])
        types = {types} if isinstance(types, str) else set(types)
        if "const" in schema or "enum" in schema or not types or types - _NESTED:
            return True
        return ("object" in types and self._object(schema)) or (
            "array" in types and self._array(schema)
        )

    def _object(self, schema: Mapping[str, Any]) -> bool:
        properties = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        is_open = "patternProperties" in schema or self._is(rest)
        for name in _list(schema, "required"):
            if not (self._is(properties[name]) if name in properties else is_open):
                return False
        least = schema.get("minProperties", 0)
        return is_open or sum(map(self._is, properties.values())) >= least

    def _array(self, schema: Mapping[str, Any]) -> bool:
        first = _list(schema, "prefixItems") or _list(schema, "items")
        rest = schema.get("items", True)
        if isinstance(rest, list):
            rest = schema.get("additionalItems", True)
        least = schema.get("minItems", 0)
        return all(map(self._is, first[:least])) and (least <= len(first) or self._is(rest))


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []
