"""Requests and chunks of the token services, proto and domain. Checks what comes in by raised errors that name field and limit."""

from __future__ import annotations

from collections.abc import Iterable

from outrider import messages as m
from outrider.errors import OutriderError, Reason, invalid
from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.settings import (
    check_name,
    grammar_from_proto,
    grammar_to_proto,
    known,
    proto_enum,
    sampling_from_proto,
    sampling_to_proto,
    speculation_from_proto,
    speculation_to_proto,
)

# Looked up for each token that crosses the wire, which takes a third of what the enum's own call does.
_SOURCES = {source.value: source for source in m.TokenSource}
_RULES = {rule.value: rule for rule in m.AcceptanceRule}


def request_from_proto(
    proto: verifier_pb2.GenerateTokensRequest,
    *,
    vocab_size: int,
    context_length: int,
    traceparent: str = "",
) -> m.TokenRequest:
    """Check and convert a request; raises OutriderError that names the field and the limit."""
    if not proto.prompt_token_ids:
        raise invalid("prompt_token_ids", "must hold at least 1 token")
    if proto.min_chunk_token_count < 0:
        raise invalid(
            "min_chunk_token_count", f"must be at least 0, not {proto.min_chunk_token_count}"
        )
    prompt_logprobs = proto.prompt_logprob_count if proto.HasField("prompt_logprob_count") else None
    check_logprobs("prompt_logprob_count", prompt_logprobs)
    least = 1 if prompt_logprobs is None else 0
    if proto.max_tokens < least:
        raise invalid("max_tokens", f"must be at least {least}, not {proto.max_tokens}")
    check_context(len(proto.prompt_token_ids), proto.max_tokens, context_length)
    check_ids("prompt_token_ids", proto.prompt_token_ids, vocab_size)
    if len(proto.stop_token_ids) > m.MAX_STOP_TOKENS:
        raise invalid(
            "stop_token_ids",
            f"must hold at most {m.MAX_STOP_TOKENS} ids, not {len(proto.stop_token_ids)}",
        )
    check_ids("stop_token_ids", proto.stop_token_ids, vocab_size)
    check_name("request_id", proto.request_id, empty=True)
    check_name("tenant", proto.tenant, empty=True)
    top_logprobs = proto.top_logprob_count if proto.HasField("top_logprob_count") else None
    check_logprobs("top_logprob_count", top_logprobs)
    if len(proto.prediction_token_ids) > context_length:
        raise invalid(
            "prediction_token_ids",
            f"must hold at most {context_length} ids, not {len(proto.prediction_token_ids)}",
        )
    check_ids("prediction_token_ids", proto.prediction_token_ids, vocab_size)
    if proto.sampling.min_tokens > proto.max_tokens:
        message = f"must be at most max_tokens, which is {proto.max_tokens}, not {proto.sampling.min_tokens}"
        raise invalid("sampling.min_tokens", message)
    return m.TokenRequest(
        prompt=list(proto.prompt_token_ids),
        max_tokens=proto.max_tokens,
        sampling=sampling_from_proto(proto.sampling, vocab_size),
        stop_token_ids=frozenset(proto.stop_token_ids),
        ignore_eos=proto.ignore_eos,
        speculation=speculation_from_proto(proto.speculation),
        tenant=proto.tenant,
        request_id=proto.request_id,
        traceparent=traceparent,
        min_chunk_tokens=min(max(1, proto.min_chunk_token_count), m.MAX_GATHERED_TOKENS),
        top_logprobs=top_logprobs,
        grammar=grammar_from_proto(proto.grammar if proto.HasField("grammar") else None),
        prediction=list(proto.prediction_token_ids),
        prompt_logprobs=prompt_logprobs,
    )


def check_logprobs(field: str, count: int | None) -> None:
    """How many of the likeliest tokens may be asked for."""
    if count is not None and not 0 <= count <= m.MAX_TOP_LOGPROBS:
        raise invalid(field, f"must be in [0, {m.MAX_TOP_LOGPROBS}], not {count}")


def check_context(prompt_length: int, max_tokens: int, context_length: int) -> None:
    """Raises CONTEXT_LENGTH_EXCEEDED when the prompt and what may follow do not fit."""
    if prompt_length + max_tokens > context_length:
        message = (
            f"max_tokens: the prompt has {prompt_length} tokens and max_tokens asks for {max_tokens} more, "
            f"but the model's context holds {context_length}"
        )
        raise OutriderError(Reason.CONTEXT_LENGTH_EXCEEDED, message, "max_tokens")


def request_to_proto(request: m.TokenRequest) -> verifier_pb2.GenerateTokensRequest:
    return verifier_pb2.GenerateTokensRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt,
        max_tokens=request.max_tokens,
        sampling=sampling_to_proto(request.sampling),
        stop_token_ids=sorted(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        speculation=speculation_to_proto(request.speculation),
        tenant=request.tenant,
        min_chunk_token_count=request.min_chunk_tokens,
        top_logprob_count=request.top_logprobs,
        grammar=grammar_to_proto(request.grammar),
        prediction_token_ids=request.prediction,
        prompt_logprob_count=request.prompt_logprobs,
    )


def chunk_to_proto(chunk: m.TokenChunk) -> verifier_pb2.GenerateTokensResponse:
    response = verifier_pb2.GenerateTokensResponse(
        token_ids=chunk.token_ids,
        sources=[proto_enum(source) for source in chunk.sources],
        drafter_id=chunk.drafter_id,
        cached_token_count=chunk.cached_token_count,
        draft_token_count=chunk.draft_token_count,
        logprobs=[logprob_to_proto(logprob) for logprob in chunk.logprobs],
        prompt_logprobs=[logprob_to_proto(logprob) for logprob in chunk.prompt_logprobs],
    )
    if chunk.finish_reason is not None:
        response.finish_reason = proto_enum(chunk.finish_reason)
    if chunk.stats is not None:
        response.stats.CopyFrom(stats_to_proto(chunk.stats))
    return response


def chunk_from_proto(proto: verifier_pb2.GenerateTokensResponse) -> m.TokenChunk:
    """Of the values of enums that only a later version knows, a source counts as PLAIN and a finish reason as STOP."""
    return m.TokenChunk(
        token_ids=list(proto.token_ids),
        sources=[_SOURCES.get(source, m.TokenSource.PLAIN) for source in proto.sources],
        drafter_id=proto.drafter_id,
        finish_reason=known(m.FinishReason, proto.finish_reason, m.FinishReason.STOP)
        if proto.finish_reason
        else None,
        stats=stats_from_proto(proto.stats) if proto.HasField("stats") else None,
        cached_token_count=proto.cached_token_count,
        draft_token_count=proto.draft_token_count,
        logprobs=[logprob_from_proto(logprob) for logprob in proto.logprobs],
        prompt_logprobs=[logprob_from_proto(logprob) for logprob in proto.prompt_logprobs],
    )


def logprob_to_proto(logprob: m.TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        logprob=logprob.logprob,
        top_token_ids=logprob.top_token_ids,
        top_logprobs=logprob.top_logprobs,
        rank=logprob.rank,
    )


def logprob_from_proto(proto: common_pb2.TokenLogprob) -> m.TokenLogprob:
    return m.TokenLogprob(
        proto.logprob, tuple(proto.top_token_ids), tuple(proto.top_logprobs), proto.rank
    )


def stats_to_proto(stats: m.SpeculationStats) -> common_pb2.SpeculationStats:
    return common_pb2.SpeculationStats(
        forward_count=stats.forward_count,
        draft_count=stats.draft_count,
        draft_token_count=stats.draft_token_count,
        accepted_token_count=stats.accepted_token_count,
        acceptance_histogram=stats.histogram,
        max_draft_tokens=stats.max_draft_tokens,
        rules=[proto_enum(rule) for rule in stats.rules],
    )


def stats_from_proto(proto: common_pb2.SpeculationStats) -> m.SpeculationStats:
    """A rule that only a later version knows is left out."""
    histogram = list(proto.acceptance_histogram)
    return m.SpeculationStats(
        proto.forward_count,
        proto.draft_count,
        proto.draft_token_count,
        proto.accepted_token_count,
        histogram,
        proto.max_draft_tokens,
        [_RULES[rule] for rule in proto.rules if rule in _RULES],
    )


def check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise invalid(field, f"must be in [0, {vocab_size}), not {worst}")
