"""How a request samples, speculates and is constrained: proto ⇄ domain, and the ranges, for HTTP and gRPC alike."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeVar

from outrider import messages as m
from outrider.errors import invalid
from outrider.v1 import common_pb2

_Member = TypeVar("_Member", bound=Enum)


def sampling_from_proto(
    proto: common_pb2.SamplingParams, vocab_size: int, prefix: str = "sampling"
) -> m.SamplingParams:
    """Check and convert; raises OutriderError(INVALID_VALUE) that names the field."""
    sampling = m.SamplingParams(
        temperature=proto.temperature if proto.HasField("temperature") else 1.0,
        top_k=proto.top_k,
        top_p=proto.top_p if proto.HasField("top_p") else 1.0,
        seed=proto.seed if proto.HasField("seed") else None,
        min_p=proto.min_p,
        typical_p=proto.typical_p if proto.HasField("typical_p") else 1.0,
        repetition_penalty=proto.repetition_penalty
        if proto.HasField("repetition_penalty")
        else 1.0,
        presence_penalty=proto.presence_penalty,
        frequency_penalty=proto.frequency_penalty,
        logit_bias=tuple(sorted(proto.logit_bias.items())),
        min_tokens=proto.min_tokens,
        banned_token_ids=tuple(proto.banned_token_ids),
    )
    check_sampling(sampling, vocab_size, prefix + ".")
    return sampling


def check_sampling(sampling: m.SamplingParams, vocab_size: int, prefix: str = "") -> None:
    """The ranges of the sampling settings, for HTTP and gRPC alike; NaN is in no range. Raises OutriderError(INVALID_VALUE)."""
    s = sampling
    checks = [
        ("temperature", 0.0 <= s.temperature <= 2.0, "must be in [0, 2]"),
        ("top_k", 0 <= s.top_k <= vocab_size, f"must be in [0, {vocab_size}]"),
        ("top_p", 0.0 < s.top_p <= 1.0, "must be in (0, 1]"),
        ("min_p", 0.0 <= s.min_p <= 1.0, "must be in [0, 1]"),
        ("typical_p", 0.0 < s.typical_p <= 1.0, "must be in (0, 1]"),
        ("repetition_penalty", 0.01 <= s.repetition_penalty <= 10.0, "must be in [0.01, 10]"),
        ("presence_penalty", -2.0 <= s.presence_penalty <= 2.0, "must be in [-2, 2]"),
        ("frequency_penalty", -2.0 <= s.frequency_penalty <= 2.0, "must be in [-2, 2]"),
        ("min_tokens", s.min_tokens >= 0, "must be at least 0"),
    ]
    for name, right, message in checks:
        if not right:
            raise invalid(prefix + name, f"{message}, not {getattr(s, name)}")
    _check_listed(f"{prefix}logit_bias", [token for token, _ in s.logit_bias], vocab_size)
    for token, value in s.logit_bias:
        if not -100.0 <= value <= 100.0:
            raise invalid(
                f"{prefix}logit_bias", f"must hold values in [-100, 100], not {value} for {token}"
            )
    _check_listed(f"{prefix}banned_token_ids", s.banned_token_ids, vocab_size)
    if len(set(s.banned_token_ids)) >= vocab_size:
        raise invalid(f"{prefix}banned_token_ids", "ban every token there is")


def _check_listed(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if len(ids) > m.MAX_LISTED_TOKENS:
        raise invalid(field, f"must hold at most {m.MAX_LISTED_TOKENS} ids, not {len(ids)}")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise invalid(field, f"must hold ids in [0, {vocab_size}), not {token}")


def sampling_to_proto(sampling: m.SamplingParams) -> common_pb2.SamplingParams:
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
    default = m.SpeculationOptions()
    if proto.acceptance not in (0, *(kind.value for kind in m.Acceptance)):
        raise invalid(
            "speculation.acceptance", f"must be one of the enum's values, not {proto.acceptance}"
        )
    options = m.SpeculationOptions(
        enabled=proto.enabled if proto.HasField("enabled") else True,
        drafter=proto.drafter,
        draft_tokens=proto.draft_tokens if proto.HasField("draft_tokens") else None,
        acceptance=m.Acceptance(proto.acceptance) if proto.acceptance else m.Acceptance.EXACT,
        typical_epsilon=proto.typical_epsilon
        if proto.HasField("typical_epsilon")
        else default.typical_epsilon,
        relaxed_topk=proto.relaxed_topk if proto.HasField("relaxed_topk") else default.relaxed_topk,
        relaxed_delta=proto.relaxed_delta
        if proto.HasField("relaxed_delta")
        else default.relaxed_delta,
    )
    check_speculation(options)
    return options


def check_speculation(options: m.SpeculationOptions) -> None:
    """The ranges of the speculation settings, for HTTP and gRPC alike. Raises OutriderError(INVALID_VALUE)."""
    if options.draft_tokens is not None and not 0 <= options.draft_tokens <= m.MAX_DEPTH:
        raise invalid(
            "speculation.draft_tokens", f"must be in [0, {m.MAX_DEPTH}], not {options.draft_tokens}"
        )
    check_name("speculation.drafter", options.drafter, empty=True)
    if not 0.0 < options.typical_epsilon <= 1.0:
        raise invalid(
            "speculation.typical_epsilon", f"must be in (0, 1], not {options.typical_epsilon}"
        )
    if not 1 <= options.relaxed_topk <= m.MAX_RELAXED_TOPK:
        raise invalid(
            "speculation.relaxed_topk",
            f"must be in [1, {m.MAX_RELAXED_TOPK}], not {options.relaxed_topk}",
        )
    if not 0.0 <= options.relaxed_delta <= 1.0:
        raise invalid(
            "speculation.relaxed_delta", f"must be in [0, 1], not {options.relaxed_delta}"
        )


def speculation_to_proto(options: m.SpeculationOptions) -> common_pb2.SpeculationOptions:
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
    """Check and convert. Raises OutriderError(INVALID_VALUE) that names the field.

    So it does for a grammar without a kind: that is what one of a later version's kinds looks like, and its text would be free.
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


def check_grammar(grammar: m.Grammar, field: str = "") -> None:
    """Its size, for HTTP and gRPC alike; whether it has a meaning is for the compiler. Raises OutriderError(INVALID_VALUE)."""
    field = field or f"grammar.{grammar.kind.value}"
    if grammar.kind is m.GrammarKind.CHOICE:
        if not 1 <= len(grammar.choices) <= m.MAX_CHOICES or not all(grammar.choices):
            raise invalid(field, f"must hold 1 to {m.MAX_CHOICES} texts, none of them empty")
    elif grammar.kind is not m.GrammarKind.JSON_OBJECT and not grammar.text:
        raise invalid(field, "must not be empty")
    size = len(grammar.text) + sum(map(len, grammar.choices))
    if size > m.MAX_GRAMMAR_CHARACTERS:
        raise invalid(field, f"must have at most {m.MAX_GRAMMAR_CHARACTERS} characters, not {size}")


def grammar_to_proto(grammar: m.Grammar | None) -> common_pb2.Grammar | None:
    if grammar is None:
        return None
    if grammar.kind is m.GrammarKind.JSON_OBJECT:
        return common_pb2.Grammar(json_object=True)
    if grammar.kind is m.GrammarKind.CHOICE:
        return common_pb2.Grammar(choice=common_pb2.Choices(texts=grammar.choices))
    proto = common_pb2.Grammar()
    setattr(proto, grammar.kind.value, grammar.text)
    return proto


def check_name(
    field: str, name: str, empty: bool = False, longest: int = m.MAX_NAME_LENGTH
) -> None:
    """Raises OutriderError(INVALID_VALUE) for a name that is too long, or cannot be printed."""
    if not (empty or name) or len(name) > longest or (name and not name.isprintable()):
        least = 0 if empty else 1
        raise invalid(
            field, f"must be {least} to {longest} printable characters, not {name[:40]!r}"
        )


def known(kind: type[_Member], value: int, otherwise: _Member) -> _Member:
    """The enum's member of that value; `otherwise` for a value of a later version, or of none."""
    try:
        return kind(value)
    except ValueError:
        return otherwise


def proto_enum(value: int) -> Any:
    """A proto enum's value; the stubs make each enum a type of its own, which a plain integer is not."""
    return int(value)
