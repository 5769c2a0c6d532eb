"""Commits one step of a sequence: tokens, pages and verdicts first, chunks and counts later.

Drafters wait for verdicts, and the next step waits for tokens and pages, so these come first.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from outrider.errors import OutriderError
from outrider.grammar.backends import Matcher
from outrider.process.observability.telemetry import Span
from outrider.protocol.messages import FinishReason, TokenChunk
from verifier_svc.drafts.draft_message import JudgedDraft, judge_draft, main_path_count
from verifier_svc.engine.context import EngineContext
from verifier_svc.engine.endings import Endings
from verifier_svc.engine.output_chunks import chunk_of, cut_at_end, cut_at_grammars_end, sources_of
from verifier_svc.engine.step_spans import StepSpans
from verifier_svc.policy.pause_reasons import pause_of
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence
from verifier_svc.verification.batch import Verified
from verifier_svc.verification.draft import AcceptResult
from verifier_svc.verification.grammar_masks import has_slow_masks

_Committed = tuple[
    ScheduledSequence,
    Verified,
    AcceptResult,
    JudgedDraft | None,
    list[int],
    FinishReason | None,
]
"""A sequence's part of a step: what was scheduled, verified, accepted and judged, the new tokens,
and why the sequence ends."""


class Committer:
    """Commits the steps of one engine, on the engine's thread."""

    def __init__(
        self,
        context: EngineContext,
        endings: Endings,
        spans: StepSpans,
        eos_token_ids: SequenceOf[int],
    ) -> None:
        """`eos_token_ids` are the model's end tokens. Only these can end the text of a grammar."""
        self._pool = context.scheduler.pool
        self._drafting = context.drafting
        self._outbox = context.outbox
        self._book = context.book
        self._metrics = context.metrics
        self._endings = endings
        self._spans = spans
        self._eos_token_ids = frozenset(eos_token_ids)
        self._token_count = 0
        # The work that `_record` still has to do, in the order of the commits.
        self._unrecorded: list[_Committed] = []

    def commit(
        self,
        scheduled: ScheduledSequence,
        verified: Verified | OutriderError | None,
        span: Span,
    ) -> None:
        """Commit one sequence's part of a step; an error ends the sequence.

        If `verified` is None, the part is undone, since it has to be repeated. `span` is the
        sequence's span of this step.
        """
        if verified is None:
            self._leave_out(scheduled)
            return
        if isinstance(verified, OutriderError):
            self._endings.fail(scheduled.sequence, verified)
            return
        sequence = scheduled.sequence
        sequence.kv.num_computed_tokens = scheduled.start + len(scheduled.token_ids)
        if verified.prompt_logprobs:
            sequence.unscored = sequence.unscored[len(verified.prompt_logprobs) :]
        if verified.result is not None:
            self._commit_tokens(scheduled, verified, verified.result, span)
            return
        self._pool.cache_pages(sequence.kv, sequence.tokens, sequence.request.tenant)
        if verified.prompt_logprobs:
            chunk = TokenChunk([], [], prompt_logprobs=list(verified.prompt_logprobs))
            self._outbox.add(sequence.sink, chunk)

    def take_token_count(self) -> int:
        """Return the number of tokens committed since the last call, and add it to the metrics."""
        count = self._token_count
        self._token_count = 0
        self._metrics.generated(count)
        return count

    def _leave_out(self, scheduled: ScheduledSequence) -> None:
        """Undo a sequence's part of a step that has to be repeated.

        The part's committed tokens stay in the cache, except the last token, whose logits are
        needed again. If the part scores a prompt, or if its draft spoilt the logits, all of these
        tokens are computed anew.
        """
        kv = scheduled.sequence.kv
        if not scheduled.scored and not scheduled.is_spoilt:
            kv.num_computed_tokens = scheduled.start + len(scheduled.token_ids) - 1
        self._pool.truncate(kv, kv.num_computed_tokens)

    def _commit_tokens(
        self,
        scheduled: ScheduledSequence,
        verified: Verified,
        result: AcceptResult,
        span: Span,
    ) -> None:
        sequence = scheduled.sequence
        drafted = scheduled.draft.token_ids
        rows = result.rows
        new = [drafted[row - 1] for row in rows] if rows else []
        new.append(result.next_token)
        finish_reason = cut_at_end(sequence, new)
        if sequence.matcher is not None:
            try:
                if self._ends_grammar(sequence, sequence.matcher, new, finish_reason):
                    finish_reason = FinishReason.STOP
            except OutriderError as error:
                self._endings.fail(sequence, error)
                return
        accepted = min(result.accepted_count, len(new))
        sequence.tokens += new
        sequence.stats.record(len(drafted), accepted, verified.rule)
        self._keep_pages(sequence, len(drafted), accepted)
        if sequence.stats.forward_count == 1:
            self._spans.prefilled(sequence)
        self._token_count += len(new)
        if span.traceparent:
            span.set(outrider__accepted_tokens=accepted, outrider__committed_tokens=len(new))
            if scheduled.draft.parents:
                span.set(outrider__side_tokens=accepted - main_path_count(rows[:accepted]))
        verified_of = scheduled.assignment
        judged: JudgedDraft | None = None
        if verified_of is not None:
            judged = judge_draft(sequence, verified_of, scheduled.draft, rows)
        if not self._unrecorded:
            self._outbox.later(self._record)
        self._unrecorded.append((scheduled, verified, result, judged, new, finish_reason))
        if finish_reason is not None:
            sequence.stats.paused = pause_of(sequence, self._drafting.plan)
            self._endings.end(sequence)
        else:
            self._drafting.send_verdicts(sequence, new, verified_of, span)

    def _record(self) -> None:
        """Do the work kept since the last call: count drafts, and make chunks for clients."""
        unrecorded = self._unrecorded
        self._unrecorded = []
        for scheduled, verified, result, judged, new, finish_reason in unrecorded:
            if judged is not None:
                judged.record(self._metrics, len(new))
            sources = sources_of(scheduled.draft, result.rows, len(new))
            chunk = chunk_of(scheduled, verified, new, sources, finish_reason)
            self._book.emit(scheduled.sequence, chunk)

    def _ends_grammar(
        self,
        sequence: Sequence,
        matcher: Matcher,
        new: list[int],
        finish_reason: FinishReason | None,
    ) -> bool:
        """Advance a sequence's grammar by `new`, and cut `new` where the grammar's text ends.

        Returns True if the text ends; then nothing may follow, even with ignore_eos. Raises
        OutriderError for a token that the grammar forbids.
        """
        may_end = finish_reason is not None or not self._eos_token_ids.isdisjoint(new)
        if has_slow_masks(sequence) and not may_end:
            # Advancing the grammar here would delay every sequence. The work that computes the next
            # mask therefore advances the grammar too.
            sequence.grammar_lag = len(new)
            return False
        return cut_at_grammars_end(matcher, new)

    def _keep_pages(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Keep the keys and values of the accepted tokens; free the pages of the rejected tokens.

        The next forward computes the keys and values of the target's own token.
        """
        sequence.kv.num_computed_tokens += accepted
        if accepted < drafted:
            self._pool.truncate(sequence.kv, sequence.kv.num_computed_tokens)
        self._pool.cache_pages(sequence.kv, sequence.tokens, sequence.request.tenant)


def moved_slots(
    batch: SequenceOf[ScheduledSequence],
    verified: SequenceOf[Verified | OutriderError | None],
    page_size: int,
) -> tuple[list[int], list[int]]:
    """Return the source slots and the target slots of a step's copies in the flattened cache.

    Most steps need no copies, and then both lists are empty.

    A tree's tokens lie in the slots after the text, in the tree's order. The accepted path must be
    moved into the text's order before one of its pages is shared or the next forward reads it.
    """
    sources: list[int] = []
    targets: list[int] = []
    for scheduled, found in zip(batch, verified, strict=True):
        if not scheduled.draft.parents or not isinstance(found, Verified) or found.result is None:
            continue
        pages = scheduled.sequence.kv.pages
        root = scheduled.start + len(scheduled.token_ids) - 1
        for place, row in enumerate(found.result.rows, 1):
            if row != place:
                sources.append(_slot(pages, root + row, page_size))
                targets.append(_slot(pages, root + place, page_size))
    return sources, targets


def _slot(pages: SequenceOf[int], index: int, page_size: int) -> int:
    return pages[index // page_size] * page_size + index % page_size
