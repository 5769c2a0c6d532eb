"""A drafter in a simulated world: a process that dials its verifier, one connection at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from typing import Any

from outrider.drafter.session import DraftSession
from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import DraftBatch, Hello, StepBatch
from outrider.protocol.messages import DraftDistribution
from outrider.protocol.wire import drafts as wire
from outrider.v1 import drafts_pb2
from outrider_bench.simulator.worlds.checked_verifier import CheckedVerifier
from outrider_bench.simulator.worlds.forgery import FORGERIES, REFUSED, guess
from outrider_bench.simulator.worlds.invariants import broken
from outrider_bench.simulator.worlds.plan import DrafterPlan
from outrider_bench.simulator.worlds.random_strategy import RandomStrategy
from outrider_bench.simulator.worlds.target import VOCAB
from outrider_bench.simulator.worlds.unreliable_link import UnreliableLink
from outrider_bench.simulator.worlds.world import World
from verifier_svc.state.drafter import Drafter

_REDIAL_S = 0.01
# The seconds until a drafter dials again after any refusal but DRAFTER_ID_TAKEN.
_LATER_S = 0.2
# The time until the drafter notices a lost message, and the verifier a lost connection.
_NOTICE_S = 0.03
_FORGES = 0.5
_FLOOD = 12
_FLOOD_TOKENS = 150
_FAULTS_TO_QUARANTINE = 3


class RandomDrafter:
    """A drafter process that dials its verifier, and redials when a connection has ended."""

    def __init__(self, world: World, plan: DrafterPlan) -> None:
        self.plan = plan
        self.world = world
        self.draw = world.random(plan.name)
        self.hangs_until = 0.0
        self.skew_s = 0.0
        self.violation_count = 0
        """The number of messages for which the verifier ended the drafter's stream."""
        links = [
            UnreliableLink(
                world.events,
                world.random(f"{plan.name} {way}"),
                plan.latency_s,
                plan.jitter_s,
                ordered=way == "down",
            )
            for way in ("up", "down")
        ]
        self.up, self.down = links
        self.connection: Connection | None = None
        self._dials = 0

    def dial(self, after_s: float) -> None:
        """Connect after `after_s` seconds, unless `dial` is called again before then."""
        self.connection = None
        self._dials += 1
        number = self._dials

        def connect() -> None:
            verifier = self.world.verifiers[self.plan.verifier]
            if number != self._dials:
                return
            if verifier.serving:
                self.connection = Connection(self, verifier)
            else:
                self.dial(_REDIAL_S)

        self.world.events.after(after_s, connect)

    def clock(self) -> float:
        """Return the time of the clock that its session reads."""
        return self.world.events.now + self.skew_s

    @property
    def is_hostile(self) -> bool:
        """True if the drafter sends messages that no delay explains."""
        return self.plan.manner == "forger"


class Connection:
    """One draft stream of one drafter, from dialling to its end on both sides."""

    def __init__(self, drafter: RandomDrafter, verifier: CheckedVerifier) -> None:
        self.verifier = verifier
        self.over = False
        """True if the drafter has ended the stream, or knows that the verifier has ended it."""
        self.session = DraftSession(
            RandomStrategy(drafter.plan, drafter.draw, verifier), drafter.clock
        )
        self._drafter = drafter
        self._world = drafter.world
        self._events = drafter.world.events
        self._inbox: deque[StepBatch] = deque()
        self._drafts = False
        # True if a message to the drafter was lost, so that the next message leaves a gap.
        self._has_gap = False
        self._handle: Drafter | None = None
        self._world.note(f"{drafter.plan.name} dials")
        drafter.up.send(self._join, surely=True)

    # --- the verifier's side ---

    def _join(self) -> None:
        plan = self._drafter.plan
        kinds = [DraftDistribution.ONE_HOT]
        if plan.samples:
            kinds = [*DraftDistribution]
        hello = Hello(
            plan.name,
            plan.family,
            "",
            plan.max_draft_tokens,
            frozenset(kinds),
            max_sequence_count=plan.max_sequence_count,
        )

        def join() -> None:
            if self.over:
                return
            try:
                self._handle = self.verifier.join(hello, self._send_down)
            except OutriderError as error:
                self._send_down(error)

        if self.verifier.serving:
            self.verifier.post(join)
        else:
            self.lose()

    def _send_down(self, message: StepBatch | OutriderError) -> None:
        down = self._drafter.down
        if isinstance(message, OutriderError):
            down.send(lambda: self._refused(message), surely=True)
        elif not down.send(lambda: self._receive(message)):
            self._has_gap = True
            self._events.after(_NOTICE_S, self.lose)

    def _arrive(self, batch: DraftBatch) -> None:
        """Take an arriving message of the drafter, whose form is right."""
        self._world.counts["draft messages"] += 1
        handle = self._handle
        if handle is None:
            return
        arrived_at = self.verifier.clock()

        def take() -> None:
            if self.verifier.take(handle, batch, arrived_at):
                self._blame()

        self.verifier.post(take)

    def _arrive_raw(self, data: bytes, *, must_fail: bool) -> None:
        """Take an arriving message of the drafter as bytes, as on the production stream."""
        try:
            batch = wire.drafts_from_proto(drafts_pb2.DraftBatch.FromString(data), VOCAB)
        except OutriderError as error:
            self._world.counts["draft messages"] += 1
            handle = self._handle
            refusal = error
            if not must_fail:
                broken("the wire takes what a session sends", error)

            def reject() -> None:
                drafting = self.verifier.engine.drafting
                if handle is not None and drafting.roster.connected.get(handle.id) is handle:
                    self._blame()
                    drafting.reject(handle, refusal)

            self.verifier.post(reject)
            return
        if must_fail:
            broken("a forged message is refused", batch)
        self._arrive(batch)

    def _blame(self) -> None:
        if self._drafter.plan.manner == "honest":
            broken("an honest drafter breaks no rule", self._drafter.plan.name)
        self._drafter.violation_count += 1
        self._world.counts["violations refused"] += 1

    def _leave(self) -> None:
        """Remove the drafter, on the engine's thread; a join that was posted before has run."""
        if self._handle is not None:
            self.verifier.engine.drafting.leave(self._handle)

    # --- the drafter's side ---

    def leave(self) -> None:
        """Hang up; the verifier learns of that through the link."""
        if not self.over:
            self.over = True
            self._drafter.up.send(lambda: self.verifier.post(self._leave), surely=True)

    def drain(self) -> None:
        """Tell the verifier that the drafter is about to leave."""

        def drain() -> None:
            if self._handle is not None:
                self.verifier.engine.drafting.drain(self._handle, 0)

        self._drafter.up.send(lambda: self.verifier.post(drain))

    def lose(self, after_s: float = _NOTICE_S) -> None:
        """Break the connection; the drafter redials, and the verifier notices later."""
        if self.over:
            return
        self.over = True
        self._drafter.dial(_REDIAL_S)
        self._events.after(after_s, lambda: self.verifier.post(self._leave))

    def _refused(self, error: OutriderError) -> None:
        """Act on an error with which the verifier ends the stream or refuses the drafter."""
        drafter = self._drafter
        if self.over:
            return
        self.over = True
        self._world.note(f"{drafter.plan.name} {error.reason.name}")
        self._world.counts[f"streams ended, {error.reason.name}"] += 1
        if error.reason in (Reason.PROTOCOL_VIOLATION, Reason.QUARANTINED):
            least = 1 if error.reason is Reason.PROTOCOL_VIOLATION else _FAULTS_TO_QUARANTINE
            if drafter.violation_count < least:
                broken("quarantine is only for what no delay explains", error)
        elif error.reason not in (Reason.DRAFTER_ID_TAKEN, Reason.OVERLOADED):
            broken("a stream ends for a reason that a fault explains", error)
        taken = error.reason is Reason.DRAFTER_ID_TAKEN
        drafter.dial(_REDIAL_S if taken else _LATER_S)

    def _receive(self, step: StepBatch) -> None:
        if self.over:
            return
        self._world.counts["verdict messages"] += 1
        self._world.note(f"{self._drafter.plan.name} reads {len(step.verdicts)}")
        if self._world.plan.wired:
            data = wire.step_to_proto(step).SerializeToString()
            step = wire.step_from_proto(drafts_pb2.StepBatch.FromString(data), VOCAB)
        self._inbox.append(step)
        self._work()

    def _work(self) -> None:
        """Read all messages, then draft; do nothing while the drafter hangs or already drafts."""
        if self._drafts or self.over:
            return
        drafter = self._drafter
        if self._events.now < drafter.hangs_until:
            self._events.at(drafter.hangs_until, self._work)
            return
        while self._inbox:
            step = self._inbox.popleft()
            try:
                self.session.apply(step)
            except OutriderError as gap:
                if not self._has_gap:
                    broken("verdicts leave no gap", gap)
                self.lose()
                return
            self._misbehave(step)
        batch = _result(self.session.round(lambda: False))
        if batch.proposals or batch.skips:
            self._drafts = True
            self._events.after(drafter.plan.draft_s, lambda: self._send(batch))

    def _send(self, batch: DraftBatch) -> None:
        self._drafts = False
        if self.over:
            return
        drafter = self._drafter
        if drafter.is_hostile or self._world.plan.wired:
            self._send_raw(wire.drafts_to_proto(batch), must_fail=False)
        else:
            drafter.up.send(lambda: self._arrive(batch))
        self._work()

    def _send_raw(self, proto: drafts_pb2.DraftBatch, *, must_fail: bool) -> None:
        data = proto.SerializeToString()
        self._drafter.up.send(lambda: self._arrive_raw(data, must_fail=must_fail))

    def _misbehave(self, step: StepBatch) -> None:
        """Forge or flood after some of the verifier's messages."""
        draw = self._drafter.draw
        manner = self._drafter.plan.manner
        lengths = {opened.sequence_id: len(opened.token_ids) for opened in step.opened}
        lengths |= {verdict.sequence_id: verdict.committed_length for verdict in step.verdicts}
        if manner == "honest" or not lengths or draw.random() >= _FORGES:
            return
        sequence_id, length = draw.choice([*lengths.items()])
        if manner == "forger":
            forge = draw.choice(FORGERIES)
            proposal = guess(draw, sequence_id, length, 6)
            forge(draw, proposal)
            self._send_raw(drafts_pb2.DraftBatch(proposals=[proposal]), must_fail=forge in REFUSED)
            return
        for _ in range(_FLOOD):
            proposal = guess(draw, sequence_id, length, _FLOOD_TOKENS)
            self._send_raw(drafts_pb2.DraftBatch(proposals=[proposal]), must_fail=False)


def _result(coroutine: Coroutine[Any, Any, DraftBatch]) -> DraftBatch:
    """Run a coroutine that never waits; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        batch: DraftBatch = done.value
        return batch
    raise RuntimeError("a round of a random drafter must not wait")
