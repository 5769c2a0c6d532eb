"""Finds where a sequence ends and builds the chunk of a step, from tokens and requests alone."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import Matcher
from outrider.protocol.messages import FinishReason, TokenChunk, TokenSource
from outrider.protocol.token_tree import main_path
from verifier_svc.drafts.draft_message import main_path_count
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence
from verifier_svc.state.trie import DraftTree
from verifier_svc.verification.batch import Verified
from verifier_svc.verification.tree_walk import is_leaf


def cut_at_end(sequence: Sequence, new: list[int]) -> FinishReason | None:
    """Cut `new` after the first token that ends the sequence, or where `max_tokens` is reached.

    Returns why the sequence ends; None if it goes on.
    """
    max_tokens = sequence.request.max_tokens
    if max_tokens == 0:
        new.clear()  # the request wants only its prompt's log probabilities
        return FinishReason.LENGTH
    left = max_tokens - (len(sequence.tokens) - len(sequence.request.prompt))
    del new[left:]
    if not sequence.end_ids.isdisjoint(new):
        del new[next(i for i, token in enumerate(new) if token in sequence.end_ids) + 1 :]
        return FinishReason.STOP
    if len(new) >= left:
        return FinishReason.LENGTH
    return None


def cut_at_grammars_end(matcher: Matcher, new: list[int]) -> bool:
    """Advance a grammar by `new`, and cut `new` after the token that ends the grammar's text.

    Returns True if the text ends. Raises OutriderError(INTERNAL) for a token that the grammar
    forbids.
    """
    for i, token in enumerate(new):
        if not matcher.accept(token):
            message = "a token was sampled that the grammar's mask forbids"
            raise OutriderError(Reason.INTERNAL, message)
        if matcher.ended:
            del new[i + 1 :]
            return True
    return False


def sources_of(draft: DraftTree, rows: SequenceOf[int], count: int) -> list[TokenSource]:
    """Return the source of each of the `count` tokens that a step committed to a sequence.

    The step accepted the `rows` of the sequence's draft.
    """
    if not draft.token_ids:
        return [TokenSource.PLAIN] * count
    rows = rows[:count]
    on_main_path = main_path_count(rows) if draft.parents else len(rows)
    sources = [TokenSource.ACCEPTED] * on_main_path
    sources += [TokenSource.ACCEPTED_SIDE] * (len(rows) - on_main_path)
    if count > len(rows):
        sources.append(_own_source(draft, rows[-1] if rows else 0))
    return sources


def chunk_of(
    scheduled: ScheduledSequence,
    verified: Verified,
    new: list[int],
    sources: list[TokenSource],
    finish_reason: FinishReason | None,
) -> TokenChunk:
    """Build the chunk of the committed tokens `new`; a sequence's last chunk has its statistics."""
    sequence = scheduled.sequence
    draft = scheduled.draft
    assignment = scheduled.assignment
    return TokenChunk(
        token_ids=new,
        sources=sources,
        drafter_id=assignment.drafter.id if assignment is not None else "",
        finish_reason=finish_reason,
        stats=sequence.stats if finish_reason is not None else None,
        cached_token_count=sequence.cached_token_count,
        draft_token_count=len(draft.token_ids),
        side_draft_token_count=_branch_token_count(draft.parents),
        logprobs=list(verified.logprobs[: len(new)]),
        prompt_logprobs=list(verified.prompt_logprobs),
    )


def _branch_token_count(parents: list[int]) -> int:
    """Return the number of a tree's tokens that are not on its main path; 0 for a chain."""
    if not parents:
        return 0
    return len(parents) - len(main_path(parents))


def _own_source(draft: DraftTree, last_row: int) -> TokenSource:
    """Return the source of the token that the target itself sampled after the last accepted row."""
    if is_leaf(last_row, len(draft.token_ids), draft.parents):
        return TokenSource.BONUS
    return TokenSource.RECOVERED
