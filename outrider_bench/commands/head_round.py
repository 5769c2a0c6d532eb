"""`outrider lab profile head-round`: its flags."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from outrider.process.config import Device, Settings, parse
from outrider_bench.commands.entry import refusing

_PROGRAM = "outrider lab profile head-round"


class HeadRoundSettings(Settings):
    """Measure a round of an EAGLE-3 head with random weights, by default for an 8 B target.

    Prints the time of each part, in the target's process and by the draft stream.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_HEAD_ROUND_")

    hidden: int = Field(4096, ge=8)
    """Numbers in a state of the target and of the head."""

    intermediate: int = Field(14_336, ge=8)
    """Neurons of the head's layer."""

    heads: int = Field(32, ge=1)
    """Query heads of the head's attention."""

    kv_heads: int = Field(8, ge=1)
    """Key and value heads of it."""

    vocab: int = Field(128_256, ge=16)
    """Tokens of the target."""

    draft_vocab: int = Field(32_000, ge=16)
    """Tokens that the head can guess."""

    batch: list[int] = Field([1, 8, 32])
    """Numbers of sequences."""

    context: int = Field(512, ge=2, le=4096)
    """Tokens of each sequence when the rounds begin."""

    committed: int = Field(3, ge=1, le=16)
    """Tokens that each verdict commits."""

    guesses: int = Field(4, ge=1, le=8)
    """Guesses of a draft."""

    repeats: int = Field(20, ge=1)
    """Rounds of which the fastest counts."""

    device: Device = "auto"
    """auto (CUDA when there is any), cpu, cuda or cuda:N."""

    threads: int | None = Field(None, ge=1)
    """Threads of the head on a CPU; unset lets torch choose."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError("heads must divide hidden, and kv_heads must divide heads")
        if self.draft_vocab > self.vocab:
            raise ValueError(f"draft_vocab must be at most vocab, {self.vocab}")
        if min(self.batch, default=0) < 1:
            raise ValueError("batch must be numbers of at least 1")
        return self


def main(arguments: list[str]) -> int:
    """The exit status."""
    settings = parse(HeadRoundSettings, _PROGRAM, arguments)
    from outrider_bench.head_round import run

    with refusing(_PROGRAM):
        return run(settings)
