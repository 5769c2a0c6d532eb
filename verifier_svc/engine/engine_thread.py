"""The bridge between the event loop and the engine's thread: neither ever waits for the other while holding it up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outgoing import Delivery

log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class EngineThread:
    """Builds an engine and runs it, on a daemon thread; made and used on a running event loop.

    The model is loaded and warmed up on the very thread that will run it: OpenMP keeps a team of workers for each thread that ever
    computed, and two teams on the same cores make it give up spinning, which more than doubled a small model's step.
    """

    def __init__(self, build: Callable[[Callable[[list[Delivery]], None]], Engine]) -> None:
        self._loop = asyncio.get_running_loop()
        self._build = build
        self.built: asyncio.Future[Engine] = self._loop.create_future()
        """Done when the engine takes work, or with the reason why it never will."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the engine's loop has ended, with the reason if that was an exception."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine, once `built` is done."""
        return self.built.result()

    def _run(self) -> None:
        try:
            engine = self._build(self._deliver)
        except BaseException as error:  # noqa: BLE001  # whoever awaits `built` raises it
            self._loop.call_soon_threadsafe(self.built.set_exception, error)
            return
        self._loop.call_soon_threadsafe(self.built.set_result, engine)
        try:
            engine.run()
        except BaseException as error:
            log.exception("the engine stopped")
            self._loop.call_soon_threadsafe(self.ended.set_exception, error)
        else:
            self._loop.call_soon_threadsafe(self.ended.set_result, None)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        self._loop.call_soon_threadsafe(_call_sinks, deliveries)

    def post(self, work: Callable[[], object]) -> None:
        """Have `work` run on the engine's thread, in the order of posting."""
        self.engine.post(work)

    async def call(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on the engine's thread, between two steps, and return its result or raise what it raised."""
        done: asyncio.Future[_Result] = self._loop.create_future()

        def settle(error: Exception | None, result: _Result | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # None only where _Result is

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  # whoever awaits this call raises it; the engine has other callers
                self._loop.call_soon_threadsafe(settle, error, None)
            else:
                self._loop.call_soon_threadsafe(settle, None, result)

        self.engine.post(run)
        return await done

    async def stop(self) -> None:
        """End the engine's loop after the step in progress."""
        self.engine.stop()
        await self.ended


def _call_sinks(deliveries: list[Delivery]) -> None:
    for sink, argument in deliveries:
        try:
            sink(argument)
        except Exception:
            # The others are to hear of the step nevertheless.
            log.exception("a message of the engine could not be delivered")
