"""Renames parameters in a chat's errors to the names of the API that received the request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from outrider.errors import OutriderError


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the parameters in errors that the block raises, see `renamed`."""
    try:
        yield
    except OutriderError as error:
        raise renamed(error, names) from error


def renamed(error: OutriderError, names: Mapping[str, str]) -> OutriderError:
    """Return the error with another API's names for a chat's parameters.

    `names` maps chat parameters to that API's names. A longer parameter comes before a parameter
    with which it begins. The path below a parameter is kept only for tools, because other
    parameters have another shape in that API.
    """
    if error.field is None:
        return error
    own = _own(error.field, names)
    message = error.message.replace(error.field, own)
    for chats, name in names.items():
        # The message may name other parameters besides the error's field. A name that is a plain
        # word is left as it is, since it may mean something else.
        if "_" in chats:
            message = message.replace(chats, name)
    return replace(error, message=message, field=own)


def _own(field: str, names: Mapping[str, str]) -> str:
    for chats, name in names.items():
        if field == chats or field.startswith((f"{chats}.", f"{chats}[")):
            return name + field.removeprefix(chats) if chats.startswith("tools[") else name
    return field
