"""The engine's outgoing messages: verdicts leave after a step, chunks during the next forward.

The work that makes chunks also waits here, like all work that no drafter and no step waits for.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.errors import OutriderError
from outrider.protocol.draft_messages import StepBatch
from outrider.protocol.messages import TokenChunk
from verifier_svc.drafts.exchange import DraftExchange

Delivery = tuple[Callable[..., None], object]
"""A sink and its argument."""


class Outbox:
    """Holds outgoing messages.

    Only the engine's thread uses it. `deliver` runs the sinks, in production on the event loop.
    A sink may change the engine only through `Engine.post`, because clients are notified in the
    middle of a step. Clients are notified late because a step has many chunks. Sending and reading
    them at once would delay the drafters' answers while the target waits.
    """

    def __init__(self, deliver: Callable[[list[Delivery]], None], drafting: DraftExchange) -> None:
        self._deliver = deliver
        self._drafting = drafting
        self._to_clients: list[Delivery] = []
        self._later: list[Callable[[], object]] = []

    @property
    def holds_chunks(self) -> bool:
        """True if client messages wait, or work that may make client messages."""
        return bool(self._to_clients or self._later)

    def later(self, work: Callable[[], object]) -> None:
        """Keep work for `catch_up`, as nothing waits for it; the work may `add` client messages."""
        self._later.append(work)

    def catch_up(self) -> None:
        """Do the kept work, and record what the tries had of the last commits' tokens."""
        self._drafting.record_walks()
        while self._later:
            self._later.pop(0)()

    def add(
        self,
        sink: Callable[[TokenChunk | OutriderError], None],
        message: TokenChunk | OutriderError,
    ) -> None:
        """Keep a client message until `send_to_clients`."""
        self._to_clients.append((sink, message))

    def send_to_drafters(self) -> None:
        """Deliver at most one message to each drafter, and the errors of rejected drafters."""
        drafting = self._drafting
        messages: list[Delivery] = [(drafter.sink, error) for drafter, error in drafting.rejections]
        drafting.rejections.clear()
        drafting.count_messages()
        for drafter in drafting.roster.connected.values():
            if drafter.outbox:
                messages.append((drafter.sink, drafter.outbox))
                drafter.outbox = StepBatch()
        if messages:
            self._deliver(messages)

    def send_to_clients(self) -> None:
        """Do the work that was kept, then deliver all kept client messages in one call."""
        self.catch_up()
        if self._to_clients:
            messages = self._to_clients
            self._to_clients = []
            self._deliver(messages)
