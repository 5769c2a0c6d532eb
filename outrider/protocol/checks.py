"""Range checks that HTTP and gRPC share, without protobuf and HTTP.

Each check raises OutriderError(INVALID_VALUE) that names the field and the limit, unless its
docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outrider.errors import OutriderError, Reason, invalid
from outrider.grammar.kinds import FreeThought, Grammar, GrammarKind
from outrider.protocol.limits import (
    MAX_CHOICES,
    MAX_FAMILY_LENGTH,
    MAX_GRAMMAR_CHARACTERS,
    MAX_LISTED_TOKENS,
    MAX_MARK_CHARACTERS,
    MAX_NAME_LENGTH,
    MAX_TOP_LOGPROBS,
    Range,
)
from outrider.protocol.messages import (
    SAMPLING_RANGES,
    SPECULATION_RANGES,
    SamplingParams,
    SpeculationOptions,
)


def check_sampling(sampling: SamplingParams, vocab_size: int, prefix: str = "") -> None:
    """Check the sampling settings. `prefix` goes before the field's name."""
    s = sampling
    _check_ranges(s, SAMPLING_RANGES | {"top_k": Range(0, vocab_size)}, prefix)
    if s.min_tokens < 0:
        raise invalid(f"{prefix}min_tokens", f"must be at least 0, not {s.min_tokens}")
    bias_field = f"{prefix}logit_bias"
    banned_field = f"{prefix}banned_token_ids"
    _check_listed(bias_field, [token for token, _ in s.logit_bias], vocab_size)
    for token, value in s.logit_bias:
        if not -100.0 <= value <= 100.0:
            message = f"must hold values in [-100, 100], not {value} for {token}"
            raise invalid(bias_field, message)
    _check_listed(banned_field, s.banned_token_ids, vocab_size)
    if len(set(s.banned_token_ids)) >= vocab_size:
        raise invalid(banned_field, "must leave at least one token that is not banned")


def _check_listed(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if len(ids) > MAX_LISTED_TOKENS:
        raise invalid(field, f"must hold at most {MAX_LISTED_TOKENS} ids, not {len(ids)}")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise invalid(field, f"must hold ids in [0, {vocab_size}), not {token}")


def check_speculation(options: SpeculationOptions) -> None:
    """Check the speculation settings."""
    check_name("speculation.drafter_id", options.drafter_id, empty=True)
    family_field = "speculation.drafter_family"
    check_name(family_field, options.drafter_family, empty=True, longest=MAX_FAMILY_LENGTH)
    if options.drafter_id and options.drafter_family:
        raise invalid(family_field, "must not be set together with speculation.drafter_id")
    _check_ranges(options, SPECULATION_RANGES, "speculation.")


def _check_ranges(settings: object, ranges: Mapping[str, Range], prefix: str) -> None:
    """Check the settings that have a range, except those that are None, which take a default."""
    for name, allowed in ranges.items():
        value = getattr(settings, name)
        if value is not None and value not in allowed:
            raise invalid(prefix + name, f"must be in {allowed}, not {value}")


def check_grammar(grammar: Grammar, field: str = "") -> None:
    """Check a grammar's size. The grammar compiler checks the syntax later."""
    field = field or f"grammar.{grammar.kind.value}"
    if grammar.kind is GrammarKind.CHOICE:
        if not 1 <= len(grammar.choices) <= MAX_CHOICES or not all(grammar.choices):
            raise invalid(field, f"must hold 1 to {MAX_CHOICES} texts, none of them empty")
    elif grammar.kind is not GrammarKind.JSON_OBJECT and not grammar.text:
        raise invalid(field, "must not be empty")
    size = len(grammar.text) + sum(map(len, grammar.choices))
    if size > MAX_GRAMMAR_CHARACTERS:
        raise invalid(field, f"must have at most {MAX_GRAMMAR_CHARACTERS} characters, not {size}")
    if grammar.thought is not None:
        _check_thought(grammar.thought)


def _check_thought(thought: FreeThought) -> None:
    if not thought.end:
        raise invalid("grammar.thought.end", "must not be empty")
    for name in ("begin", "end", "after"):
        size = len(getattr(thought, name))
        if size > MAX_MARK_CHARACTERS:
            problem = f"must have at most {MAX_MARK_CHARACTERS} characters, not {size}"
            raise invalid(f"grammar.thought.{name}", problem)


def check_name(field: str, name: str, empty: bool = False, longest: int = MAX_NAME_LENGTH) -> None:
    """Check that a name is printable, with 1 to `longest` characters, or 0 if it may be empty."""
    if not (empty or name) or len(name) > longest or (name and not name.isprintable()):
        least = 0 if empty else 1
        message = f"must be {least} to {longest} printable characters, not {name[:40]!r}"
        raise invalid(field, message)


def check_logprobs(field: str, count: int | None) -> None:
    """Check the number of likeliest tokens that a request asks for; None asks for nothing."""
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise invalid(field, f"must be in [0, {MAX_TOP_LOGPROBS}], not {count}")


def check_context(prompt_length: int, max_tokens: int, context_length: int) -> None:
    """Check that prompt and answer fit in the context; raise CONTEXT_LENGTH_EXCEEDED."""
    if prompt_length + max_tokens > context_length:
        message = (
            f"max_tokens: the prompt has {prompt_length} tokens and max_tokens asks for "
            f"{max_tokens} more, but the model's context holds {context_length}"
        )
        raise OutriderError(Reason.CONTEXT_LENGTH_EXCEEDED, message, "max_tokens")


def check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Check the largest of these token ids, which are never negative."""
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise invalid(field, f"must be in [0, {vocab_size}), not {worst}")
