"""The engine's messages: drafters hear of a step at once, clients while the target computes the next one."""

from __future__ import annotations

from collections.abc import Callable

from outrider.errors import OutriderError
from outrider.messages import StepBatch, TokenChunk
from verifier_svc.drafts.exchange import DraftExchange

Delivery = tuple[Callable[..., None], object]
"""A sink, and what to call it with."""


class Outgoing:
    """For the engine's thread alone. `deliver` runs the sinks, in production on the event loop.

    A sink may change the engine only through `Engine.post`, because clients are told in the middle of a step. They are told late
    because a step's chunks are many messages: sending and reading them would delay a drafter's answer while the target waits.
    """

    def __init__(self, deliver: Callable[[list[Delivery]], None], drafting: DraftExchange) -> None:
        self._deliver = deliver
        self._drafting = drafting
        self._to_clients: list[Delivery] = []

    @property
    def holds_chunks(self) -> bool:
        """Whether messages to clients are still to be delivered."""
        return bool(self._to_clients)

    def add(
        self,
        sink: Callable[[TokenChunk | OutriderError], None],
        message: TokenChunk | OutriderError,
    ) -> None:
        """Keep a message to a client until `tell_clients`."""
        self._to_clients.append((sink, message))

    def tell_drafters(self) -> None:
        """Deliver one message to each drafter that has something to hear."""
        drafting = self._drafting
        said: list[Delivery] = [(drafter.sink, error) for drafter, error in drafting.rejections]
        drafting.rejections.clear()
        for drafter in drafting.roster.connected.values():
            if drafter.outbox:
                said.append((drafter.sink, drafter.outbox))
                drafter.outbox = StepBatch()
        if said:
            self._deliver(said)

    def tell_clients(self) -> None:
        """Deliver all messages that were kept, in one call."""
        if self._to_clients:
            said, self._to_clients = self._to_clients, []
            self._deliver(said)
