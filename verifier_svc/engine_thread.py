"""The bridge between the event loop and the engine's thread: neither ever waits for the other while holding it up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from outrider.lm.pages import PagePool

from outrider.errors import OutriderError
from verifier_svc.engine import Delivery, Engine, LanguageModel, Limits
from verifier_svc.metrics import Metrics

log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class EngineThread:
    """Runs an engine on a daemon thread; made and used on a running event loop."""

    def __init__(
        self, model: LanguageModel, pool: PagePool, metrics: Metrics, limits: Limits, *, trust_draft_distributions: bool = False
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine = Engine(model, pool, self._deliver, metrics, limits, trust_draft_distributions=trust_draft_distributions)
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Done, with the reason, if the engine's loop ever ends by an exception."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.engine.run()
        except BaseException as error:
            log.exception("the engine stopped")
            self._loop.call_soon_threadsafe(self.failed.set_exception, error)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        self._loop.call_soon_threadsafe(_call_sinks, deliveries)

    def post(self, work: Callable[[], object]) -> None:
        """Have `work` run on the engine's thread, in the order of posting."""
        self.engine.post(work)

    async def call(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on the engine's thread, between two steps, and return its result or raise its OutriderError."""
        done: asyncio.Future[_Result] = self._loop.create_future()

        def settle(error: OutriderError | None, result: _Result | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # None only where _Result is

        def run() -> None:
            try:
                result = work()
            except OutriderError as error:
                self._loop.call_soon_threadsafe(settle, error, None)
            else:
                self._loop.call_soon_threadsafe(settle, None, result)

        self.engine.post(run)
        return await done

    async def stop(self) -> None:
        """End the engine's loop and wait for the step in progress."""
        self.engine.stop()
        await asyncio.to_thread(self._thread.join)


def _call_sinks(deliveries: list[Delivery]) -> None:
    for sink, argument in deliveries:
        sink(argument)
