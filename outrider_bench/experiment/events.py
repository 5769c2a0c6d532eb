"""Disturbs links and drafters during a measurement, as an experiment's events say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from outrider_bench.experiment.launches import process_names
from outrider_bench.experiment.spec import Event, Experiment
from outrider_bench.experiment.stack import Drafting


class Events:
    """The events of a cell.

    `played` has those that happened, with their seconds; `errors` has a message for each other one.
    """

    def __init__(self, experiment: Experiment, drafting: Drafting | None) -> None:
        """Events of links and drafters that the cell does not use are ignored."""
        self.played: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._drafting = drafting
        self._experiment = experiment
        used = set()
        if drafting is not None:
            used = {*drafting.links, *experiment.use}
        self._events: Sequence[Event] = [event for event in experiment.events if event.who in used]

    def begin(self, group: asyncio.TaskGroup, playing: asyncio.Task[Any]) -> None:
        """Start the events with the traffic `playing`. An event that began plays to its end."""
        began = time.perf_counter()
        for event in self._events:
            group.create_task(self._play(event, began, playing))

    async def _play(self, event: Event, began: float, playing: asyncio.Task[Any]) -> None:
        wait_s = max(began + event.at - time.perf_counter(), 0.0)
        done, _ = await asyncio.wait([playing], timeout=wait_s)
        if done:
            when = f"at {event.at:g} s did not come: the traffic was over"
            self.errors.append(f"{event.what} of {event.who} {when}")
            return
        self.played.append({**event.model_dump(), "at": time.perf_counter() - began})
        if event.who in self._experiment.links:
            await self._to_link(event)
        else:
            names = process_names(self._experiment, event.who)
            await asyncio.gather(*(self._to_process(name, event) for name in names))

    async def _to_link(self, event: Event) -> None:
        assert self._drafting is not None  # else there are no events
        link = self._drafting.links[event.who]
        if event.what == "reset":
            await link.reset()
        else:
            await link.outage(event.seconds)
            await asyncio.sleep(event.seconds)

    async def _to_process(self, name: str, event: Event) -> None:
        assert self._drafting is not None  # else there are no events
        processes = self._drafting.processes
        if event.what == "stop":
            await processes.handle(name).pause()
            await asyncio.sleep(event.seconds)
            await processes.handle(name).resume()
        elif event.what == "kill":
            await processes.end(name, kill=True)
            await asyncio.sleep(event.seconds)
            await processes.again(name)
        elif event.what == "leave":
            await processes.end(name)
        else:
            await processes.again(name)
