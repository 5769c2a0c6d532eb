"""`outrider lab profile`: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from outrider.process.config import Dtype, Settings, parse
from outrider_bench.commands.entry import refusing

PROGRAM = "outrider lab profile"


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


def main(arguments: list[str]) -> int:
    """The exit status."""
    settings = parse(ProfileSettings, PROGRAM, arguments)
    from outrider_bench.experiment.profile import measure

    with refusing(PROGRAM):
        profile = measure(settings)
    profile.save(settings.out)
    print(f"written: {settings.out}")
    return 0
