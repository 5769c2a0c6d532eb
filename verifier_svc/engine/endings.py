"""Ends sequences that finish, fail or are cancelled."""

from __future__ import annotations

from outrider.errors import OutriderError
from verifier_svc.engine.context import EngineContext
from verifier_svc.state.sequence import Sequence


class Endings:
    """Takes ended sequences out of one engine, on the engine's thread."""

    def __init__(self, context: EngineContext) -> None:
        self._sequences = context.sequences
        self._scheduler = context.scheduler
        self._drafting = context.drafting
        self._outbox = context.outbox
        self._clock = context.clock

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence, free its pages, and tell its drafters that it has ended."""
        del self._sequences[sequence.id]
        if sequence.mask_work is not None:
            sequence.mask_work.cancel()
        self._scheduler.load_meter.ended(sequence, self._clock())
        self._scheduler.remove(sequence)
        self._drafting.close(sequence)

    def fail(self, sequence: Sequence, error: OutriderError) -> None:
        """End a sequence with an error, which its caller gets after the tokens.

        The caller does not get tokens that still wait for `min_chunk_tokens`.
        """
        self._outbox.catch_up()
        self._outbox.add(sequence.sink, error)
        self.end(sequence)
