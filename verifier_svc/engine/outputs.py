"""What a step brings one request: where its sequence ends, and the chunk that is sent. Knows no pages and no drafters' state."""

from __future__ import annotations

from outrider.messages import FinishReason, TokenChunk, TokenSource
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence
from verifier_svc.verification.batch import Verified


def cut_at_end(sequence: Sequence, new: list[int]) -> FinishReason | None:
    """Cut `new` behind the token that ends the sequence, and say why it ends; None when it goes on."""
    if sequence.request.max_tokens == 0:
        new.clear()  # only the prompt's log probabilities were wanted
        return FinishReason.LENGTH
    if not sequence.end_ids.isdisjoint(new):
        del new[next(i for i, token in enumerate(new) if token in sequence.end_ids) + 1 :]
        return FinishReason.STOP
    generated = len(sequence.tokens) - len(sequence.request.prompt) + len(new)
    return FinishReason.LENGTH if generated >= sequence.request.max_tokens else None


def chunk_of(
    scheduled: ScheduledSequence,
    new: list[int],
    accepted: int,
    verified: Verified,
    finish_reason: FinishReason | None,
) -> TokenChunk:
    """What the step committed, each token with its author."""
    sources, drafted = [TokenSource.ACCEPTED] * accepted, len(scheduled.path.token_ids)
    if len(new) > accepted:
        own = TokenSource.BONUS if accepted == drafted else TokenSource.RECOVERED
        sources.append(own if drafted else TokenSource.PLAIN)
    return TokenChunk(
        token_ids=new,
        sources=sources,
        drafter_id=scheduled.assignment.drafter.id if scheduled.assignment is not None else "",
        finish_reason=finish_reason,
        stats=scheduled.sequence.stats if finish_reason is not None else None,
        cached_token_count=scheduled.sequence.cached_token_count,
        draft_token_count=drafted,
        logprobs=list(verified.logprobs[: len(new)]),
        prompt_logprobs=list(verified.prompt_logprobs),
    )
