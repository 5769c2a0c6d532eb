"""A drafter whose family guesses by counting, for tests against a scripted verifier."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from drafter_svc.families.base import Family
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.observer import CountingObserver
from outrider.drafter.draft_sequence import DraftSequence
from outrider.drafter.grpc_transport import Dialled
from outrider.drafter.stream import DraftStream
from outrider.protocol.draft_messages import Hello, Opened, Window
from outrider.protocol.model_info import ModelInfo
from tests.drafter.scripted_drafts import FINGERPRINT
from tests.family_rig import opened_sequence

WINDOW = Window(16, 4)
TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


class Counting(Family):
    """Guesses that each token is one more than the token before it, two tokens at a time.

    A draft takes `slow_s` seconds unless it is interrupted.
    """

    name = "counting"
    max_draft_tokens = 8

    def __init__(self, slow_s: float = 0.0) -> None:
        self.slow_s = slow_s
        self.is_drafting = asyncio.Event()
        self.is_closed = False

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        self.is_drafting.set()
        ends = time.monotonic() + self.slow_s
        # Poll, as a draft model does between two forwards.
        while time.monotonic() < ends and not interrupted():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        for sequence in sequences:
            last = [*sequence.tokens, *sequence.guesses][-1]
            sequence.extend([last + 1, last + 2])

    async def aclose(self) -> None:
        self.is_closed = True


def opened(sequence_id: int = 1, tokens: Sequence[int] = (10, 11), traceparent: str = "") -> Opened:
    """Return a greedy sequence for which the verifier takes 2 draft tokens in each step."""
    return opened_sequence(sequence_id, tokens, WINDOW, 2, traceparent=traceparent)


class _StreamObserver(CountingObserver):
    """Reports the stream's events to a Drafter and its metrics."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.metrics)
        self._drafter = drafter

    async def registered(self, address: str) -> None:
        await super().registered(address)
        self._drafter.registered = True

    async def lost(self) -> None:
        await super().lost()
        self._drafter.registered = False


class Drafter:
    """A draft stream, the families that it made, and whether a verifier has registered it."""

    def __init__(
        self,
        port: int,
        fingerprint: str = FINGERPRINT,
        slow_s: float = 0.0,
        make: Callable[[], Counting] | None = None,
    ) -> None:
        self.families: list[Counting] = []
        self.registered = False
        self.metrics = DrafterMetrics("counting-1", "counting")

        def make_family(info: ModelInfo) -> Counting:
            family = make() if make is not None else Counting(slow_s)
            self.families.append(family)
            return family

        self.stream = DraftStream(
            Dialled(lambda: f"127.0.0.1:{port}", clock=lambda: 0.0),
            make_family,
            lambda family, info: Hello(
                "counting-1", family.name, fingerprint, family.max_draft_tokens
            ),
            _StreamObserver(self),
            # The clock measures waits and rounds. This clock stands still, so drafting time is 0.
            lambda: 0.0,
        )

    def redial_at_once(self) -> None:
        """Let the stream redial without a pause."""

        async def at_once(seconds: float) -> None:
            """Return at once."""

        self.stream._sleep = at_once  # type: ignore[method-assign]


@asynccontextmanager
async def running(drafter: Drafter) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(drafter.stream.run())
    try:
        yield task
    finally:
        drafter.stream.stop()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 30)
