"""A drafter of the simulation: the production session with a simulated family, driven by events.

A coroutine replaces `outrider.drafter.stream`: it applies messages, drafts, sends the drafts, and
waits for the next message.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections import deque
from functools import partial

from drafter_svc.families.base import Family
from outrider.drafter.session import DraftSession
from outrider.errors import OutriderError
from outrider.protocol.draft_messages import DraftBatch, Hello, StepBatch, Welcome
from outrider.protocol.limits import MAX_DRAFT_TOKENS
from outrider.protocol.model_info import Placement
from outrider_bench.simulator.costs import Costs
from outrider_bench.simulator.events import Events, Until, Work
from outrider_bench.simulator.family import SimulatedFamily
from outrider_bench.simulator.heads import VOCAB, SimulatedHead, SimulatedHeadFamily
from outrider_bench.simulator.links import Link, draft_bytes, step_bytes
from outrider_bench.simulator.production import (
    Process,
    SimulatedDraftModel,
    SimulatedModel,
    SimulatedNgram,
)
from outrider_bench.simulator.scenario import DrafterSpec, Event
from outrider_bench.simulator.verifier import TARGET_DEVICE, VerifierActor
from outrider_bench.simulator.world import World
from verifier_svc.state.drafter import Drafter


class DrafterActor:
    """One connection of one drafter; a drafter that joins again has a new connection.

    Connections of one process share `process`.
    """

    def __init__(
        self,
        events: Events,
        spec: DrafterSpec,
        costs: Costs,
        world: World,
        verifier: VerifierActor,
        process: Process | None = None,
    ) -> None:
        self.spec = spec
        self.error: OutriderError | None = None
        """Why the verifier ended the connection, if it did."""
        self._events = events
        self._verifier = verifier
        self._process = process or Process()
        self._cost = costs.drafting[spec.cost]
        self._share = spec.interference or float(spec.on_target_device)
        self.family = self._make_family(world)
        self._session = DraftSession(self.family, events.clock)
        self._up = Link(events, world.random(spec.name, "up", events.now))
        self._down = Link(events, world.random(spec.name, "down", events.now))
        self.set_link(spec.round_trip_ms, spec.jitter_ms, spec.mbit_s)
        for link in (self._up, self._down):
            link.loss = spec.loss
            link.retransmit_s = spec.retransmit_ms / 1000
        self.computed_s = 0.0
        """Time spent on drafting."""
        self._inbox: deque[StepBatch] = deque()
        self._coroutine = self._serve()
        self._began = False
        # The times when the parts of the work in progress end; empty while the drafter waits for a
        # message.
        self._ends: list[float] = []
        # True if the drafter waits for a future. Messages then do not wake the drafter.
        self._awaits = False
        # The number of the latest planned resumption. Earlier planned resumptions do nothing.
        self._appointment = 0
        self._over = False
        self._hangs_until = 0.0
        self._message_count = 0
        self._handle: Drafter | None = None
        self._up.send(0, self._register)
        self._resume(0, 0)

    # --- events ---

    def set_link(
        self, round_trip_ms: float | None, jitter_ms: float | None, mbit_s: float | None
    ) -> None:
        """Change the given settings of both directions."""
        for link in (self._up, self._down):
            if round_trip_ms is not None:
                link.latency_s = round_trip_ms / 2000
            if jitter_ms is not None:
                link.jitter_s = jitter_ms / 1000
            if mbit_s is not None:
                link.bytes_per_s = mbit_s * 125_000

    def apply(self, event: Event) -> None:
        """Apply an event of the schedule other than join."""
        if event.what == "leave":
            self.leave()
        elif event.what == "hang":
            self._hangs_until = self._events.now + event.seconds
        elif event.what == "link":
            self.set_link(event.round_trip_ms, event.jitter_ms, event.mbit_s)
        elif event.acceptance is not None and isinstance(self.family, SimulatedFamily):
            self.family.acceptance = event.acceptance

    @property
    def byte_counts(self) -> tuple[int, int]:
        """The bytes sent to the verifier, and the bytes sent by the verifier."""
        return self._up.byte_count, self._down.byte_count

    def leave(self) -> None:
        """Hang up; the verifier notices that after the link's latency."""
        if not self._over:
            self._over = True
            self._up.send(0, lambda: self._verifier.post(self._unregister))

    # --- the verifier's side of the stream ---

    def _register(self) -> None:
        spec = self.spec
        placement = Placement(device="elsewhere")
        if spec.on_target_device:
            placement = Placement(
                host=platform.node(), device="cpu", cores=tuple(TARGET_DEVICE.cores)
            )
        hello = Hello(
            spec.name,
            spec.family or spec.name,
            "",
            MAX_DRAFT_TOKENS,
            placement=placement,
            feature_request=self.family.feature_request,
            requires_grammar=spec.requires_grammar,
        )

        def enter() -> None:
            if not self._over:
                join = self._verifier.engine.drafting.join
                self._handle = join(hello, self._send_down, is_local=spec.in_process)
                width = self._handle.feature_width
                if width:
                    self._session.welcome(Welcome("", VOCAB, VOCAB, width))

        self._verifier.post(enter)

    def _unregister(self) -> None:
        if self._handle is not None:
            self._verifier.engine.drafting.leave(self._handle)

    def _send_down(self, message: StepBatch | OutriderError) -> None:
        if isinstance(message, OutriderError):
            self.error = message
            self._over = True
        else:
            self._down.send(step_bytes(message), lambda: self._receive(message))

    def _take(self, batch: DraftBatch, byte_count: int) -> None:
        if self._handle is not None:
            on_drafts = self._verifier.engine.drafting.on_drafts
            arrived_at = self._events.now
            self._verifier.post(partial(on_drafts, self._handle, batch, byte_count, arrived_at))

    # --- the drafter's side ---

    def _receive(self, step: StepBatch) -> None:
        self._inbox.append(step)
        if len(self._inbox) > 1 or self._awaits:
            return
        now = self._events.now
        if not self._ends:
            self._resume_at(now, 0)
            return
        # The drafter finishes the part on which it works, then it reads the message.
        done = bisect_left(self._ends, now) + 1
        if done <= len(self._ends):
            if self._process.free_at == self._ends[-1]:
                self._process.free_at = self._ends[done - 1]
            self._resume_at(self._ends[done - 1], done)

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
        self._message_count += 1
        if self._message_count > self.spec.max_messages > 0:
            return
        byte_count = draft_bytes(batch)
        if not self.spec.in_process:
            self._verifier.target.share_cores(self._cost.message_s)
        self._up.send(byte_count, lambda: self._take(batch, byte_count))

    def _resume_at(self, time: float, done: int) -> None:
        """Plan to resume the coroutine at `time` with `done` parts done; this voids other plans."""
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
        """Record `seconds` of drafting; the target's forwards lose the drafter's share of them."""
        self.computed_s += seconds
        self._verifier.target.share_cores(self._share * seconds)

    def _make_family(self, world: World) -> Family:
        spec = self.spec
        cost = self._cost
        process = self._process
        if spec.drafts_by == "lookup":
            return SimulatedNgram(spec, cost, process)
        if spec.drafts_by == "acceptance":
            return SimulatedFamily(spec, world, cost)
        if spec.drafts_by == "head":
            hidden_size = self._verifier.hidden_size
            if process.head is None:
                process.head = SimulatedHead(self._events, spec, cost, world, hidden_size)
            process.head.observers.append(self._computes)
            return SimulatedHeadFamily(spec, process.head)
        if process.model is None:
            process.model = SimulatedDraftModel(self._events, spec, cost, world)
        process.model.observers.append(self._computes)
        return SimulatedModel(spec, process.model)
