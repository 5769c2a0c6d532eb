"""One drafter for several verifiers, with an independent draft stream for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from outrider.drafter.stream import DraftStream
from outrider.protocol.errors import OutriderError

log = logging.getLogger(__name__)


class DraftStreams:
    """Serves several verifiers and reconnects when one restarts; `stop` ends all streams."""

    def __init__(self, streams: Sequence[tuple[str, DraftStream]]) -> None:
        """`streams` holds (verifier's name, stream) pairs; log lines and errors use the names."""
        self._streams = streams
        self._refusals: list[tuple[str, OutriderError]] = []

    def stop(self) -> None:
        """Say goodbye to all verifiers and end `run`."""
        for _, stream in self._streams:
            stream.stop()

    async def run(self) -> None:
        """Serve until `stop`, or until every verifier has refused this drafter for good.

        Raises OutriderError with all reasons in the second case. An exception of one of the
        strategy's `fatal` types ends all streams.
        """
        tasks = [asyncio.create_task(self._run(name, stream)) for name, stream in self._streams]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if len(self._refusals) == len(self._streams):
            _, first = self._refusals[0]
            if len(self._streams) == 1:
                raise first
            reasons = "; ".join([f"{name}: {error}" for name, error in self._refusals])
            raise OutriderError(first.reason, f"every verifier refuses this drafter: {reasons}")

    async def _run(self, name: str, stream: DraftStream) -> None:
        try:
            await stream.run()
        except OutriderError as error:
            self._refusals.append((name, error))
            if len(self._streams) > 1:
                log.error("%s refuses this drafter for good: %s", name, error)
