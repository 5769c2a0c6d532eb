"""A drafter's part in one draft stream, without the stream: what the verifier says goes in, what there is to say comes out.

Owns the sequences and knows when to ask a family for which. Knows no way of drafting, no sockets and no tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.clock import Clock, monotonic
from outrider.drafter.draft_sequence import DraftSequence
from outrider.drafter.strategy import Strategy
from outrider.errors import OutriderError
from outrider.messages import DraftBatch, Opened, StepBatch, Verdict

log = logging.getLogger(__name__)


class DraftSession:
    """The sequences of one stream and the family that drafts for them. `apply` and `round` must not overlap.

    An exception out of the family's work for one sequence costs that sequence its drafts: it is abandoned, and skipped after each
    verdict until it is closed. OutriderErrors and the family's `fatal` exceptions are no sequence's fault and go on up.
    """

    def __init__(self, strategy: Strategy, clock: Clock = monotonic) -> None:
        self.sequences: dict[int, DraftSequence] = {}
        self.abandoned_count = 0
        """Sequences that were abandoned so far."""
        self._strategy = strategy
        self._clock = clock
        # Exceptions that are no sequence's fault.
        self._nobodys: tuple[type[Exception], ...] = (OutriderError, *strategy.fatal)
        # Kinds of failures that were logged, by type and origin.
        self._logged: set[tuple[type[Exception], str, int]] = set()

    def apply(self, step: StepBatch) -> None:
        """Take over what the verifier said; raises OutriderError(PROTOCOL_VIOLATION) for what no delay explains."""
        for opened in step.opened:
            self._open(opened)
        for verdict in step.verdicts:
            self._follow(verdict)
        for closed in step.closed:
            sequence = self.sequences.pop(closed.sequence_id, None)
            if sequence is not None and not sequence.abandoned:
                self._close(sequence)

    def _open(self, opened: Opened) -> None:
        if opened.sequence_id not in self.sequences:
            sequence = self.sequences[opened.sequence_id] = DraftSequence(opened)
            with self._abandoning(sequence):
                self._strategy.opened(sequence)

    def _follow(self, verdict: Verdict) -> None:
        sequence = self.sequences.get(verdict.sequence_id)
        if sequence is None:
            return
        before = len(sequence.tokens)
        standing = sequence.follow(verdict)
        if len(sequence.tokens) > before and not sequence.abandoned:
            with self._abandoning(sequence):
                self._strategy.committed(sequence, standing)

    async def round(self, interrupted: Callable[[], bool]) -> DraftBatch:
        """What there is to say; empty when there is nothing to do before the next message.

        Sequences that the verifier may be waiting for come first. Only when there are none do others run ahead of it. Once
        `interrupted` says so, a message waits to be applied, and the round ends with what there is.
        """
        started = self._clock()
        while asked := self._next():
            await self._propose(asked, interrupted)
            for sequence in asked:
                sequence.settle()
            batch = self._collect(self._clock() - started)
            if batch.proposals or batch.skips or interrupted():
                return batch
        return self._collect(0.0)

    def _next(self) -> list[DraftSequence]:
        sequences = self.sequences.values()
        urgent = [sequence for sequence in sequences if sequence.urgent]
        return urgent or [
            sequence for sequence in sequences if sequence.room > 0 or sequence.branch_room > 0
        ]

    def _collect(self, draft_seconds: float) -> DraftBatch:
        batch = DraftBatch()
        for sequence in self.sequences.values():
            if proposal := sequence.take_proposal():
                proposal.draft_seconds = draft_seconds
                batch.proposals.append(proposal)
            if skip := sequence.take_skip():
                batch.skips.append(skip)
        return batch

    async def _propose(self, asked: list[DraftSequence], interrupted: Callable[[], bool]) -> None:
        """Ask for all at once; if that fails, for each alone, so that those at fault are known."""
        try:
            await self._strategy.propose(asked, interrupted)
        except self._nobodys:
            raise
        except Exception:  # noqa: BLE001  # raised again by those at fault
            for sequence in asked:
                with self._abandoning(sequence):
                    await self._strategy.propose([sequence], interrupted)

    @contextmanager
    def _abandoning(self, sequence: DraftSequence) -> Iterator[None]:
        """Work for one sequence, which is abandoned if that raises."""
        try:
            yield
        except self._nobodys:
            raise
        except Exception as error:  # noqa: BLE001  # logged there
            self._abandon(sequence, error)

    def _abandon(self, sequence: DraftSequence, error: Exception) -> None:
        """Draft no more for a sequence; the log has each kind of error once, by its type and where it was raised."""
        kind = type(error), *_origin(error)
        if kind not in self._logged:
            self._logged.add(kind)
            message = "sequence %d is not drafted for any more; later failures of this kind are not logged"
            log.error(message, sequence.id, exc_info=error)
        self.abandoned_count += 1
        sequence.abandon()
        self._close(sequence)

    def _close(self, sequence: DraftSequence) -> None:
        try:
            self._strategy.closed(sequence)
        except self._nobodys:
            raise
        except Exception:
            log.exception("the family could not give back what it held of sequence %d", sequence.id)


def _origin(error: Exception) -> tuple[str, int]:
    """File and line of the innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace is not None else ("", 0)
