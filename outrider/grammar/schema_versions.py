"""The drafts of JSON Schema that requests may use, and validators for them that fetch nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import (
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
)
from jsonschema.protocols import Validator
from referencing import Registry

from outrider.errors import invalid

Draft = type[Validator]
# Draft 3 has other keywords, which no backend reads.
DRAFTS: Mapping[str, Draft] = {
    "http://json-schema.org/draft-04/schema": Draft4Validator,
    "http://json-schema.org/draft-06/schema": Draft6Validator,
    "http://json-schema.org/draft-07/schema": Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": Draft202012Validator,
}
_USUAL = "https://json-schema.org/draft/2020-12/schema"
# jsonschema's own registry reads files and opens addresses. This registry retrieves nothing;
# jsonschema adds its own metaschemas.
_CLOSED: Registry[Any] = Registry()
# A reference leads out of the schema unless it is a fragment, as "#/$defs/a" is.
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords whose values are data, whatever they look like.
_DATA = frozenset(["const", "enum", "default", "examples", "example"])
# Keywords whose value is an object with a schema under each name.
_MAPS = frozenset(
    [
        *("properties", "patternProperties", "$defs", "definitions"),
        *("dependentSchemas", "dependencies"),
    ]
)


def draft_of(schema: Any, field: str) -> Draft:
    """Return the draft that a schema names; 2020-12 where it names none.

    Raises OutriderError(INVALID_VALUE) that names `field` for a draft that is not known.
    """
    name = schema.get("$schema", _USUAL) if isinstance(schema, Mapping) else _USUAL
    draft = DRAFTS.get(name.removesuffix("#")) if isinstance(name, str) else None
    if draft is None:
        known = ", ".join(DRAFTS)
        raise invalid(field, f"has $schema {str(name)[:80]!r}; it must be one of {known}")
    return draft


def validator(schema: Any, draft: Draft) -> Validator:
    """Return a validator that fetches nothing, and checks formats too."""
    return draft(schema, registry=_CLOSED, format_checker=draft.FORMAT_CHECKER)


def check_form(schema: Mapping[str, Any], draft: Draft, field: str) -> None:
    """Check the form of all keywords by the draft's metaschema.

    Raises OutriderError(INVALID_VALUE) that names `field` and the place.
    """
    problem = next(validator(draft.META_SCHEMA, draft).iter_errors(dict(schema)), None)
    if problem is not None:
        place = "/".join(map(str, problem.absolute_path)) or "the top"
        raise invalid(field, f"is no JSON schema at {place[:80]}: {problem.message[:120]}")


def check_references(schema: Mapping[str, Any], field: str) -> None:
    """Check that no keyword has a reference that leads out of the schema.

    Raises OutriderError(INVALID_VALUE) that names `field` and the reference.
    """
    for inner in _schemas(schema):
        for keyword in _REFERENCES:
            reference = inner.get(keyword)
            if isinstance(reference, str) and not reference.startswith("#"):
                problem = f"has {keyword} {reference[:80]!r}"
                raise invalid(field, f"{problem}; only references within it are followed")


def _schemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the schema, and the objects in it that some draft may take for schemas."""
    waiting: list[Any] = [schema]
    while waiting:
        found = waiting.pop()
        if isinstance(found, list):
            waiting += found
        elif isinstance(found, Mapping):
            yield found
            for keyword, value in found.items():
                if keyword in _MAPS and isinstance(value, Mapping):
                    waiting += value.values()
                elif keyword not in _DATA:
                    waiting.append(value)
