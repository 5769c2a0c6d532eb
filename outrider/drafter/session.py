"""A drafter's side of one draft stream without its sockets: takes steps, and makes draft batches.

This module owns the sequences, and decides when to ask the strategy for guesses, and for which
sequences. Drafting itself, sockets and tasks are in other modules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.drafter.draft_sequence import DraftSequence
from outrider.drafter.strategy import Strategy
from outrider.errors import OutriderError, Reason
from outrider.process.clock import Clock, monotonic
from outrider.protocol.draft_messages import (
    DraftBatch,
    Features,
    Opened,
    StepBatch,
    Verdict,
    Welcome,
)

log = logging.getLogger(__name__)


class DraftSession:
    """The sequences of one stream and the strategy that drafts for them.

    Calls of `apply` and `round` must not overlap. When the strategy raises while it works on one
    sequence, the session abandons that sequence: until the sequence is closed, the session drafts
    no more for it and answers its verdicts with skips. OutriderErrors and the strategy's `fatal`
    exceptions propagate, because no single sequence causes them.
    """

    def __init__(self, strategy: Strategy, clock: Clock = monotonic) -> None:
        self.sequences: dict[int, DraftSequence] = {}
        self.abandoned_count = 0
        """The number of sequences abandoned so far."""
        self._strategy = strategy
        self._clock = clock
        # The number of bytes of a token's feature; 0 if the verifier sends no features.
        self._feature_bytes = 0
        # Exceptions that no single sequence causes.
        self._propagated: tuple[type[Exception], ...] = (OutriderError, *strategy.fatal)
        # Type, file and line of the failures that were logged.
        self._logged: set[tuple[type[Exception], str, int]] = set()

    def welcome(self, welcome: Welcome) -> None:
        """Take the verifier's answer to the Hello. Raises OutriderError if the strategy does."""
        request = self._strategy.feature_request
        if request is not None:
            self._feature_bytes = welcome.feature_width * request.dtype.size
        self._strategy.welcomed(welcome)

    def apply(self, step: StepBatch) -> None:
        """Apply a step batch.

        Raises OutriderError(PROTOCOL_VIOLATION) for an invalid verdict or features of a wrong size.
        """
        for opened in step.opened:
            self._open(opened)
        for features in step.features:
            self._read(features)
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

    def _read(self, features: Features) -> None:
        if isinstance(features.rows, bytes):
            self._check_size(len(features.rows))
        sequence = self.sequences.get(features.sequence_id)
        if sequence is not None and not sequence.abandoned:
            with self._abandoning(sequence):
                self._strategy.features(sequence, features.first_position, features.rows)

    def _check_size(self, size: int) -> None:
        if not self._feature_bytes or size % self._feature_bytes:
            limit = f"a multiple of {self._feature_bytes}" if self._feature_bytes else "0"
            message = f"features of {size} bytes came, where {limit} was agreed"
            raise OutriderError(Reason.PROTOCOL_VIOLATION, message)

    def _follow(self, verdict: Verdict) -> None:
        sequence = self.sequences.get(verdict.sequence_id)
        if sequence is None:
            return
        before = len(sequence.tokens)
        num_valid_tokens = sequence.advance_or_rewind(verdict)
        if len(sequence.tokens) > before and not sequence.abandoned:
            with self._abandoning(sequence):
                self._strategy.committed(sequence, num_valid_tokens)

    async def round(self, interrupted: Callable[[], bool]) -> DraftBatch:
        """Draft until there is something to send, and return it.

        The batch is empty if there is nothing to draft, or if an interrupted round found no guess.
        In that case, apply a message before the next round. Sequences that the verifier may be
        waiting for come first; other sequences run ahead only when there is no such sequence.
        `interrupted` returns True if a message waits to be applied; then the round ends with the
        guesses so far.
        """
        started = self._clock()
        while asked := self._next():
            await self._propose(asked, interrupted)
            for sequence in asked:
                sequence.resolve()
            batch = self._collect(self._clock() - started)
            if batch.proposals or batch.skips or interrupted():
                return batch
        return self._collect(0.0)

    def _next(self) -> list[DraftSequence]:
        sequences = self.sequences.values()
        urgent = [sequence for sequence in sequences if sequence.urgent]
        if urgent:
            return urgent
        return [each for each in sequences if each.remaining_window > 0 or each.branch_room > 0]

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
        """Call the strategy for all sequences at once; if that fails, for each separately."""
        try:
            await self._strategy.propose(asked, interrupted)
        except self._propagated:
            raise
        except Exception:  # noqa: BLE001  # the calls below raise it for the sequences at fault
            for sequence in asked:
                with self._abandoning(sequence):
                    await self._strategy.propose([sequence], interrupted)

    @contextmanager
    def _abandoning(self, sequence: DraftSequence) -> Iterator[None]:
        """Abandon the sequence if the block raises."""
        try:
            yield
        except self._propagated:
            raise
        except Exception as error:  # noqa: BLE001  # `_abandon` logs it
            self._abandon(sequence, error)

    def _abandon(self, sequence: DraftSequence, error: Exception) -> None:
        """Draft no more for a sequence. Log the first error of each type and line."""
        kind = type(error), *_origin(error)
        if kind not in self._logged:
            self._logged.add(kind)
            message = "sequence %d is not drafted for any more; such failures are logged once"
            log.error(message, sequence.id, exc_info=error)
        self.abandoned_count += 1
        sequence.abandon()
        self._close(sequence)

    def _close(self, sequence: DraftSequence) -> None:
        try:
            self._strategy.closed(sequence)
        except self._propagated:
            raise
        except Exception:  # a family's fault in one sequence must not end the other sequences
            log.exception("the strategy failed to release its state of sequence %d", sequence.id)


def _origin(error: Exception) -> tuple[str, int]:
    """Return the file and line of the frame that raised the error."""
    trace = error.__traceback__
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno
