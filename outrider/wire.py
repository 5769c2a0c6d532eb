"""Proto ⇄ domain, pure and in one place. Whatever comes in is range-checked here, by raised errors that name field and limit."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from outrider import messages as m
from outrider.errors import OutriderError, Reason, invalid
from outrider.v1 import common_pb2, drafts_pb2, verifier_pb2
from outrider.wire_model import placement_from_proto, placement_to_proto
from outrider.wire_settings import (
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

MAX_DISTRIBUTION_ENTRIES = 256
MAX_BATCH_ENTRIES = 4096
# No more is believed of a drafter's own clock.
MAX_DRAFT_SECONDS = 60.0
MAX_WINDOW_DEPTH = 128
MAX_WINDOW_TOKENS = 4096
MAX_PROPOSAL_TOKENS = 1024
SUM_TOLERANCE = 1e-3
# Looked up for each token that crosses the wire, which takes a third of what the enum's own call does.
_SOURCES = {source.value: source for source in m.TokenSource}
_RULES = {rule.value: rule for rule in m.AcceptanceRule}


# --- requests ---------------------------------------------------------------------------------------------------------------


def request_from_proto(
    proto: verifier_pb2.GenerateTokensRequest, *, vocab_size: int, context_length: int, traceparent: str = ""
) -> m.TokenRequest:
    """Check and convert a request; raises OutriderError that names the field and the limit."""
    if not proto.prompt_token_ids:
        raise invalid("prompt_token_ids", "must hold at least 1 token")
    if proto.min_chunk_token_count < 0:
        raise invalid("min_chunk_token_count", f"must be at least 0, not {proto.min_chunk_token_count}")
    prompt_logprobs = proto.prompt_logprob_count if proto.HasField("prompt_logprob_count") else None
    check_logprobs("prompt_logprob_count", prompt_logprobs)
    least = 1 if prompt_logprobs is None else 0
    if proto.max_tokens < least:
        raise invalid("max_tokens", f"must be at least {least}, not {proto.max_tokens}")
    check_context(len(proto.prompt_token_ids), proto.max_tokens, context_length)
    _check_ids("prompt_token_ids", proto.prompt_token_ids, vocab_size)
    if len(proto.stop_token_ids) > m.MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"must hold at most {m.MAX_STOP_TOKENS} ids, not {len(proto.stop_token_ids)}")
    _check_ids("stop_token_ids", proto.stop_token_ids, vocab_size)
    check_name("request_id", proto.request_id, empty=True)
    check_name("tenant", proto.tenant, empty=True)
    top_logprobs = proto.top_logprob_count if proto.HasField("top_logprob_count") else None
    check_logprobs("top_logprob_count", top_logprobs)
    if len(proto.prediction_token_ids) > context_length:
        raise invalid("prediction_token_ids", f"must hold at most {context_length} ids, not {len(proto.prediction_token_ids)}")
    _check_ids("prediction_token_ids", proto.prediction_token_ids, vocab_size)
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
        finish_reason=known(m.FinishReason, proto.finish_reason, m.FinishReason.STOP) if proto.finish_reason else None,
        stats=stats_from_proto(proto.stats) if proto.HasField("stats") else None,
        cached_token_count=proto.cached_token_count,
        draft_token_count=proto.draft_token_count,
        logprobs=[logprob_from_proto(logprob) for logprob in proto.logprobs],
        prompt_logprobs=[logprob_from_proto(logprob) for logprob in proto.prompt_logprobs],
    )


def logprob_to_proto(logprob: m.TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        logprob=logprob.logprob, top_token_ids=logprob.top_token_ids, top_logprobs=logprob.top_logprobs, rank=logprob.rank
    )


def logprob_from_proto(proto: common_pb2.TokenLogprob) -> m.TokenLogprob:
    return m.TokenLogprob(proto.logprob, tuple(proto.top_token_ids), tuple(proto.top_logprobs), proto.rank)


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


# --- the draft stream: what drafters say ------------------------------------------------------------------------------------


def hello_from_proto(proto: drafts_pb2.Hello) -> m.Hello:
    check_name("hello.drafter_id", proto.drafter_id)
    check_name("hello.family", proto.family, longest=m.MAX_FAMILY_LENGTH)
    check_name("hello.tokenizer_fingerprint", proto.tokenizer_fingerprint)
    if not 1 <= proto.max_draft_tokens <= m.MAX_DEPTH:
        message = f"must be in [1, {m.MAX_DEPTH}], not {proto.max_draft_tokens}"
        raise invalid("hello.max_draft_tokens", message)
    if proto.max_sequence_count < 0:
        raise invalid("hello.max_sequence_count", f"must be at least 0, not {proto.max_sequence_count}")
    distributions = {int(rule) for rule in m.Rule}.intersection(proto.distributions)
    return m.Hello(
        drafter_id=proto.drafter_id,
        family=proto.family,
        tokenizer_fingerprint=proto.tokenizer_fingerprint,
        max_draft_tokens=proto.max_draft_tokens,
        distributions=frozenset({m.Rule.ONE_HOT, *map(m.Rule, distributions)}),
        placement=placement_from_proto(proto.placement),
        max_sequence_count=proto.max_sequence_count,
        wants_features=drafts_pb2.VERDICT_EXTRA_FEATURES in proto.wants,
    )


def hello_to_proto(hello: m.Hello) -> drafts_pb2.Hello:
    return drafts_pb2.Hello(
        drafter_id=hello.drafter_id,
        family=hello.family,
        tokenizer_fingerprint=hello.tokenizer_fingerprint,
        max_draft_tokens=hello.max_draft_tokens,
        distributions=[proto_enum(rule) for rule in sorted(hello.distributions)],
        placement=placement_to_proto(hello.placement),
        max_sequence_count=hello.max_sequence_count,
        wants=[drafts_pb2.VERDICT_EXTRA_FEATURES] if hello.wants_features else [],
    )


def drafts_from_proto(proto: drafts_pb2.DraftBatch, vocab_size: int) -> m.DraftBatch:
    """Check and convert; raises OutriderError(PROTOCOL_VIOLATION).

    The trie checks base lengths and windows, which depend on what was committed.
    """
    if len(proto.proposals) + len(proto.skips) > MAX_BATCH_ENTRIES:
        raise _violation("drafts", f"holds more than {MAX_BATCH_ENTRIES} proposals and skips")
    return m.DraftBatch(
        [_proposal_from_proto(proposal, vocab_size) for proposal in proto.proposals],
        [m.Skip(skip.sequence_id, skip.base_length) for skip in proto.skips],
    )


def _proposal_from_proto(proto: drafts_pb2.Proposal, vocab_size: int) -> m.Proposal:
    ids = list(proto.token_ids)
    count = len(ids)
    if not 1 <= count <= MAX_PROPOSAL_TOKENS:
        raise _violation("proposal.token_ids", f"must hold 1 to {MAX_PROPOSAL_TOKENS} tokens, not {count}")
    if max(ids) >= vocab_size:
        raise _violation("proposal.token_ids", f"must be in [0, {vocab_size}), not {max(ids)}")
    for name in ("parents", "distributions", "confidences"):
        given = len(getattr(proto, name))
        if given not in (0, count):
            raise _violation(f"proposal.{name}", f"must be empty or one for each of {count} tokens, not {given}")
    parents = list(proto.parents)
    for place, parent in enumerate(parents):
        if parent > place:
            raise _violation(
                "proposal.parents", f"must name a token before its child: at most {place} at place {place}, not {parent}"
            )
    pairs = zip(proto.distributions, ids, strict=False)
    distributions = [_distribution(given, token, vocab_size) if given.token_ids else None for given, token in pairs]
    seconds = min(max(0.0, proto.draft_time.seconds + proto.draft_time.nanos * 1e-9), MAX_DRAFT_SECONDS)
    return m.Proposal(proto.sequence_id, proto.base_length, ids, parents, distributions, seconds)


def _distribution(proto: drafts_pb2.SparseDistribution, token: int, vocab_size: int) -> m.SparseDistribution:
    name = "proposal.distributions"
    count, given = len(proto.token_ids), len(proto.probabilities)
    if not 1 <= count <= MAX_DISTRIBUTION_ENTRIES or count != given:
        raise _violation(name, f"must hold 1 to {MAX_DISTRIBUTION_ENTRIES} ids and as many probabilities, not {count} and {given}")
    ids = np.fromiter(proto.token_ids, np.int64, count)
    weights = np.fromiter(proto.probabilities, np.float64, count)
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise _violation(name, "must be finite and not negative")
    total = float(weights.sum())
    if not math.isclose(total, 1.0, abs_tol=SUM_TOLERANCE):
        raise _violation(name, f"must sum to 1 within {SUM_TOLERANCE}, not to {total:.6f}")
    if ids.max() >= vocab_size or np.unique(ids).size != count:
        raise _violation(name, f"must hold distinct ids in [0, {vocab_size})")
    if not weights[ids == token].any():
        raise _violation(name, f"must give the proposed token {token} a probability above 0")
    return m.SparseDistribution(ids, weights / total)


def drafts_to_proto(batch: m.DraftBatch) -> drafts_pb2.DraftBatch:
    proto = drafts_pb2.DraftBatch()
    for proposal in batch.proposals:
        out = proto.proposals.add(
            sequence_id=proposal.sequence_id,
            base_length=proposal.base_length,
            token_ids=proposal.token_ids,
            parents=proposal.parents,
        )
        for given in proposal.distributions:
            if given is None:
                out.distributions.add()
            else:
                out.distributions.add(token_ids=given.token_ids.tolist(), probabilities=given.probabilities.tolist())
        if proposal.draft_seconds > 0:
            out.draft_time.FromNanoseconds(int(proposal.draft_seconds * 1e9))
    for skip in batch.skips:
        proto.skips.add(sequence_id=skip.sequence_id, base_length=skip.base_length)
    return proto


# --- the draft stream: what the verifier says -------------------------------------------------------------------------------


def step_to_proto(step: m.StepBatch) -> drafts_pb2.StepBatch:
    return drafts_pb2.StepBatch(
        opened=[_opened_to_proto(opened) for opened in step.opened],
        verdicts=[_verdict_to_proto(verdict) for verdict in step.verdicts],
        closed=[drafts_pb2.Closed(sequence_id=c.sequence_id, reason=proto_enum(c.reason)) for c in step.closed],
    )


def _opened_to_proto(opened: m.Opened) -> drafts_pb2.Opened:
    return drafts_pb2.Opened(
        sequence_id=opened.sequence_id,
        token_ids=opened.token_ids,
        sampling=sampling_to_proto(opened.sampling),
        distribution=proto_enum(opened.rule),
        window=_window_to_proto(opened.window),
        draft_tokens=opened.draft_tokens,
        tenant=opened.tenant,
        traceparent=opened.traceparent,
        grammar=grammar_to_proto(opened.grammar),
        prediction_token_ids=opened.prediction,
        prompt_token_count=opened.prompt_length,
    )


def _verdict_to_proto(verdict: m.Verdict) -> drafts_pb2.Verdict:
    return drafts_pb2.Verdict(
        sequence_id=verdict.sequence_id,
        committed_length=verdict.committed_length,
        new_token_ids=verdict.new_token_ids,
        accepted_count=verdict.accepted_count,
        draft_tokens=verdict.draft_tokens,
        window=None if verdict.window is None else _window_to_proto(verdict.window),
        traceparent=verdict.traceparent,
    )


def _window_to_proto(window: m.Window) -> drafts_pb2.Window:
    return drafts_pb2.Window(token_count=window.token_count, depth=window.depth)


def step_from_proto(proto: drafts_pb2.StepBatch, vocab_size: int) -> m.StepBatch:
    """Check and convert; raises OutriderError that names the field.

    What only a later verifier knows costs guesses at most: a distribution counts as ONE_HOT, a reason for closing as ENDED, and a
    grammar of another kind is drafted without.
    """
    return m.StepBatch(
        [_opened_from_proto(opened, vocab_size) for opened in proto.opened],
        [_verdict_from_proto(verdict, vocab_size) for verdict in proto.verdicts],
        [m.Closed(closed.sequence_id, known(m.CloseReason, closed.reason, m.CloseReason.ENDED)) for closed in proto.closed],
    )


def _verdict_from_proto(proto: drafts_pb2.Verdict, vocab_size: int) -> m.Verdict:
    _check_ids("verdict.new_token_ids", proto.new_token_ids, vocab_size)
    return m.Verdict(
        proto.sequence_id,
        proto.committed_length,
        list(proto.new_token_ids),
        proto.accepted_count,
        _draft_tokens_from_proto(proto.draft_tokens),
        _window_from_proto(proto.window) if proto.HasField("window") else None,
        proto.traceparent,
    )


def _opened_from_proto(proto: drafts_pb2.Opened, vocab_size: int) -> m.Opened:
    if not proto.token_ids:
        raise _violation("opened.token_ids", "must hold at least 1 token")
    _check_ids("opened.token_ids", proto.token_ids, vocab_size)
    _check_ids("opened.prediction_token_ids", proto.prediction_token_ids, vocab_size)
    if not 0 <= proto.prompt_token_count <= len(proto.token_ids):
        raise _violation("opened.prompt_token_count", f"must be in [0, {len(proto.token_ids)}], not {proto.prompt_token_count}")
    return m.Opened(
        sequence_id=proto.sequence_id,
        token_ids=list(proto.token_ids),
        sampling=sampling_from_proto(proto.sampling, vocab_size, "opened.sampling"),
        rule=known(m.Rule, proto.distribution, m.Rule.ONE_HOT),
        window=_window_from_proto(proto.window),
        draft_tokens=_draft_tokens_from_proto(proto.draft_tokens),
        tenant=proto.tenant,
        traceparent=proto.traceparent,
        grammar=grammar_from_proto(proto.grammar if proto.grammar.WhichOneof("kind") else None),
        prediction=list(proto.prediction_token_ids),
        prompt_length=proto.prompt_token_count,
    )


def _window_from_proto(proto: drafts_pb2.Window) -> m.Window:
    if not 1 <= proto.token_count <= MAX_WINDOW_TOKENS or not 1 <= proto.depth <= MAX_WINDOW_DEPTH:
        raise _violation("window", f"must be within {MAX_WINDOW_TOKENS} tokens and depth {MAX_WINDOW_DEPTH}")
    return m.Window(proto.token_count, proto.depth)


def _draft_tokens_from_proto(count: int) -> int:
    if not 0 <= count <= MAX_WINDOW_DEPTH:
        raise _violation("draft_tokens", f"must be in [0, {MAX_WINDOW_DEPTH}], not {count}")
    return count


# --- checks -----------------------------------------------------------------------------------------------------------------


def _violation(field: str, message: str) -> OutriderError:
    return OutriderError(Reason.PROTOCOL_VIOLATION, f"{field} {message}", field)


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise invalid(field, f"must be in [0, {vocab_size}), not {worst}")
