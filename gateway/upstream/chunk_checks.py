"""Checks a verifier's messages, so that a broken verifier harms only its own requests.

This module knows nothing of requests, replicas and texts.
"""

from __future__ import annotations

import logging
import math
from itertools import chain

from outrider.errors import OutriderError, Reason
from outrider.protocol.limits import MAX_DRAFT_TOKENS
from outrider.protocol.messages import SpeculationStats, TokenChunk, TokenLogprob
from outrider.protocol.model_info import ModelInfo, Stage

log = logging.getLogger(__name__)


def check_chunk(chunk: TokenChunk, info: ModelInfo, left: int, address: str) -> None:
    """Check a chunk against the model.

    `left` is how many tokens the sequence may still get, this chunk's included. Raises
    OutriderError(INTERNAL) for a chunk that no verifier of this model can send; the log has the
    verifier's address.
    """
    problem = _false_tokens(chunk, info, left) or _false_counts(chunk)
    for known in chain(chunk.logprobs, chunk.prompt_logprobs):
        problem = problem or _false_logprob(known, info)
    if chunk.stats is not None:
        problem = problem or _false_stats(chunk.stats)
    if problem:
        log.error("verifier %s sent %s", address, problem)
        raise OutriderError(Reason.INTERNAL, f"the verifier sent {problem}")


def check_model(info: ModelInfo) -> None:
    """Raise ValueError for impossible numbers of a model."""
    possible = (
        info.vocab_size > 0
        and info.context_length > 0
        and 0 <= info.max_draft_tokens <= MAX_DRAFT_TOKENS
    )
    if info.stage is Stage.READY and not possible:
        sizes = f"{info.vocab_size}, {info.context_length} and {info.max_draft_tokens}"
        raise ValueError(f"vocab_size, context_length and max_draft_tokens are {sizes}")
    for drafter in info.drafters:
        numbers = (drafter.acceptance_rate, drafter.round_trip_s, drafter.token_s)
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError(f"a number of drafter {drafter.drafter_id!r} is not finite")


def _false_tokens(chunk: TokenChunk, info: ModelInfo, left: int) -> str:
    """Return a description of the first impossible property of the tokens; "" if there is none."""
    ids = chunk.token_ids
    if ids and max(ids) >= info.vocab_size:
        return _no_token(info)
    if len(ids) > left:
        return "more tokens than it was asked for"
    if len(chunk.sources) != len(ids) or (chunk.logprobs and len(chunk.logprobs) != len(ids)):
        return "tokens without a source or a log probability each"
    return ""


def _false_counts(chunk: TokenChunk) -> str:
    counts = (chunk.cached_token_count, chunk.draft_token_count, chunk.side_draft_token_count)
    return "a negative number of tokens" if min(counts) < 0 else ""


def _false_logprob(known: TokenLogprob, info: ModelInfo) -> str:
    listed = known.top_token_ids
    if listed and max(listed) >= info.vocab_size:
        return _no_token(info)
    if len(listed) != len(known.top_logprobs):
        return "alternatives without a log probability each"
    # JSON lacks NaN and infinity. Minus infinity is allowed: it is the log probability of an
    # impossible token.
    if not all(value < math.inf for value in (known.logprob, *known.top_logprobs)):
        return "a log probability that is NaN or infinite"
    return ""


def _false_stats(stats: SpeculationStats) -> str:
    if len(stats.histogram) > MAX_DRAFT_TOKENS + 1:
        return f"an acceptance histogram of {len(stats.histogram)} entries"
    # Statistics have one count for each draft position.
    if stats.max_draft_tokens > MAX_DRAFT_TOKENS:
        return f"statistics of {stats.max_draft_tokens} draft tokens a step"
    counts: tuple[int, ...] = (
        stats.forward_count,
        stats.draft_count,
        stats.draft_token_count,
        stats.accepted_token_count,
        stats.max_draft_tokens,
        *stats.histogram,
    )
    if stats.paused is not None:
        counts = (*counts, stats.paused.step_count)
    return "statistics with a negative number" if min(counts) < 0 else ""


def _no_token(info: ModelInfo) -> str:
    return f"a token id that is not in [0, {info.vocab_size})"
