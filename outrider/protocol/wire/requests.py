"""Converts requests and chunks of the token services between proto and domain.

Every request that comes in is checked. Chunks come from a verifier of the same deployment and are
converted as they are; the gateway checks them against its model.
"""

from __future__ import annotations

from outrider.errors import invalid
from outrider.protocol import messages as m
from outrider.protocol.checks import check_context, check_ids, check_logprobs, check_name
from outrider.protocol.limits import MAX_GATHERED_TOKENS, MAX_STOP_TOKENS
from outrider.protocol.wire.known_fields import check_known_fields
from outrider.protocol.wire.settings import (
    duration,
    grammar_from_proto,
    grammar_to_proto,
    known,
    optional,
    proto_enum,
    sampling_from_proto,
    sampling_to_proto,
    seconds,
    speculation_from_proto,
    speculation_to_proto,
)
from outrider.v1 import common_pb2, verifier_pb2

# A lookup here, one for each token, takes a third of the time that calling the enum takes.
_SOURCES = {source.value: source for source in m.TokenSource}
_RULES = {rule.value: rule for rule in m.AcceptanceRule}
_ID_LISTS = ("prompt_token_ids", "stop_token_ids", "prediction_token_ids", "committed_token_ids")


def request_from_proto(
    proto: verifier_pb2.GenerateTokensRequest,
    *,
    vocab_size: int,
    context_length: int,
    traceparent: str = "",
) -> m.TokenRequest:
    """Check and convert a request; raise OutriderError that names the field and the limit.

    The reason is CONTEXT_LENGTH_EXCEEDED where prompt and answer do not fit, UNKNOWN_PARAMETER for
    a field that only a later version knows, else INVALID_VALUE.
    """
    check_known_fields(proto)
    top_logprobs = optional(proto, "top_logprob_count")
    prompt_logprobs = optional(proto, "prompt_logprob_count")
    check_logprobs("top_logprob_count", top_logprobs)
    check_logprobs("prompt_logprob_count", prompt_logprobs)
    check_name("request_id", proto.request_id, empty=True)
    check_name("tenant", proto.tenant, empty=True)
    check_name("model_fingerprint", proto.model_fingerprint, empty=True)
    _check_counts(proto, context_length)
    _check_committed(proto)
    for name in _ID_LISTS:
        check_ids(name, getattr(proto, name), vocab_size)
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
        min_chunk_tokens=min(max(1, proto.min_chunk_token_count), MAX_GATHERED_TOKENS),
        top_logprobs=top_logprobs,
        grammar=grammar_from_proto(optional(proto, "grammar")),
        prediction=list(proto.prediction_token_ids),
        prompt_logprobs=prompt_logprobs,
        committed=list(proto.committed_token_ids),
        noise_seed=optional(proto, "noise_seed"),
        model_fingerprint=proto.model_fingerprint,
    )


def _check_committed(proto: verifier_pb2.GenerateTokensRequest) -> None:
    """Check that `max_tokens` leaves room for output after the committed output.

    A request with committed output must not ask for log probabilities of the prompt.
    """
    count = len(proto.committed_token_ids)
    if count and count >= proto.max_tokens:
        limit = f"max_tokens, which is {proto.max_tokens}"
        raise invalid("committed_token_ids", f"must hold fewer ids than {limit}, not {count}")
    if count and proto.HasField("prompt_logprob_count"):
        raise invalid("committed_token_ids", "must be empty with prompt_logprob_count")


def _check_counts(proto: verifier_pb2.GenerateTokensRequest, context_length: int) -> None:
    """Check how many tokens the request has and asks for."""
    if not proto.prompt_token_ids:
        raise invalid("prompt_token_ids", "must hold at least 1 token")
    if proto.min_chunk_token_count < 0:
        message = f"must be at least 0, not {proto.min_chunk_token_count}"
        raise invalid("min_chunk_token_count", message)
    # A request that only scores its prompt may generate nothing.
    least = 0 if proto.HasField("prompt_logprob_count") else 1
    if proto.max_tokens < least:
        raise invalid("max_tokens", f"must be at least {least}, not {proto.max_tokens}")
    check_context(len(proto.prompt_token_ids), proto.max_tokens, context_length)
    for name, most in (
        ("stop_token_ids", MAX_STOP_TOKENS),
        ("prediction_token_ids", context_length),
    ):
        count = len(getattr(proto, name))
        if count > most:
            raise invalid(name, f"must hold at most {most} ids, not {count}")
    if proto.sampling.min_tokens > proto.max_tokens:
        limit = f"max_tokens, which is {proto.max_tokens}"
        message = f"must be at most {limit}, not {proto.sampling.min_tokens}"
        raise invalid("sampling.min_tokens", message)


def request_to_proto(request: m.TokenRequest) -> verifier_pb2.GenerateTokensRequest:
    """Convert a request; inverse of `request_from_proto`, without the trace context."""
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
        committed_token_ids=request.committed,
        noise_seed=request.noise_seed,
        model_fingerprint=request.model_fingerprint,
    )


def chunk_to_proto(chunk: m.TokenChunk) -> verifier_pb2.GenerateTokensResponse:
    """Convert a chunk; inverse of `chunk_from_proto`."""
    response = verifier_pb2.GenerateTokensResponse(
        token_ids=chunk.token_ids,
        sources=[proto_enum(source) for source in chunk.sources],
        drafter_id=chunk.drafter_id,
        cached_token_count=chunk.cached_token_count,
        draft_token_count=chunk.draft_token_count,
        side_draft_token_count=chunk.side_draft_token_count,
        logprobs=[logprob_to_proto(logprob) for logprob in chunk.logprobs],
        prompt_logprobs=[logprob_to_proto(logprob) for logprob in chunk.prompt_logprobs],
    )
    if chunk.finish_reason is not None:
        response.finish_reason = proto_enum(chunk.finish_reason)
    if chunk.stats is not None:
        response.stats.CopyFrom(stats_to_proto(chunk.stats))
    return response


def chunk_from_proto(proto: verifier_pb2.GenerateTokensResponse) -> m.TokenChunk:
    """Convert a chunk. An unknown source counts as PLAIN, and an unknown finish reason as STOP."""
    finish_reason = None
    if proto.finish_reason:
        finish_reason = known(m.FinishReason, proto.finish_reason, m.FinishReason.STOP)
    return m.TokenChunk(
        token_ids=list(proto.token_ids),
        sources=[_SOURCES.get(source, m.TokenSource.PLAIN) for source in proto.sources],
        drafter_id=proto.drafter_id,
        finish_reason=finish_reason,
        stats=stats_from_proto(proto.stats) if proto.HasField("stats") else None,
        cached_token_count=proto.cached_token_count,
        draft_token_count=proto.draft_token_count,
        side_draft_token_count=proto.side_draft_token_count,
        logprobs=[logprob_from_proto(logprob) for logprob in proto.logprobs],
        prompt_logprobs=[logprob_from_proto(logprob) for logprob in proto.prompt_logprobs],
    )


def logprob_to_proto(logprob: m.TokenLogprob) -> common_pb2.TokenLogprob:
    """Convert a token's log probabilities; inverse of `logprob_from_proto`."""
    return common_pb2.TokenLogprob(
        logprob=logprob.logprob,
        top_token_ids=logprob.top_token_ids,
        top_logprobs=logprob.top_logprobs,
        rank=logprob.rank,
    )


def logprob_from_proto(proto: common_pb2.TokenLogprob) -> m.TokenLogprob:
    """Convert a token's log probabilities; checks nothing."""
    return m.TokenLogprob(
        proto.logprob, tuple(proto.top_token_ids), tuple(proto.top_logprobs), proto.rank
    )


def stats_to_proto(stats: m.SpeculationStats) -> common_pb2.SpeculationStats:
    """Convert statistics; inverse of `stats_from_proto`."""
    return common_pb2.SpeculationStats(
        forward_count=stats.forward_count,
        draft_count=stats.draft_count,
        draft_token_count=stats.draft_token_count,
        accepted_token_count=stats.accepted_token_count,
        acceptance_histogram=stats.histogram,
        max_draft_tokens=stats.max_draft_tokens,
        rules=[proto_enum(rule) for rule in stats.rules],
        paused=_pause_to_proto(stats.paused),
    )


def stats_from_proto(proto: common_pb2.SpeculationStats) -> m.SpeculationStats:
    """Convert statistics; leave out a rule that only a later version knows."""
    return m.SpeculationStats(
        proto.forward_count,
        proto.draft_count,
        proto.draft_token_count,
        proto.accepted_token_count,
        list(proto.acceptance_histogram),
        proto.max_draft_tokens,
        [_RULES[rule] for rule in proto.rules if rule in _RULES],
        _pause_from_proto(optional(proto, "paused")),
    )


def _pause_to_proto(pause: m.SpeculationPause | None) -> common_pb2.SpeculationPause | None:
    if pause is None:
        return None
    return common_pb2.SpeculationPause(
        reason=proto_enum(pause.reason),
        step_count=pause.step_count,
        forward_duration=duration(pause.forward_s),
        draft_duration=duration(pause.draft_s),
    )


def _pause_from_proto(proto: common_pb2.SpeculationPause | None) -> m.SpeculationPause | None:
    if proto is None:
        return None
    return m.SpeculationPause(
        known(m.PauseReason, proto.reason, m.PauseReason.UNKNOWN),
        proto.step_count,
        seconds(optional(proto, "forward_duration")),
        seconds(optional(proto, "draft_duration")),
    )
