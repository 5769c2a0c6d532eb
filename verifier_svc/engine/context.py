"""The objects that the intake, the commit and the endings of one engine share."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.process.clock import Clock
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.engine.outbox import Outbox
from verifier_svc.engine.scheduler import Scheduler
from verifier_svc.engine.sequence_book import SequenceBook
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class EngineContext:
    """The objects that several parts of one engine use.

    Only the engine's thread uses these objects. `sequences` maps ids to queued, running and unread
    sequences.
    """

    sequences: dict[int, Sequence]
    scheduler: Scheduler
    drafting: DraftExchange
    outbox: Outbox
    book: SequenceBook
    metrics: VerifierMetrics
    clock: Clock
