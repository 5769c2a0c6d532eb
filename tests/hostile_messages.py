"""Messages for property tests: random and extreme values, changed valid messages, broken bytes.

The strategies are built from protobuf descriptors, so they know every field of every message.
`fuzzing` gives a test a fixed set of examples or, with `--hypothesis-profile=long`, many random
ones.
"""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

_Message = TypeVar("_Message", bound=Message)

_LONG_FACTOR = 100
_F = FieldDescriptor
# The numbers are mostly small, because large numbers are refused early.
_SMALL = st.integers(0, 12)


def _integers(least: int, most: int) -> st.SearchStrategy[int]:
    """Return small numbers, the range's ends and their neighbours, and any others in the range."""
    ends = [least, least + 1, most - 1, most, 2**31 - 1, 2**16]
    return _SMALL | st.sampled_from(ends) | st.integers(least, most)


_TEXTS = st.text(max_size=6) | st.sampled_from(["\0", "x" * 5000, "\N{SLIGHTLY SMILING FACE}" * 99])
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    _F.TYPE_INT32: _integers(-(2**31), 2**31 - 1),
    _F.TYPE_INT64: _integers(-(2**63), 2**63 - 1),
    _F.TYPE_UINT32: _integers(0, 2**32 - 1),
    _F.TYPE_UINT64: _integers(0, 2**64 - 1),
    _F.TYPE_BOOL: st.booleans(),
    _F.TYPE_FLOAT: st.floats(width=32),
    _F.TYPE_DOUBLE: st.floats(0, 1) | st.floats(),
    _F.TYPE_STRING: _TEXTS,
    _F.TYPE_BYTES: st.binary(max_size=6),
    _F.TYPE_ENUM: st.integers(-1, 9),
}


def fuzzing(examples: int) -> settings:
    """Return settings with `examples` fixed examples; the profile `long` draws random ones instead.

    Fixed examples are not shrunk after a failure, since that could take minutes.
    """
    patient = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    if settings.get_current_profile_name() == "long":
        return settings(max_examples=_LONG_FACTOR * examples, **patient)
    once = (Phase.explicit, Phase.generate)
    return settings(max_examples=examples, derandomize=True, phases=once, **patient)


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
            entry = field.message_type.fields_by_name
            held.update(
                draw(st.dictionaries(_scalar(entry["key"]), _scalar(entry["value"]), max_size=3))
            )
        elif field.message_type is not None:
            if depth == 0:
                continue
            kind = GetMessageClass(field.message_type)
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
    """Return any message of the type, with at most `depth` levels of nested messages."""
    return _filled(kind.DESCRIPTOR, kind, depth)


@st.composite
def changed(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """Return one of the valid messages with a few bytes overwritten, inserted or deleted."""
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


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


@st.composite
def _stray_field(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    """Return bytes of a field with any wire type; the message may have or lack this field.

    The wire type 2 has a length, 3 and 4 begin and end a group, and 6 and 7 do not exist.
    """
    own = [field.number for field in descriptor.fields] or [1]
    number = draw(st.sampled_from([*own, 2047, 2**29 - 1]))
    wire_type = draw(st.integers(0, 7))
    content = {0: st.integers(0, 2**64 - 1).map(_varint), 1: st.binary(min_size=8, max_size=8)}
    content[2] = st.binary(max_size=6).map(lambda held: _varint(len(held)) + held)
    content[5] = st.binary(min_size=4, max_size=4)
    held = draw(content.get(wire_type, st.just(b"")))
    return _varint(number << 3 | wire_type) + held


def wire(kind: type[Message], valid: list[bytes] | None = None) -> st.SearchStrategy[bytes]:
    """Return bytes for a message of the type: valid, with a stray field, changed, or garbage."""
    random = messages(kind).map(lambda message: message.SerializeToString())
    stray = _stray_field(kind.DESCRIPTOR)
    followed = st.tuples(st.sampled_from(valid) if valid else random, stray).map(b"".join)
    ways = [random, random, followed, st.binary(max_size=40)]
    if valid:
        ways += [changed(valid), changed(valid)]
    return st.one_of(ways)
