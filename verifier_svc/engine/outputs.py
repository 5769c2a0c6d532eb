"""Finds where a sequence ends and builds the chunk of a step. Knows no pages or drafters' state."""

from __future__ import annotations

from outrider.messages import FinishReason, TokenChunk, TokenSource
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence
from verifier_svc.verification.batch import Verified


def cut_at_end(sequence: Sequence, new: list[int]) -> FinishReason | None:
    """Cut `new` behind the token that ends the sequence.

    Returns why the sequence ends; None if it goes on.
    """
    max_tokens = sequence.request.max_tokens
    if max_tokens == 0:
        new.clear()  # the request wants only its prompt's log probabilities
        return FinishReason.LENGTH
    if not sequence.end_ids.isdisjoint(new):
        del new[next(i for i, token in enumerate(new) if token in sequence.end_ids) + 1 :]
        return FinishReason.STOP
    generated = len(sequence.tokens) - len(sequence.request.prompt) + len(new)
    return FinishReason.LENGTH if generated >= max_tokens else None


def chunk_of(
    scheduled: ScheduledSequence,
    new: list[int],
    accepted: int,
    verified: Verified,
    finish_reason: FinishReason | None,
) -> TokenChunk:
    """Build the chunk of the committed tokens `new`, the first `accepted` of which were drafted.

    It names the source of each token. The last chunk has the sequence's statistics.
    """
    sequence = scheduled.sequence
    drafted = len(scheduled.draft.token_ids)
    sources = [TokenSource.ACCEPTED] * accepted
    if len(new) > accepted:
        sources.append(_own_source(drafted, accepted))
    assignment = scheduled.assignment
    return TokenChunk(
        token_ids=new,
        sources=sources,
        drafter_id=assignment.drafter.id if assignment is not None else "",
        finish_reason=finish_reason,
        stats=sequence.stats if finish_reason is not None else None,
        cached_token_count=sequence.cached_token_count,
        draft_token_count=drafted,
        logprobs=list(verified.logprobs[: len(new)]),
        prompt_logprobs=list(verified.prompt_logprobs),
    )


def _own_source(drafted: int, accepted: int) -> TokenSource:
    """The source of the token that the target itself sampled."""
    if drafted == 0:
        return TokenSource.PLAIN
    return TokenSource.BONUS if accepted == drafted else TokenSource.RECOVERED
