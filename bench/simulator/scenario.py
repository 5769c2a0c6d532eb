"""The schema of a scenario, for a YAML file, flags and the environment; it refuses unknown keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import SettingsConfigDict

from bench.simulator import costs
from outrider.draft_tokens_policy import DraftTokensSetting
from outrider.process.config import Settings


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


def _by_kind(value: object) -> object:
    return value if isinstance(value, dict) else {"": value}


Share = Annotated[float, Field(ge=0, le=1)]
Acceptance = Annotated[
    dict[str, Annotated[list[Share], BeforeValidator(_as_list), Field(min_length=1)]],
    BeforeValidator(_by_kind),
]
"""Probability that a guess is right if those before it are: one, or a list by position in the draft, the last for all further
ones; or a mapping of these by kind of traffic, with "" for all other kinds."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)


class DrafterSpec(_Part):
    """One simulated drafter."""

    name: str = Field(min_length=1)

    family: str = ""
    """Of the drafters of one family only the least busy one gets a sequence; the name unless set."""

    verifier: str = "verifier-1"

    drafts_by: Literal["acceptance", "lookup", "model"] = "acceptance"
    """acceptance draws from `acceptance`, or takes a recording's guesses, and drafts a chain without branches. lookup runs the
    production n-gram family on the recording's tokens; model runs the production draft-model family, branches included, on the
    recording's guesses."""

    acceptance: Acceptance = Field(default_factory=lambda: {"": [0.0]})

    hard_acceptance: Acceptance | None = None
    """The same within hard stretches of a text; unset is no different."""

    skips_hard: bool = False
    """Whether it has no draft within hard stretches, as a lookup that finds nothing; else it guesses there as well."""

    process: str = ""
    """Drafters with the same one are connections of one process, which computes for one at a time; unset is one of its own."""

    max_draft_len: int = Field(8, ge=1, le=64)
    """The n-gram family's setting of that name, and so are the next two."""

    max_matching_ngram_size: int = Field(3, ge=1, le=16)

    is_public_pool: bool = False

    redis_ms: float | None = Field(None, ge=0)
    """Of a lookup in the Redis that all drafters with this setting share; unset is a pool in memory."""

    branches: int = Field(4, ge=0, le=64)
    """The draft-model family's setting of that name."""

    cost: str = "model"
    """Which of the cost table's ways of drafting."""

    slowness: float = Field(1.0, ge=0)
    """What drafting takes, times the table's figures."""

    round_trip_ms: float = Field(0.4, ge=0)
    """Of the way to the verifier and back."""

    jitter_ms: float = Field(0.0, ge=0)
    """By how much a message may be later than that, in each direction."""

    mbit_s: float = Field(0.0, ge=0)
    """Bandwidth in each direction; 0 is no limit."""

    loss: float = Field(0.0, ge=0, lt=1)
    """Share of segments that are lost and sent again, as by TCP."""

    retransmit_ms: float = Field(200.0, ge=0)
    """Least time until a lost segment is sent again."""

    max_draft_tokens: int = Field(64, ge=1, le=64)

    max_sequence_count: int = Field(0, ge=0)
    """Most sequences that it takes at once; 0 is no limit."""

    on_target_cores: bool = False
    """Whether the verifier takes it for one on cores that the target computes on. Forwards then lose all of the time in which it
    drafts meanwhile, unless `interference` says how much."""

    interference: float = Field(0.0, ge=0, le=1)
    """Share of its drafting time by which forwards meanwhile get longer, on the same machine."""

    joins_at: float = Field(0.0, ge=0)
    """Seconds; it joins by itself then."""


class Event(_Part):
    """Something that happens to a drafter or a verifier."""

    at: float = Field(ge=0)
    """Seconds."""

    who: str
    """The name of a drafter, or of a verifier: verifier-1, verifier-2, ..."""

    what: Literal["join", "leave", "hang", "accept", "link"]
    """Drafters and verifiers join and leave. A drafter hangs for `seconds`, gets another `acceptance`, or another link."""

    seconds: float = Field(0.0, ge=0)
    acceptance: Acceptance | None = None
    round_trip_ms: float | None = Field(None, ge=0)
    jitter_ms: float | None = Field(None, ge=0)
    mbit_s: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _says_what_is_needed(self) -> Self:
        if self.what == "hang" and self.seconds == 0.0:
            raise ValueError("seconds must be given with hang")
        if self.what == "accept" and self.acceptance is None:
            raise ValueError("acceptance must be given with accept")
        if self.what == "link" and self.round_trip_ms is self.jitter_ms is self.mbit_s is None:
            raise ValueError("round_trip_ms, jitter_ms or mbit_s must be given with link")
        return self


class Scenario(Settings):
    """Run the verifier's engine, its planner and the drafters' stream logic in virtual time.

    Forwards, drafting and links take the time that a cost table and a scenario say, and guesses are right as often as it says. The
    same scenario always gives the same result, byte for byte.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_SIMULATE_")
    argument: ClassVar[str | None] = "config"

    name: str = "simulation"
    """Of the scenario, in what is printed and written."""

    seed: int = 0
    """Of all that is drawn."""

    seconds: float = Field(60.0, gt=0)
    """How long to simulate; shorter if all requests have ended."""

    costs: str = "epyc-2-cores"
    """Cost table: one that comes with the simulator, or a file."""

    noise: float = Field(0.0, ge=0, lt=1)
    """By how much of its cost a forward may be longer or shorter."""

    arrivals: Literal["closed", "poisson", "recorded"] = "closed"
    """closed keeps as many requests under way as `sequences` says, poisson has `rate` new ones each second, and recorded takes them
    from a file."""

    sequences: list[Annotated[int, Field(ge=1, le=4096)]] = Field([8], min_length=1)
    """Requests under way; each number is simulated on its own. With arrivals other than closed it is only a label."""

    waves: int | None = Field(None, ge=1)
    """Requests in all for each under way, as in `outrider bench`; unset goes on until the time is up. Needs closed arrivals."""

    rate: float = Field(1.0, gt=0)
    """Requests each second of poisson arrivals."""

    recording: Path | None = None
    """Recorded requests: a JSON object a line, with prompt_tokens, output_tokens and maybe time, kind and guesses. With recorded
    arrivals each comes at its time; with closed ones they are sent in turn until there are no more."""

    warm_up: int = Field(0, ge=0)
    """Requests at the beginning of the recording that are not measured. They are closed arrivals; when all of them have ended, time
    begins for the others and for the schedule."""

    prompt_tokens: list[Annotated[int, Field(ge=1)]] = Field([64], min_length=1, max_length=2)
    """Length of prompts; two numbers are the least and the most, all between being equally likely."""

    output_tokens: list[Annotated[int, Field(ge=1)]] = Field([128], min_length=1, max_length=2)
    """Length of answers, in the same way."""

    kinds: list[str] = Field([""], min_length=1)
    """Kinds of traffic, in turn."""

    hard_share: float = Field(0.0, ge=0, lt=1)
    """Share of each text that is hard to guess."""

    stretch_tokens: float = Field(32.0, ge=1)
    """Mean length of a hard stretch."""

    drafters: list[DrafterSpec] = Field(default_factory=list)
    """The drafters; as a flag a JSON list."""

    verifiers: int = Field(1, ge=1)
    """Verifiers, verifier-1 and so on; a request goes to the one with the fewest."""

    schedule: list[Event] = Field(default_factory=list)
    """Events with their times; as a flag a JSON list."""

    draft_tokens: DraftTokensSetting = "goodput"
    """The verifier's setting."""

    always_draft: bool = False
    """The verifier's setting: ask for drafts and wait for them whether it pays or not."""

    max_batch_tokens: int = Field(512, ge=1)
    """The verifier's setting."""

    max_sequences: int = Field(128, ge=1, le=4096)
    """The verifier's setting."""

    page_count: int = Field(8192, ge=1)
    """Pages of the verifier's KV cache, 16 tokens each."""

    prefix_caching: bool = True
    """The verifier's setting. Only recorded prompts with `prompt_ids` can be equal."""

    client_ms: float = Field(0.5, ge=0)
    """From a client to a verifier, in each direction, and until a client that got its answer sends its next request."""

    baseline: bool = True
    """Simulate plain decoding as well, and compare with it."""

    out: Path | None = None
    """Directory for JSON, a page and plots; unset only prints."""

    write_costs: Path | None = None
    """Measure a cost table on this machine with the bundled pair, write it to this file, and simulate nothing."""

    models: Path = Path("models")
    """Directory of the bundled pair, target and draft, to measure costs with."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        table = costs.load(self.costs)
        verifiers = {f"verifier-{i + 1}" for i in range(self.verifiers)}
        names = [drafter.name for drafter in self.drafters]
        if len(set(names)) < len(names) or verifiers & set(names):
            raise ValueError("drafters must have names of their own")
        for drafter in self.drafters:
            _check_one_of("drafters.cost", drafter.cost, table.drafting)
            _check_one_of("drafters.verifier", drafter.verifier, verifiers)
        for event in self.schedule:
            _check_one_of(
                "schedule.who",
                event.who,
                {*verifiers, *names} if event.what in ("join", "leave") else names,
            )
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
        """Numbers of requests under way; each is simulated on its own."""
        return self.sequences if self.arrivals == "closed" else self.sequences[:1]


def _check_one_of(field: str, value: str, known: Any) -> None:
    if value not in known:
        raise ValueError(
            f"{field} must be one of {', '.join(sorted(known)) or '(none)'}, not {value!r}"
        )
