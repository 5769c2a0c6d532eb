"""Writes JSON with long lists, such as log probabilities, without blocking the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_AT_ONCE = 256
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class LongList(NamedTuple):
    """A list whose entries are created while they are written."""

    make: Callable[[Any], Any]
    items: Sequence[Any]


async def written(value: Any) -> bytes:
    """Return the value as compact JSON in ASCII. Other tasks run between the pieces of a LongList.

    A LongList may be a member of an object, or of an object in a list.
    """
    pieces: list[str] = []
    await _write(value, pieces)
    return "".join(pieces).encode()


async def _write(value: Any, pieces: list[str]) -> None:
    if isinstance(value, LongList):
        pieces.append("[")
        for begin in range(0, len(value.items), _AT_ONCE):
            if begin:
                pieces.append(",")
                await asyncio.sleep(0)
            made = [value.make(item) for item in value.items[begin : begin + _AT_ONCE]]
            pieces.append(_ENCODER.encode(made)[1:-1])
        pieces.append("]")
    elif isinstance(value, dict) and value:
        mark = "{"
        for key, member in value.items():
            pieces.append(f"{mark}{_ENCODER.encode(str(key))}:")
            await _write(member, pieces)
            mark = ","
        pieces.append("}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        mark = "["
        for member in value:
            pieces.append(mark)
            await _write(member, pieces)
            mark = ","
        pieces.append("]")
    else:
        pieces.append(_ENCODER.encode(value))
