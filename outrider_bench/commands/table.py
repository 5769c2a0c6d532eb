"""`outrider lab table`."""

from __future__ import annotations

import shlex
import sys

from outrider.process.settings.config import parse
from outrider_bench.commands.entry import INTERRUPTED, refusing
from outrider_bench.settings import TableSettings

_PROGRAM = "outrider lab table"


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    settings = parse(TableSettings, _PROGRAM, arguments)
    command = shlex.join([*_PROGRAM.split(), *arguments])
    import asyncio

    from outrider_bench.console import console_for_output
    from outrider_bench.experiment.processes import StackFailed
    from outrider_bench.table.measure import run

    try:
        with refusing(_PROGRAM):
            table = asyncio.run(run(settings, command, console_for_output()))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (StackFailed, OSError, RuntimeError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 1
    print(table.read_text(encoding="utf-8"))
    print(f"results: {table.parent}")
    return 0
