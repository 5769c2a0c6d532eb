"""`outrider lab chaos`: its flags."""

from __future__ import annotations

from pathlib import Path

import click

from outrider_bench.commands.entry import entry

_HISTORY = Path("bench/out/chaos/history.jsonl")


@entry("chaos")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--minutes", type=float, help="No round begins later.")
@click.option("--seed", type=int, help="The same seed gives the same schedule.")
@click.option("--round", "only", type=click.IntRange(0), help="Play this round alone.")
@click.option(
    "--history",
    "path",
    type=click.Path(path_type=Path),
    default=_HISTORY,
    help="File for the events of the campaign, one line of JSON each. Its table is beside it.",
)
def main(
    file: Path | None, minutes: float | None, seed: int | None, only: int | None, path: Path
) -> int:
    """Play the campaign of FILE, or all faults, and exit with 1 if anything was lost.

    docs/contribute.md describes the faults, what is checked, and the file.
    """
    from outrider_bench.chaos.playing import run

    given = {"minutes": minutes, "seed": seed}
    return run(file, {name: x for name, x in given.items() if x is not None}, only, path)
