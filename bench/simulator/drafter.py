"""A drafter of the simulation: the production session with a simulated family, driven by events.

The coroutine below does what `outrider.drafter.stream` does for a real connection: apply what came, draft, send, and wait for more.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections import deque

from bench.simulator.costs import Costs
from bench.simulator.events import Events, Until, Work
from bench.simulator.family import SimulatedFamily
from bench.simulator.links import Link, draft_bytes, step_bytes
from bench.simulator.production import (
    Process,
    SimulatedDraftModel,
    SimulatedModel,
    SimulatedNgram,
    SimulatedRedis,
)
from bench.simulator.scenario import DrafterSpec, Event
from bench.simulator.verifier import OWN_CORES, VerifierActor
from bench.simulator.world import World
from outrider.drafter.session import DraftSession
from outrider.errors import OutriderError
from outrider.messages import DraftBatch, Hello, Placement, StepBatch
from verifier_svc.state.drafter import Drafter


class DrafterActor:
    """One connection of one drafter; a drafter that joins again is a new one."""

    def __init__(
        self,
        events: Events,
        spec: DrafterSpec,
        costs: Costs,
        world: World,
        verifier: VerifierActor,
        process: Process | None = None,
        redis: SimulatedRedis | None = None,
    ) -> None:
        """`process` is shared with other connections of the same process, and `redis` with other drafters."""
        self.spec = spec
        self.error: OutriderError | None = None
        """Why the verifier ended the connection, if it did."""
        self._events = events
        self._verifier = verifier
        self._process = process or Process()
        self._cost = costs.drafting[spec.cost]
        self._share = spec.interference or float(spec.on_target_cores)
        self.family = self._make_family(world, redis)
        self._session = DraftSession(self.family, events.clock)
        self._up, self._down = (
            Link(events, world.random(spec.name, way, events.now)) for way in ("up", "down")
        )
        self.set_link(spec.round_trip_ms, spec.jitter_ms, spec.mbit_s)
        for link in (self._up, self._down):
            link.loss, link.retransmit_s = spec.loss, spec.retransmit_ms / 1000
        self.computed_s = 0.0
        """Time that drafting took."""
        self._inbox: deque[StepBatch] = deque()
        self._coroutine = self._serve()
        self._began = False
        # When the parts of the work in progress end; none while it waits for a message.
        self._ends: list[float] = []
        # Whether it goes on when something is done, whatever comes before that.
        self._awaits = False
        # Makes what was planned before void.
        self._appointment = 0
        self._over = False
        self._hangs_until = 0.0
        self._handle: Drafter | None = None
        self._up.send(0, self._register)
        self._resume(0, 0)

    # --- what happens to it ---

    def set_link(
        self, round_trip_ms: float | None, jitter_ms: float | None, mbit_s: float | None
    ) -> None:
        """Change what is given."""
        for link in (self._up, self._down):
            link.latency_s = link.latency_s if round_trip_ms is None else round_trip_ms / 2000
            link.jitter_s = link.jitter_s if jitter_ms is None else jitter_ms / 1000
            link.bytes_per_s = link.bytes_per_s if mbit_s is None else mbit_s * 125_000

    def suffer(self, event: Event) -> None:
        """Let an event of the schedule other than joining happen."""
        if event.what == "leave":
            self.leave()
        elif event.what == "hang":
            self._hangs_until = self._events.now + event.seconds
        elif (
            event.what == "accept"
            and event.acceptance is not None
            and isinstance(self.family, SimulatedFamily)
        ):
            self.family.acceptance = event.acceptance
        else:
            self.set_link(event.round_trip_ms, event.jitter_ms, event.mbit_s)

    @property
    def byte_counts(self) -> tuple[int, int]:
        """What it sent to the verifier, and what was sent to it."""
        return self._up.byte_count, self._down.byte_count

    def leave(self) -> None:
        """Hang up; the verifier learns of it once that has arrived."""
        if not self._over:
            self._over = True
            self._up.send(0, lambda: self._verifier.post(self._unregister))

    # --- the verifier's side of the stream ---

    def _register(self) -> None:
        spec = self.spec
        cores = Placement(host=platform.node(), device="cpu", cores=tuple(OWN_CORES))
        hello = Hello(
            spec.name,
            spec.family or spec.name,
            "",
            spec.max_draft_tokens,
            placement=cores if spec.on_target_cores else Placement(device="elsewhere"),
            max_sequence_count=spec.max_sequence_count,
        )

        def join() -> None:
            if not self._over:
                self._handle = self._verifier.engine.drafting.join(hello, self._hear)

        self._verifier.post(join)

    def _unregister(self) -> None:
        if self._handle is not None:
            self._verifier.engine.drafting.leave(self._handle)

    def _hear(self, message: StepBatch | OutriderError) -> None:
        if isinstance(message, OutriderError):
            self.error = message
            self._over = True
        else:
            self._down.send(step_bytes(message), lambda: self._receive(message))

    def _take(self, batch: DraftBatch, byte_count: int) -> None:
        handle, arrived_at = self._handle, self._events.now
        if handle is not None:
            self._verifier.post(
                lambda: self._verifier.engine.drafting.on_drafts(
                    handle, batch, byte_count, arrived_at
                )
            )

    # --- the drafter's side ---

    def _receive(self, step: StepBatch) -> None:
        self._inbox.append(step)
        if len(self._inbox) == 1 and not self._awaits:
            # The part of the work that is in progress is done, then the message is read.
            now = self._events.now
            done = bisect_left(self._ends, now) + 1 if self._ends else 0
            if done <= len(self._ends):
                if done and self._process.free_at == self._ends[-1]:
                    self._process.free_at = self._ends[done - 1]
                self._resume_at(self._ends[done - 1] if done else now, done)

    async def _serve(self) -> None:
        while True:
            while self._inbox:
                self._session.apply(self._inbox.popleft())
            batch = await self._session.round(self._interrupted)
            if batch.proposals or batch.skips:
                self._send(batch)
            elif not self._inbox:
                await Work([])

    def _interrupted(self) -> bool:
        return bool(self._inbox)

    def _send(self, batch: DraftBatch) -> None:
        byte_count = draft_bytes(batch)
        self._verifier.target.share_cores(self._cost.message_s)
        self._up.send(byte_count, lambda: self._take(batch, byte_count))

    def _resume_at(self, time: float, done: int) -> None:
        """Let the coroutine go on then, with so many parts of its work done, and not when that was planned before."""
        self._appointment += 1
        number = self._appointment
        self._events.at(max(time, self._hangs_until), lambda: self._resume(number, done))

    def _resume(self, number: int, done: int) -> None:
        if number != self._appointment:
            return
        if self._over:
            self._coroutine.close()
            return
        now = self._events.now
        if now < self._hangs_until:
            self._resume_at(self._hangs_until, done)
            return
        work = self._coroutine.send(done if self._began else None)
        self._began = True
        self._awaits = isinstance(work, Until)
        if isinstance(work, Until):
            self._ends = []
            work.done.add_done_callback(lambda _: self._resume_at(self._events.now, 0))
            return
        begins = max(now, self._process.free_at)
        self._ends = [begins + end for end in work.ends]
        if self._ends:
            parts = 1 if self._inbox else len(self._ends)
            self._process.free_at = self._ends[parts - 1]
            self._resume_at(self._ends[parts - 1], parts)
            self._computes(work.ends[-1])

    def _computes(self, seconds: float) -> None:
        """Take from the target's forward what so many seconds of drafting beside it take."""
        self.computed_s += seconds
        self._verifier.target.share_cores(self._share * seconds)

    def _make_family(
        self, world: World, redis: SimulatedRedis | None
    ) -> SimulatedFamily | SimulatedNgram | SimulatedModel:
        spec, cost, process = self.spec, self._cost, self._process
        if spec.drafts_by == "lookup":
            return SimulatedNgram(spec, cost, process, redis)
        if spec.drafts_by == "acceptance":
            return SimulatedFamily(spec, world, cost)
        if process.model is None:
            process.model = SimulatedDraftModel(self._events, spec, cost, world)
        process.model.observers.append(self._computes)
        return SimulatedModel(spec, process.model)
