"""The schema of a scenario's YAML file; it refuses unknown keys."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from outrider.protocol.draft_tokens_policy import DraftTokensSetting
from outrider_bench.simulator import costs
from outrider_bench.simulator.costs import Costs, LinkShape
from outrider_bench.simulator.recorded import RecordedRequest, read_recording


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


def _by_kind(value: object) -> object:
    return value if isinstance(value, dict) else {"": value}


def _table(value: object) -> object:
    return costs.load(value) if isinstance(value, str) else value


def _requests(value: object) -> object:
    return list(read_recording(Path(value))) if isinstance(value, str | Path) else value


Share = Annotated[float, Field(ge=0, le=1)]
Acceptance = Annotated[
    dict[str, Annotated[list[Share], BeforeValidator(_as_list), Field(min_length=1)]],
    BeforeValidator(_by_kind),
]
"""Probability that a guess is right if all guesses before it are.

A number, or a list by position in the draft, whose last number holds for all further positions. Or
a mapping by kind of traffic to such numbers or lists, with "" for all other kinds.
"""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)


class DrafterSpec(_Part, LinkShape):
    """One simulated drafter, and the shape of its link to the verifier."""

    name: str = Field(min_length=1)

    family: str = ""
    """In each family, a sequence goes to the least busy drafter that was ever right, and to
    newcomers. By default, the family is the drafter's name."""

    verifier: str = "verifier-1"

    drafts_by: Literal["acceptance", "lookup", "model", "head"] = "acceptance"
    """acceptance draws whether a guess is right from `acceptance`, or takes a recording's guesses;
    it drafts a chain, and with `alternatives` branches of one token. lookup runs the production
    n-gram family on the recording's tokens. model runs the production draft-model family, with
    branches, on the recording's guesses. head runs the production family of heads on the offers in
    `World.offers`, which only tests fill."""

    acceptance: Acceptance = Field(default_factory=lambda: {"": [0.0]})

    hard_acceptance: Acceptance | None = None
    """Like `acceptance`, within hard stretches of a text; by default the same."""

    alternatives: list[Share] = Field(default_factory=list, max_length=16)
    """Offer other tokens beside each guess, one for each number, where the verifier verifies trees.
    A number is the probability that its token is right if the guess and the tokens of the earlier
    numbers are wrong."""

    skips_hard: bool = False
    """Propose nothing within hard stretches, like a lookup that finds nothing."""

    process: str = ""
    """Drafters with equal `process` are connections of one process, which computes for one of them
    at a time; by default each has its own."""

    max_draft_len: int = Field(8, ge=1, le=64)
    """The n-gram family's setting; so are the next two."""

    max_matching_ngram_size: int = Field(3, ge=1, le=16)

    is_public_pool: bool = False

    states: int = Field(0, ge=0)
    """Hidden states of each token that a head reads. They cross the link."""

    in_process: bool = False
    """True if the drafter is in the verifier's process: its messages then cost nothing."""

    requires_grammar: bool = False
    """Draft only for recorded requests with a grammar."""

    cost: str = "model"
    """Name of an entry in the cost table's `drafting`."""

    slowness: float = Field(1.0, ge=0)
    """Factor on the table's times of drafting."""

    max_messages: int = Field(0, ge=0)
    """Send this many messages and no more; 0 is no limit."""

    round_trip_ms: float = Field(0.4, ge=0, le=10_000)
    """Time to the verifier and back."""

    on_target_device: bool = False
    """Announce placement on the target's device. Forwards then lose all the time that the drafter
    computes during them, or the share in `interference`."""

    interference: float = Field(0.0, ge=0, le=1)
    """Share of the drafter's drafting time that forwards on the same machine lose."""


class Event(_Part):
    """An event in the life of a drafter or a verifier."""

    at: float = Field(ge=0)
    """Seconds since the measurement began."""

    who: str
    """The name of a drafter, or of a verifier: verifier-1, verifier-2, ..."""

    what: Literal["join", "leave", "hang", "accept", "link"]
    """join and leave are for drafters and verifiers. A drafter can also hang for `seconds`, get
    another `acceptance` (accept), or another link."""

    seconds: float = Field(0.0, ge=0)
    acceptance: Acceptance | None = None
    round_trip_ms: float | None = Field(None, ge=0)
    jitter_ms: float | None = Field(None, ge=0)
    mbit_s: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _has_its_settings(self) -> Self:
        if self.what == "hang" and self.seconds == 0.0:
            raise ValueError("seconds must be given with hang")
        if self.what == "accept" and self.acceptance is None:
            raise ValueError("acceptance must be given with accept")
        if self.what == "link" and self.round_trip_ms is self.jitter_ms is self.mbit_s is None:
            raise ValueError("round_trip_ms, jitter_ms or mbit_s must be given with link")
        return self


class Scenario(_Part):
    """What `outrider lab simulate` runs in virtual time.

    A cost table and the scenario give the times of forwards, drafting and links; the scenario gives
    the drafters' acceptance. The same scenario always gives the same result, byte for byte.
    """

    model_config = ConfigDict(validate_default=True)

    name: str = "simulation"
    """Name of the scenario in the output."""

    seed: int = 0
    """Seed of all random draws."""

    seconds: float = Field(60.0, gt=0)
    """Simulated time; shorter if all requests have ended."""

    costs: Annotated[Costs, BeforeValidator(_table)] = Field(
        default_factory=lambda: costs.load("epyc-2-cores")
    )
    """The cost table: a file, or the name of a table that comes with the simulator."""

    noise: float = Field(0.0, ge=0, lt=1)
    """Greatest random change of a forward's time, as a share of this time."""

    arrivals: Literal["closed", "poisson", "recorded"] = "closed"
    """closed keeps `sequences` requests under way, poisson sends `rate` requests each second,
    recorded sends the requests of a file at their times."""

    sequences: list[Annotated[int, Field(ge=1, le=4096)]] = Field([8], min_length=1)
    """Numbers of requests in progress; there is a simulation for each number.

    If arrivals are not closed, the first number is only a label.
    """

    waves: int | None = Field(None, ge=1)
    """Total of requests, as a multiple of `sequences`, as in `outrider lab bench`; by default
    requests go on until the time is up. Needs closed arrivals."""

    rate: float = Field(1.0, gt=0)
    """Requests each second of poisson arrivals."""

    recording: Annotated[list[RecordedRequest] | None, BeforeValidator(_requests)] = None
    """File of recorded requests: a JSON object a line, with prompt_tokens, output_tokens and
    optionally time, kind and guesses. Recorded arrivals send each at its time; closed arrivals send
    them in turn until there are no more."""

    warm_up: int = Field(0, ge=0)
    """Requests at the beginning of the recording that are not measured. They are closed arrivals.
    When all these requests have ended, time begins for the other requests and for the schedule."""

    timeout_seconds: float | None = Field(None, gt=0)
    """How long clients wait for an answer before they cancel it. The gateway refuses requests that
    would be late. By default clients wait for ever, and nothing is refused."""

    prompt_tokens: list[Annotated[int, Field(ge=1)]] = Field([64], min_length=1, max_length=2)
    """Length of prompts; two numbers are the bounds of a uniform distribution."""

    output_tokens: list[Annotated[int, Field(ge=1)]] = Field([128], min_length=1, max_length=2)
    """Length of answers; two numbers are the bounds of a uniform distribution."""

    kinds: list[str] = Field([""], min_length=1)
    """Kinds of traffic; the requests take them in turn."""

    hard_share: float = Field(0.0, ge=0, lt=1)
    """Share of each text that is hard to guess."""

    drafters: list[DrafterSpec] = Field(default_factory=list)
    """The simulated drafters."""

    verifiers: int = Field(1, ge=1)
    """Number of verifiers; their names are verifier-1, verifier-2 and so on. A request goes to the
    verifier with the fewest requests."""

    schedule: list[Event] = Field(default_factory=list)
    """The events of drafters and verifiers, each with its time."""

    draft_tokens: DraftTokensSetting = "goodput"
    """The verifier's setting."""

    draft_trees: bool = True
    """The verifier's setting."""

    always_draft: bool = False
    """The verifier's setting: wait for every draft, even if that does not pay."""

    max_batch_tokens: int = Field(512, ge=1)
    """The verifier's setting."""

    max_sequences: int = Field(128, ge=1, le=4096)
    """The verifier's setting."""

    page_count: int = Field(8192, ge=1)
    """Pages of the verifier's KV cache, 16 tokens each."""

    hidden_size: int = Field(1, ge=1)
    """Numbers in a hidden state of the target, two bytes each."""

    prefix_caching: bool = True
    """The verifier's setting. Only recorded prompts with `prompt_ids` can be equal."""

    client_ms: float = Field(0.5, ge=0)
    """Latency between client and verifier, in each direction, and from the end of an answer to the
    client's next request."""

    baseline: bool = True
    """Simulate plain decoding too, and compare with it."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        verifiers = {f"verifier-{i + 1}" for i in range(self.verifiers)}
        names = [drafter.name for drafter in self.drafters]
        if len(set(names)) < len(names) or verifiers & set(names):
            raise ValueError("drafters must have names of their own")
        for drafter in self.drafters:
            _check_one_of("drafters.cost", drafter.cost, self.costs.drafting)
            _check_one_of("drafters.verifier", drafter.verifier, verifiers)
        for event in self.schedule:
            actors = {*verifiers, *names}
            if event.what not in ("join", "leave"):
                actors -= verifiers
            _check_one_of("schedule.who", event.who, actors)
        if self.arrivals == "recorded" and self.recording is None:
            raise ValueError("recording must be given with recorded arrivals")
        if self.arrivals == "poisson" and self.recording is not None:
            raise ValueError("recording has no meaning with poisson arrivals")
        if self.warm_up and self.recording is None:
            raise ValueError("warm_up needs a recording")
        if self.waves is not None and (self.arrivals != "closed" or self.recording is not None):
            raise ValueError("waves has no meaning without closed arrivals, nor with a recording")
        return self

    @property
    def loads(self) -> list[int]:
        """Numbers of requests in progress; there is a simulation for each."""
        return self.sequences if self.arrivals == "closed" else self.sequences[:1]


def _check_one_of(field: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        names = ", ".join(sorted(known)) or "(none)"
        raise ValueError(f"{field} must be one of {names}, not {value!r}")
