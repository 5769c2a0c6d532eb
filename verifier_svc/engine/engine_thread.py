"""The bridge between the event loop and the engine's thread; neither blocks the other."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from verifier_svc.engine.outbox import Delivery
from verifier_svc.engine.served import DraftingEngine

log = logging.getLogger(__name__)

_STOP_S = 10.0
_Result = TypeVar("_Result")
_Engine = TypeVar("_Engine", bound=DraftingEngine, covariant=True)


class EngineThread(Generic[_Engine]):
    """Builds and runs an engine on a daemon thread. Create and use it on a running event loop.

    The thread that runs the model also loads it and warms it up. OpenMP keeps a team of workers for
    each thread that ever computed. If two teams share the cores, workers stop spinning between
    their tasks. With two teams, the step of a small model took more than twice as long as with one.
    """

    def __init__(self, build: Callable[[Callable[[list[Delivery]], None]], _Engine]) -> None:
        self._loop = asyncio.get_running_loop()
        self._build = build
        self.built: asyncio.Future[_Engine] = self._loop.create_future()
        """Done when the engine takes work; raises what `build` raised."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the engine's loop has ended; raises the exception that ended it."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> _Engine:
        """The engine, once `built` is done."""
        return self.built.result()

    def _run(self) -> None:
        try:
            engine = self._build(self._deliver)
        # The caller that awaits `built` gets the exception.
        except BaseException as error:  # noqa: BLE001
            self._loop.call_soon_threadsafe(self.built.set_exception, error)
            return
        self._loop.call_soon_threadsafe(self.built.set_result, engine)
        try:
            engine.run()
        # `serve` awaits `ended` and ends the process.
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
        """Run `work` on the engine's thread between two steps.

        Returns what `work` returns, and raises what it raises.
        """
        done: asyncio.Future[_Result] = self._loop.create_future()

        def settle(error: Exception | None, result: _Result | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # None only if _Result is None

        def run() -> None:
            try:
                result = work()
            # The caller of this `call` gets the exception; the engine serves other callers too.
            except Exception as error:  # noqa: BLE001
                self._loop.call_soon_threadsafe(settle, error, None)
            else:
                self._loop.call_soon_threadsafe(settle, None, result)

        self.engine.post(run)
        return await done

    async def stop(self) -> None:
        """End the engine's loop after the step in progress, which has 10 s to finish."""
        self.engine.stop()
        await asyncio.wait({self.ended}, timeout=_STOP_S)
        if not self.ended.done():
            log.error("the engine's step has not ended; the process does not wait any longer")
            return
        await self.ended


def _call_sinks(deliveries: list[Delivery]) -> None:
    for sink, argument in deliveries:
        try:
            sink(argument)
        # The other sinks still get their messages.
        except Exception:
            log.exception("the engine could not deliver a message")
