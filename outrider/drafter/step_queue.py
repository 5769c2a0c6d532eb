"""A queue of the steps that a drafter has not read yet, with a bound on their features."""

from __future__ import annotations

import asyncio

from outrider.protocol.draft_messages import StepBatch

MAX_FEATURE_BYTES = 16 * 2**20
"""While the unread features take more bytes than this, further steps lose their features."""


class StepQueue(asyncio.Queue[StepBatch | None]):
    """A queue of steps. Verifier and drafter each have one, since steps may wait at either end.

    When features are dropped, the drafter sees a gap in them. The drafter's guesses may then be
    worse; nothing else changes. A None in the queue is no step, but wakes the reader.
    """

    _feature_bytes = 0

    def _put(self, item: StepBatch | None) -> None:
        if item is not None:
            if self._feature_bytes > MAX_FEATURE_BYTES:
                item.features.clear()
            self._feature_bytes += item.feature_bytes
        super()._put(item)

    def _get(self) -> StepBatch | None:
        item: StepBatch | None = super()._get()
        if item is not None:
            self._feature_bytes -= item.feature_bytes
        return item
