"""A bounded queue of the steps that a drafter has not read yet."""

from __future__ import annotations

import asyncio

from outrider.drafter.step_queue import StepQueue
from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import StepBatch

# A drafter that leaves this many engine steps unread is cut off, before memory grows.
MAX_UNREAD = 1024


class UnreadSteps:
    """A queue from the engine to one drafter. Call it on the event loop; only `get` waits."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the stream has to end; raises the error that ends it, if there is one.

        Steps that are unread at that time are dropped.
        """
        self._steps = StepQueue()

    def put(self, message: StepBatch | OutriderError) -> None:
        """Queue a step's messages to the drafter, or the error that ends the stream."""
        if self.failure.done():
            return
        if isinstance(message, OutriderError):
            self._fail(message)
        elif self._steps.qsize() >= MAX_UNREAD:
            reason = f"{MAX_UNREAD} steps are unread; the stream is cut off"
            self._fail(OutriderError(Reason.SLOW_READER, reason))
        else:
            self._steps.put_nowait(message)

    def end(self) -> None:
        """End the stream without an error."""
        if not self.failure.done():
            self.failure.set_result(None)
            self._steps.put_nowait(None)

    def _fail(self, error: OutriderError) -> None:
        self.failure.set_exception(error)
        self._steps.put_nowait(None)

    async def get(self) -> StepBatch | None:
        """Wait for the next step; return None at the end.

        Raises the OutriderError that ended the stream.
        """
        step = await self._steps.get()
        if step is None or self.failure.done():
            await self.failure
            return None
        return step
