"""What the engine has to say, and when: drafters hear of a step at once, clients while the target computes the next one."""

from __future__ import annotations

from collections.abc import Callable

from outrider.errors import OutriderError
from outrider.messages import StepBatch, TokenChunk
from verifier_svc.drafting import Drafting

Delivery = tuple[Callable[..., None], object]
"""A sink, and what to call it with."""


class Outgoing:
    """For the engine's thread alone; `deliver` takes what is said to wherever sinks may be called, which must not change the engine
    but by what they `post`: clients are told in the middle of a step.

    A step's chunks are many messages, and whoever reads them has work to do at once, all of which would stand between a drafter's
    answer and a target that waits for it.
    """

    def __init__(self, deliver: Callable[[list[Delivery]], None], drafting: Drafting) -> None:
        self._deliver = deliver
        self._drafting = drafting
        self._to_clients: list[Delivery] = []

    @property
    def holds_chunks(self) -> bool:
        """Whether there is something that clients were not told yet."""
        return bool(self._to_clients)

    def add(self, sink: Callable[[TokenChunk | OutriderError], None], message: TokenChunk | OutriderError) -> None:
        """Keep a message to a client until `tell_clients`."""
        self._to_clients.append((sink, message))

    def tell_drafters(self) -> None:
        """Deliver what every drafter should hear, a message each."""
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
        """Deliver all that was kept, in one go."""
        if self._to_clients:
            said, self._to_clients = self._to_clients, []
            self._deliver(said)
