"""`outrider lab chaos`: its flags."""

from __future__ import annotations

from pathlib import Path

import click

from outrider_bench.commands.entry import entry

_HISTORY = Path("bench/out/chaos/history.jsonl")


@entry("chaos")
@click.option(
    "--minutes",
    type=click.FloatRange(0, 1440, min_open=True),
    default=5.0,
    show_default=True,
    help="Minutes after which no round begins.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, help="The same seed gives the same schedule."
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    help="Name of a fault to play; may be repeated. A wrong name prints all names.",
)
@click.option("--tls", is_flag=True, help="Mutual TLS between all processes, and HTTPS.")
@click.option("--round", "only", type=click.IntRange(0), help="Play this round alone.")
@click.option(
    "--history",
    "path",
    type=click.Path(path_type=Path),
    default=_HISTORY,
    help="File for the campaign's events, one line of JSON each. A table is written beside it.",
)
def main(
    minutes: float, seed: int, kinds: tuple[str, ...], tls: bool, only: int | None, path: Path
) -> int:
    """Play faults; exit with status 1 if a request was lost or altered, or a resource leaked.

    docs/contribute.md describes the faults, and what is checked.
    """
    from outrider_bench.chaos.campaign import Campaign
    from outrider_bench.chaos.playing import run

    return run(Campaign(minutes, seed, only, tls), kinds, path)
