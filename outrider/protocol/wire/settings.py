"""Converts sampling settings, speculation options and grammars between proto and domain.

Every `*_from_proto` checks the ranges that the proto states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from outrider.errors import invalid
from outrider.grammar.kinds import FreeThought, Grammar, GrammarKind
from outrider.protocol import messages as m
from outrider.protocol.checks import check_grammar, check_sampling, check_speculation
from outrider.v1 import common_pb2

_Member = TypeVar("_Member", bound=Enum)

# The range of google.protobuf.Duration, ten thousand years.
_MAX_DURATION_S = 315_576_000_000.0
_SAMPLING = tuple(field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields)
_SPECULATION = tuple(field.name for field in common_pb2.SpeculationOptions.DESCRIPTOR.fields)


def sampling_from_proto(
    proto: common_pb2.SamplingParams, vocab_size: int, prefix: str = "sampling"
) -> m.SamplingParams:
    """Check and convert sampling settings.

    Raises OutriderError(INVALID_VALUE) that names `prefix` and the field.
    """
    sampling = m.SamplingParams(**_set_fields(proto))
    check_sampling(sampling, vocab_size, prefix + ".")
    return sampling


def sampling_to_proto(sampling: m.SamplingParams) -> common_pb2.SamplingParams:
    """Convert sampling settings; set every field but a missing seed, so that no default matters."""
    values = {name: getattr(sampling, name) for name in _SAMPLING}
    return common_pb2.SamplingParams(**values | {"logit_bias": dict(sampling.logit_bias)})


def speculation_from_proto(proto: common_pb2.SpeculationOptions) -> m.SpeculationOptions:
    """Check and convert speculation options.

    Raises OutriderError(INVALID_VALUE) that names the field.
    """
    name = proto.WhichOneof("drafter")
    if name and not getattr(proto, name):
        raise invalid(f"speculation.{name}", "must have at least 1 character if it is set")
    if proto.acceptance not in (0, *(kind.value for kind in m.Acceptance)):
        message = f"must be one of the enum's values, not {proto.acceptance}"
        raise invalid("speculation.acceptance", message)
    acceptance = m.Acceptance(proto.acceptance or m.Acceptance.EXACT.value)
    options = m.SpeculationOptions(**_set_fields(proto) | {"acceptance": acceptance})
    check_speculation(options)
    return options


def speculation_to_proto(options: m.SpeculationOptions) -> common_pb2.SpeculationOptions:
    """Convert speculation options; `draft_tokens` stays unset when it is None."""
    values = {name: getattr(options, name) for name in _SPECULATION}
    for name in ("drafter_id", "drafter_family"):
        # A field of the oneof is unset, not empty.
        values[name] = values[name] or None
    acceptance = proto_enum(options.acceptance.value)
    return common_pb2.SpeculationOptions(**values | {"acceptance": acceptance})


def grammar_from_proto(proto: common_pb2.Grammar | None) -> Grammar | None:
    """Check and convert a grammar; raise OutriderError(INVALID_VALUE) that names the field.

    A grammar without a kind is refused. A kind that only a later version knows looks like no kind;
    if it were ignored, the output would be unconstrained.
    """
    if proto is None:
        return None
    name = proto.WhichOneof("kind")
    if name is None:
        kinds = ", ".join(kind.value for kind in GrammarKind)
        raise invalid("grammar", f"must have one of {kinds}; none that this version knows is set")
    kind = GrammarKind(name)
    thought = None
    if proto.HasField("thought"):
        thought = FreeThought(proto.thought.begin, proto.thought.end, proto.thought.after)
    if kind is GrammarKind.JSON_OBJECT:
        grammar = Grammar(kind, thought=thought)
    elif kind is GrammarKind.CHOICE:
        grammar = Grammar(kind, choices=tuple(proto.choice.texts), thought=thought)
    else:
        grammar = Grammar(kind, getattr(proto, name), thought=thought)
    check_grammar(grammar)
    return grammar


def grammar_to_proto(grammar: Grammar | None) -> common_pb2.Grammar | None:
    """Convert a grammar; None for no grammar."""
    if grammar is None:
        return None
    thought = None
    if grammar.thought is not None:
        thought = common_pb2.FreeThought(**asdict(grammar.thought))
    proto = common_pb2.Grammar(thought=thought)
    if grammar.kind is GrammarKind.JSON_OBJECT:
        proto.json_object.SetInParent()
    elif grammar.kind is GrammarKind.CHOICE:
        proto.choice.texts.extend(grammar.choices)
    else:
        setattr(proto, grammar.kind.value, grammar.text)
    return proto


def _set_fields(proto: Message) -> dict[str, Any]:
    """Return the fields that the sender set, keyed by name: lists as tuples, maps as sorted pairs.

    The classes of plain data have their own defaults for fields that are left out. Where the proto
    cannot tell an unset field from zero, the default is zero.
    """
    return {field.name: _plain(value) for field, value in proto.ListFields()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted(value.items()))
    return value if isinstance(value, bool | int | float | str) else tuple(value)


def known(kind: type[_Member], value: int, otherwise: _Member) -> _Member:
    """Return the enum's member for this value; `otherwise` for 0 and for unknown values."""
    try:
        return kind(value)
    except ValueError:
        return otherwise


def optional(proto: Message, field: str) -> Any:
    """Return the value of an optional field; None if the sender left it out."""
    if not proto.HasField(field):
        return None
    return getattr(proto, field)


def proto_enum(value: int) -> Any:
    """Return a value for a proto's enum field.

    Typed Any, since the stubs give each enum its own type.
    """
    return int(value)


def duration(time_s: float | None) -> Duration | None:
    """Convert seconds to a Duration; None stays None."""
    if time_s is None:
        return None
    return Duration(seconds=int(time_s), nanos=int(time_s % 1 * 1e9))


def seconds(proto: Duration | None) -> float | None:
    """Convert a Duration to seconds, clamped to [0, `_MAX_DURATION_S`]; None stays None."""
    if proto is None:
        return None
    return min(max(proto.seconds + proto.nanos / 1e9, 0.0), _MAX_DURATION_S)
