"""`outrider lab bench`."""

from __future__ import annotations

from outrider.process.config import parse
from outrider_bench.commands.entry import refusing
from outrider_bench.settings import BenchSettings

_PROGRAM = "outrider lab bench"


def main(arguments: list[str]) -> int:
    """The exit status."""
    settings = parse(BenchSettings, _PROGRAM, arguments)
    from outrider_bench.bench import run

    with refusing(_PROGRAM):
        return run(settings, arguments)
