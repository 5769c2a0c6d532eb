"""The plan of a simulated world: settings, drafters, requests and faults, drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from outrider_bench.simulator.worlds.requests import REQUEST_COUNT, wanted_tokens

Manner = Literal["honest", "forger", "flooder"]
# On average, one of three drafters is dishonest. A forger sends messages that no delay explains. A
# flooder's single messages are allowed, but sometimes there are more than the verifier permits.
_MANNERS: list[Manner] = ["honest", "honest", "honest", "honest", "forger", "flooder"]
_FAULTS_UNTIL_S = 0.3
_DRAFTER_FAULTS = (
    *("leave", "die", "hang", "drain", "held up", "held down", "held", "slow", "shuffled"),
    *("repeated", "lost up", "lost down", "clock"),
)
_VERIFIER_FAULTS = ("kill", "clock", "forward fails", "slow")
_REQUEST_FAULTS = ("leave", "move")


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The settings of all verifiers, and the seconds of their forwards."""

    page_count: int
    page_size: int
    prefix_caching: bool
    draft_tokens: str
    draft_trees: bool
    always_draft: bool
    sampled_drafts: bool
    token_wise: bool
    max_batch_tokens: int
    max_sequences: int
    max_waiting: int
    max_drafters: int
    warms_up: bool
    launches: bool
    """True if the engine works in the order for a GPU, which computes while the host goes on."""
    step_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """A drafter process; it dials one verifier, and redials whenever its stream ends."""

    name: str
    family: str
    verifier: str
    manner: Manner
    right: float
    """Probability that a guess is right if the guesses before it are."""
    silent: float
    """Probability of no offer."""
    branches: float
    """Probability of a branch beside an offer."""
    fails: float
    """Probability that the drafter's strategy raises an exception."""
    samples: bool
    """True if the drafter offers SPARSE and COUPLED, too."""
    max_draft_tokens: int
    max_sequence_count: int | None
    joins_s: float
    draft_s: float
    """Seconds of drafting before a message."""
    latency_s: float
    jitter_s: float


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A client's request: its place in the catalogue, and how the client asks for it."""

    name: str
    number: int
    """The request's number in the catalogue of `requests`."""
    at_s: float
    latency_s: float
    tenant: str
    min_chunk_tokens: int
    draft_tokens: int | None
    drafter_id: str
    drafter_family: str
    speculates: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the drafter, verifier or request `who`, from `at_s` on, for `seconds`.

    `amount` is a probability, or the jump of a clock in seconds.
    """

    what: str
    who: str
    at_s: float
    seconds: float
    amount: float


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """The whole plan of a world. If `wired`, draft and verdict messages travel as protos' bytes."""

    seed: int
    engine: EnginePlan
    verifiers: tuple[str, ...]
    drafters: tuple[DrafterPlan, ...]
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]
    wired: bool

    @property
    def faults_end_s(self) -> float:
        """The time when the last fault ends (seconds)."""
        return max([fault.at_s + fault.seconds for fault in self.faults], default=0.0)


def draw_world(seed: int) -> WorldPlan:
    """Draw the plan of a seed's world."""
    draw = Random(f"world {seed}")
    verifiers = ("verifier-1", "verifier-2")[: draw.choice([1, 1, 2])]
    drafters = [_drafter(draw, i, verifiers) for i in range(draw.choice([0, 1, 2, 2, 3, 4, 5]))]
    requests = [_request(draw, i, drafters) for i in range(draw.randint(1, 12))]
    actors: dict[str, tuple[list[str], tuple[str, ...]]] = {
        "drafter": ([each.name for each in drafters], _DRAFTER_FAULTS),
        "verifier": ([*verifiers], _VERIFIER_FAULTS),
        "request": ([each.name for each in requests], _REQUEST_FAULTS),
    }
    faults = []
    for _ in range(draw.choice([0, 1, 2, 4, 8, 12])):
        kinds = ["drafter"] * 6 * bool(drafters) + ["verifier", "request"]
        names, whats = actors[draw.choice(kinds)]
        faults.append(_fault(draw, draw.choice(whats), draw.choice(names)))
    longest = max(wanted_tokens(each.number) for each in requests)
    engine = _engine(draw, longest, launches=seed % 2 == 1)
    wired = draw.random() < 0.15
    return WorldPlan(
        seed, engine, verifiers, tuple(drafters), tuple(requests), tuple(faults), wired
    )


def _engine(draw: Random, longest: int, *, launches: bool) -> EnginePlan:
    """Draw an engine whose cache holds a request of `longest` tokens, but often not two."""
    page_size = draw.choice([1, 2, 4, 8, 16])
    least = -(-longest // page_size)
    return EnginePlan(
        page_count=least + int(least * draw.choice([0, 0.5, 1, 2, 4, 8])),
        page_size=page_size,
        prefix_caching=draw.random() < 0.7,
        draft_tokens=draw.choice(["goodput", "goodput", "auto", "0", "1", "3", "4", "6", "16"]),
        draft_trees=draw.random() < 0.7,
        always_draft=draw.random() < 0.6,
        sampled_drafts=draw.random() < 0.25,
        token_wise=draw.random() < 0.3,
        max_batch_tokens=draw.choice([1, 8, 16, 64, 512, 512]),
        max_sequences=draw.choice([1, 2, 4, 8, 8, 64]),
        max_waiting=draw.choice([1, 3, 1024]),
        max_drafters=draw.choice([2, 64, 64, 64]),
        warms_up=draw.random() < 0.5,
        launches=launches,
        step_s=draw.choice([0.001, 0.003, 0.01]),
        token_s=draw.choice([0.0, 0.0001, 0.001]),
    )


def _drafter(draw: Random, number: int, verifiers: tuple[str, ...]) -> DrafterPlan:
    return DrafterPlan(
        name=f"drafter-{number + 1}",
        family=draw.choice(["a", "b", "c"]),
        verifier=draw.choice(verifiers),
        manner=draw.choice(_MANNERS),
        right=draw.choice([0.0, 0.6, 0.8, 0.95, 1.0]),
        silent=draw.choice([0.0, 0.0, 0.1, 0.5]),
        branches=draw.choice([0.0, 0.5, 1.0]),
        fails=draw.choice([0.0, 0.0, 0.0, 0.02]),
        samples=draw.random() < 0.5,
        max_draft_tokens=draw.choice([1, 4, 64, 64]),
        max_sequence_count=draw.choice([None, None, 1, 3]),
        joins_s=draw.choice([0.0, 0.0, 0.02]),
        draft_s=draw.choice([0.0, 0.0002, 0.0005, 0.005]),
        latency_s=draw.choice([0.0, 0.0002, 0.001, 0.01]),
        jitter_s=draw.choice([0.0, 0.0, 0.0005, 0.005]),
    )


def _request(draw: Random, number: int, drafters: list[DrafterPlan]) -> RequestPlan:
    named = ("", "")
    if drafters and draw.random() < 0.1:
        named = draw.choice([(drafters[0].name, ""), ("", drafters[0].family)])
    return RequestPlan(
        name=f"request-{number + 1}",
        number=draw.randrange(REQUEST_COUNT),
        at_s=draw.choice([0.0, 0.0, 0.005, 0.05, 0.1]),
        latency_s=draw.choice([0.0, 0.0005, 0.005]),
        tenant=draw.choice(["", "", "other"]),
        min_chunk_tokens=draw.choice([1, 1, 4]),
        draft_tokens=draw.choice([None, None, None, 0, 2, 7]),
        drafter_id=named[0],
        drafter_family=named[1],
        speculates=draw.random() < 0.95,
    )


def _fault(draw: Random, what: str, who: str) -> Fault:
    return Fault(
        what,
        who,
        at_s=round(draw.uniform(0.0, _FAULTS_UNTIL_S), 4),
        seconds=round(draw.choice([0.003, 0.02, 0.1, 0.3]) * draw.random(), 4),
        amount=draw.choice([0.1, 0.5, 1.0, 40.0, -0.05, -1.0]),
    )
