"""Messages for property tests: random fields with random values, and valid messages changed."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_Message = TypeVar("_Message", bound=Message)

_F = FieldDescriptor
# Mostly small numbers, because large ones are refused early.
_SMALL = st.integers(0, 12)
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    _F.TYPE_INT32: _SMALL | st.integers(-(2**31), 2**31 - 1),
    _F.TYPE_INT64: _SMALL | st.integers(-(2**63), 2**63 - 1),
    _F.TYPE_UINT32: _SMALL | st.integers(0, 2**32 - 1),
    _F.TYPE_UINT64: _SMALL | st.integers(0, 2**64 - 1),
    _F.TYPE_BOOL: st.booleans(),
    _F.TYPE_FLOAT: st.floats(width=32),
    _F.TYPE_DOUBLE: st.floats(0, 1) | st.floats(),
    _F.TYPE_STRING: st.text(max_size=6),
    _F.TYPE_BYTES: st.binary(max_size=6),
    _F.TYPE_ENUM: st.integers(-1, 9),
}


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    return _SCALARS[field.type]


@st.composite
def _filled(draw: st.DrawFn, descriptor: Descriptor, make: Any, depth: int) -> Any:
    message = make()
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        held = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            held.update(draw(st.dictionaries(_SMALL, st.floats(width=32), max_size=3)))
        elif field.message_type is not None:
            if depth == 0:
                continue
            kind = field.message_type._concrete_class
            inner = _filled(field.message_type, kind, depth - 1)
            if field.is_repeated:
                held.extend(draw(st.lists(inner, max_size=4)))
            else:
                held.CopyFrom(draw(inner))
        elif field.is_repeated:
            held.extend(draw(st.lists(_scalar(field), max_size=6)))
        else:
            setattr(message, field.name, draw(_scalar(field)))
    return message


def messages(kind: type[_Message], depth: int = 5) -> st.SearchStrategy[_Message]:
    """Any message of the type, with at most `depth` levels of nested messages."""
    return _filled(kind.DESCRIPTOR, kind, depth)


@st.composite
def changed(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """One of the valid messages with a few bytes overwritten, inserted or deleted."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["overwrite", "insert", "delete"])):
            case "overwrite" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=3))
            case _:
                del data[at : at + draw(st.integers(1, 3))]
    return bytes(data)
