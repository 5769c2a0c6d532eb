"""The field types of request bodies: strict objects, Unicode text, and documented limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    model_validator,
)

from outrider.errors import OutriderError, Reason
from outrider.protocol.limits import MAX_LISTED_TOKENS, Range

MAX_KEYS = 128
"""The maximum number of keys of an object with named fields.

All documented bodies have fewer fields.
"""


ignores_unknown: ContextVar[bool] = ContextVar("ignores_unknown", default=False)
"""True if a request's unknown fields are dropped instead of refused."""


class Body(BaseModel):
    """A JSON object without unknown fields and without silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        """Raise OutriderError(INVALID_VALUE) for too many keys and for keys that are not text.

        Pydantic would take seconds to report thousands of unknown keys.
        """
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_KEYS:
            message = f"an object of the body has {len(values)} keys, more than {MAX_KEYS}"
            raise OutriderError(Reason.INVALID_VALUE, message)
        for key in values:
            try:
                check_unicode(key)
            except ValueError as problem:
                message = f"the key {ascii(key)[:60]} {problem}"
                raise OutriderError(Reason.INVALID_VALUE, message) from problem
        if ignores_unknown.get() and cls.model_config.get("extra") == "forbid":
            known = {field.alias or name for name, field in cls.model_fields.items()}
            return {key: value for key, value in values.items() if key in known}
        return values


def check_unicode(text: str) -> str:
    """Return the text itself. Raises ValueError if the text has half of a surrogate pair.

    JSON can spell such a half with an escape, but no tokenizer takes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise ValueError("holds half of a surrogate pair, which is not Unicode text") from cause
    return text


Text = Annotated[str, AfterValidator(check_unicode)]
# The limits of the next two types are for /openapi.json. Later checks enforce them with better
# messages.
TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
Choice = Annotated[Text, WithJsonSchema({"type": "string", "minLength": 1})]
Filled = Annotated[str, Field(min_length=1)]
_Item = TypeVar("_Item")
# Validation stops at the first bad item. Describing thousands of bad items would take seconds.
Listed = Annotated[list[_Item], Field(fail_fast=True)]


def _at_most_entries(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_LISTED_TOKENS:
        raise ValueError(f"must hold at most {MAX_LISTED_TOKENS} entries")
    return value


Entries = Annotated[dict[str, _Item], BeforeValidator(_at_most_entries)]


def limited(description: str | None = None, **limits: int | float) -> Any:
    """Return an optional parameter, with its limits for /openapi.json.

    Later checks enforce them.
    """
    return Field(default=None, description=description, json_schema_extra=dict(limits))


_Body = TypeVar("_Body", bound=Body)


def with_declared(
    settings: type, ranges: Mapping[str, Range]
) -> Callable[[type[_Body]], type[_Body]]:
    """Add an optional parameter to a body for each number and flag of a dataclass.

    A parameter has the name and the type of the dataclass's field, and the range of that name if
    there is a range. A class derived from the body may declare a parameter again in another form.
    """
    types = get_type_hints(settings)

    def extended(body: type[_Body]) -> type[_Body]:
        """Return a class derived from the body, with these parameters."""
        parameters: dict[str, Any] = {}
        for name in [field.name for field in fields(settings) if field.init]:
            if types[name] not in (bool, int, float):
                continue
            parameter = limited()
            if name in ranges:
                parameter = limited(ranges[name].about, **ranges[name].json_schema)
            parameters[name] = (types[name] | None, parameter)
        return create_model(
            body.__name__,
            __base__=body,
            __module__=body.__module__,
            __doc__=body.__doc__,
            **parameters,
        )

    return extended
