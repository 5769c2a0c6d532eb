"""A connected drafter, and what was measured of it. Knows no stream and no policy."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.errors import OutriderError
from outrider.messages import Hello, StepBatch
from outrider.model_info import DrafterInfo
from verifier_svc.state.acceptance_rate import AcceptanceRate, Latency

# What a message takes in memory, however little it says.
MESSAGE_BYTES = 1024


@dataclass(eq=False, slots=True)
class Drafter:
    """A connected drafter. `outbox` gathers what the current step has to say to it."""

    hello: Hello
    sink: Callable[[StepBatch | OutriderError], None]
    round_trip: Latency = field(default_factory=Latency)
    """From a verdict that asks for a draft to the first message of it, without the time that it spent drafting."""
    token_time: Latency = field(default_factory=Latency)
    """Drafting one token of a run."""
    rates: dict[tuple[bool, bool, bool], AcceptanceRate] = field(default_factory=dict)
    """What was learned of it, by kind of traffic: where a new sequence begins."""
    outbox: StepBatch = field(default_factory=StepBatch)
    sequence_ids: set[int] = field(default_factory=set)
    last_sequence_id: int = 0
    """The highest that it was ever handed."""
    on_target_cores: bool = False
    """Whether it computes on cores that the target computes on."""
    busy_until: float = 0.0
    """When it has drafted all that it may, by what it usually takes (seconds); infinity before its first answer."""
    draining: bool = False
    taken_bytes: int = 0
    """Of its messages that the engine is done with, `MESSAGE_BYTES` besides for each."""
    verified_count: int = 0
    accepted_count: int = 0

    @property
    def id(self) -> str:
        return self.hello.drafter_id

    def latency(self, draft_tokens: int) -> float:
        """Seconds from a verdict to a draft of so many tokens."""
        return self.round_trip.value + draft_tokens * self.token_time.value

    def busy_s(self, draft_tokens: int) -> float:
        """Seconds of drafting so many tokens that the target's forward loses."""
        return draft_tokens * self.token_time.value if self.on_target_cores else 0.0

    @property
    def open_to_more(self) -> bool:
        limit = self.hello.max_sequence_count
        return not self.draining and (limit == 0 or len(self.sequence_ids) < limit)

    def shares(self, cores: frozenset[int]) -> bool:
        """Whether it computes on some of these cores of this host."""
        place = self.hello.placement
        here = place.host == platform.node() and place.device.startswith("cpu")
        return here and (not place.cores or not cores.isdisjoint(place.cores))

    def info(self, connected: bool) -> DrafterInfo:
        rate = self.accepted_count / self.verified_count if self.verified_count else None
        hello = self.hello
        held, reply_s, token_s = (
            len(self.sequence_ids),
            self.round_trip.value or None,
            self.token_time.value or None,
        )
        return DrafterInfo(
            hello.drafter_id, hello.family, hello.placement, connected, held, rate, reply_s, token_s
        )
