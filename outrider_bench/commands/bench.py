"""`outrider lab bench`."""

from __future__ import annotations

import shlex
import sys

from outrider.process.settings.config import parse
from outrider_bench.commands.entry import INTERRUPTED, refusing
from outrider_bench.settings import BenchSettings

_PROGRAM = "outrider lab bench"


def main(arguments: list[str]) -> int:
    """The exit status."""
    settings = parse(BenchSettings, _PROGRAM, arguments)
    command = shlex.join([*_PROGRAM.split(), *arguments])
    from outrider_bench.bench import run
    from outrider_bench.experiment.processes import StackFailed

    try:
        with refusing(_PROGRAM):
            run(settings, command)
    except KeyboardInterrupt:
        print(f"stopped; to go on, run the same command again: {command}")
        return INTERRUPTED
    except (StackFailed, OSError, RuntimeError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0
