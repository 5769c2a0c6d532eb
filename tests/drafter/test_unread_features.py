"""A slow drafter loses features, but no verdict, before its memory grows."""

from __future__ import annotations

import asyncio

from outrider.drafter.step_queue import MAX_FEATURE_BYTES
from outrider.drafter.stream import Observer, _Connection
from outrider.protocol.draft_messages import (
    DraftBatch,
    FeatureRequest,
    Features,
    Hello,
    StepBatch,
    Verdict,
    Welcome,
)
from tests.drafter.counting_drafter import Counting, opened
from tests.waiting import until

WIDTH = 2**19
"""The count of numbers in a feature. A feature takes 1 MiB."""
STEPS = 40


class Reading(Counting):
    """Drafts only once `let` is set, and keeps the positions of the features that it got."""

    feature_request = FeatureRequest((1,))

    def __init__(self) -> None:
        super().__init__()
        self.let = asyncio.Event()
        self.positions: list[int] = []
        self.length = 0

    def features(self, sequence: object, first_position: int, rows: object) -> None:
        self.positions.append(first_position)

    async def propose(self, sequences, interrupted) -> None:  # type: ignore[no-untyped-def]
        await self.let.wait()
        self.length = len(sequences[0].tokens)
        await super().propose(sequences, interrupted)


class Flood:
    """A transport in which, from the start, all steps wait to be read."""

    address = "a test"

    def __init__(self) -> None:
        self.left = [
            StepBatch(
                features=[Features(1, 1 + i, bytes(2 * WIDTH))],
                verdicts=[Verdict(1, 3 + i, [12 + i], 0, 2)],
            )
            for i in reversed(range(STEPS))
        ]
        self.steps = list(self.left)
        self.opened = False

    async def introduce(self, hello: Hello) -> Welcome:
        return Welcome("m", 4096, 2048, WIDTH)

    async def read(self) -> StepBatch | None:
        if not self.opened:
            self.opened = True
            return StepBatch(opened=[opened()])
        # The drafter starts with the first step, before the other steps come.
        await asyncio.sleep(0)
        if self.left:
            return self.left.pop()
        await asyncio.Event().wait()
        return None

    async def write(self, batch: DraftBatch) -> None:
        await asyncio.sleep(0)

    async def say_goodbye(self) -> None:
        await asyncio.sleep(0)


async def test_features_that_a_slow_drafter_has_not_read_are_bounded() -> None:
    strategy, transport, stopping = Reading(), Flood(), asyncio.Event()
    connection = _Connection(transport, strategy, stopping, Observer(), lambda: 0.0)
    await connection.introduce(Hello("d", "f", "f", 8))
    serving = asyncio.create_task(connection.serve())
    await until(lambda: not transport.left)
    held = sum([step.feature_bytes for step in transport.steps])
    assert MAX_FEATURE_BYTES < held <= MAX_FEATURE_BYTES + 2 * 2 * WIDTH
    strategy.let.set()
    await until(lambda: strategy.length == 2 + STEPS)
    # The drafter kept the features of the first steps, without a gap.
    assert strategy.positions == [*range(1, 1 + held // (2 * WIDTH))]
    stopping.set()
    await serving
