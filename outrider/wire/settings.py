"""Converts sampling settings, speculation options and grammars between proto and domain.

Every `*_from_proto` checks the ranges that the proto states.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

from outrider import messages as m
from outrider.checks import check_grammar, check_sampling, check_speculation
from outrider.errors import invalid
from outrider.v1 import common_pb2

_Member = TypeVar("_Member", bound=Enum)

# Where these are unset, the domain's defaults hold.
_OPTIONAL_SAMPLING = ("temperature", "top_p", "seed", "typical_p", "repetition_penalty")
_OPTIONAL_SPECULATION = (
    "enabled",
    "draft_tokens",
    "typical_epsilon",
    "relaxed_topk",
    "relaxed_delta",
)


def sampling_from_proto(
    proto: common_pb2.SamplingParams, vocab_size: int, prefix: str = "sampling"
) -> m.SamplingParams:
    """Check and convert; raises OutriderError(INVALID_VALUE) that names `prefix` and the field."""
    sampling = m.SamplingParams(
        top_k=proto.top_k,
        min_p=proto.min_p,
        presence_penalty=proto.presence_penalty,
        frequency_penalty=proto.frequency_penalty,
        logit_bias=tuple(sorted(proto.logit_bias.items())),
        min_tokens=proto.min_tokens,
        banned_token_ids=tuple(proto.banned_token_ids),
        **_set_fields(proto, _OPTIONAL_SAMPLING),
    )
    check_sampling(sampling, vocab_size, prefix + ".")
    return sampling


def sampling_to_proto(sampling: m.SamplingParams) -> common_pb2.SamplingParams:
    """Convert; sets every field, so that no default matters."""
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        banned_token_ids=sampling.banned_token_ids,
    )


def speculation_from_proto(proto: common_pb2.SpeculationOptions) -> m.SpeculationOptions:
    """Check and convert; raises OutriderError(INVALID_VALUE) that names the field."""
    if proto.acceptance not in (0, *(kind.value for kind in m.Acceptance)):
        message = f"must be one of the enum's values, not {proto.acceptance}"
        raise invalid("speculation.acceptance", message)
    given = _set_fields(proto, _OPTIONAL_SPECULATION)
    acceptance = m.Acceptance(proto.acceptance or m.Acceptance.EXACT.value)
    options = m.SpeculationOptions(drafter=proto.drafter, acceptance=acceptance, **given)
    check_speculation(options)
    return options


def speculation_to_proto(options: m.SpeculationOptions) -> common_pb2.SpeculationOptions:
    """Convert; `draft_tokens` stays unset when it is None."""
    return common_pb2.SpeculationOptions(
        enabled=options.enabled,
        drafter=options.drafter,
        draft_tokens=options.draft_tokens,
        acceptance=proto_enum(options.acceptance.value),
        typical_epsilon=options.typical_epsilon,
        relaxed_topk=options.relaxed_topk,
        relaxed_delta=options.relaxed_delta,
    )


def grammar_from_proto(proto: common_pb2.Grammar | None) -> m.Grammar | None:
    """Check and convert; raises OutriderError(INVALID_VALUE) that names the field.

    A grammar without a kind is refused. A kind that only a later version knows looks like that,
    and ignoring it would leave the output unconstrained.
    """
    if proto is None:
        return None
    name = proto.WhichOneof("kind")
    if name is None:
        kinds = ", ".join(kind.value for kind in m.GrammarKind)
        raise invalid("grammar", f"must have one of {kinds}; none that this version knows is set")
    kind = m.GrammarKind(name)
    if kind is m.GrammarKind.JSON_OBJECT:
        grammar = m.Grammar(kind)
    elif kind is m.GrammarKind.CHOICE:
        grammar = m.Grammar(kind, choices=tuple(proto.choice.texts))
    else:
        grammar = m.Grammar(kind, getattr(proto, name))
    check_grammar(grammar)
    return grammar


def grammar_to_proto(grammar: m.Grammar | None) -> common_pb2.Grammar | None:
    """Convert; None for no grammar."""
    if grammar is None:
        return None
    if grammar.kind is m.GrammarKind.JSON_OBJECT:
        return common_pb2.Grammar(json_object=True)
    if grammar.kind is m.GrammarKind.CHOICE:
        return common_pb2.Grammar(choice=common_pb2.Choices(texts=grammar.choices))
    proto = common_pb2.Grammar()
    setattr(proto, grammar.kind.value, grammar.text)
    return proto


def _set_fields(proto: Any, names: Iterable[str]) -> dict[str, Any]:
    """The values of those fields that the sender set."""
    return {name: getattr(proto, name) for name in names if proto.HasField(name)}


def known(kind: type[_Member], value: int, otherwise: _Member) -> _Member:
    """The enum's member with that value; `otherwise` for 0 and for a later version's values."""
    try:
        return kind(value)
    except ValueError:
        return otherwise


def proto_enum(value: int) -> Any:
    """A value for a proto's enum field. Typed Any, since the stubs give each enum its own type."""
    return int(value)
