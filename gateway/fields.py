"""The types that request bodies are made of: strict objects, text that is Unicode, and limits for the document."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from outrider.errors import OutriderError, Reason
from outrider.limits import MAX_LISTED_TOKENS

MAX_KEYS = 128
"""Most keys of an object with known keys; there are fewer of these."""


class Body(BaseModel):
    """A JSON object without unknown fields and without silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        """Too many unknown keys would take seconds to list; raises OutriderError(INVALID_VALUE)."""
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_KEYS:
            raise OutriderError(
                Reason.INVALID_VALUE,
                f"an object of the body has {len(values)} keys, more than {MAX_KEYS}",
            )
        for key in values:
            try:
                check_unicode(key)
            except ValueError as problem:
                raise OutriderError(
                    Reason.INVALID_VALUE, f"the key {ascii(key)[:60]} {problem}"
                ) from problem
        return values


def check_unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise ValueError("holds half of a surrogate pair, which is not Unicode text") from cause
    return text


Text = Annotated[str, AfterValidator(check_unicode)]
# For the document alone: these limits are checked where a message can name them as the caller does.
TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
Choice = Annotated[Text, WithJsonSchema({"type": "string", "minLength": 1})]
Filled = Annotated[str, Field(min_length=1)]
_Item = TypeVar("_Item")
# Only its first bad item is told: to describe thousands of them takes seconds.
Listed = Annotated[list[_Item], Field(fail_fast=True)]


def _at_most_entries(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_LISTED_TOKENS:
        raise ValueError(f"must hold at most {MAX_LISTED_TOKENS} entries")
    return value


Entries = Annotated[dict[str, _Item], BeforeValidator(_at_most_entries)]


def limited(description: str | None = None, **limits: int | float) -> Any:
    """An optional parameter with the limits that the document tells; they are checked with the rest of the request."""
    return Field(default=None, description=description, json_schema_extra=dict(limits))
