"""`outrider lab simulate FILE`: its flags."""

from __future__ import annotations

from pathlib import Path

import click

from outrider_bench.commands.entry import entry


@entry("simulate")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--seed", type=int, help="Seed of all random draws, in place of the file's.")
@click.option(
    "--baseline/--no-baseline",
    default=None,
    help="Simulate plain decoding too and compare with it, or do not, whatever the file says.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory for JSON; without one the results are only printed.",
)
@click.option(
    "--faults",
    type=click.IntRange(1),
    metavar="N",
    help="Play N random worlds with faults, one for each seed from --seed on, and check every"
    " invariant in each. This takes no FILE.",
)
def main(
    file: Path | None, seed: int | None, baseline: bool | None, out: Path | None, faults: int | None
) -> int:
    """Run engine, planner and drafters' stream logic in virtual time, as the scenario FILE says.

    outrider_bench/simulator/scenario.py documents the fields of FILE.
    """
    from outrider_bench.simulator.results import show
    from outrider_bench.simulator.scenario import Scenario
    from outrider_bench.simulator.worlds.campaign import show_campaign
    from outrider_bench.yaml_file import read

    if faults is not None:
        if file is not None:
            raise click.UsageError("faults: takes no FILE, since each world is drawn from its seed")
        return show_campaign(seed or 0, faults)
    if file is None:
        raise click.UsageError("FILE must be given, unless --faults is")
    given = {"seed": seed, "baseline": baseline}
    show(read(file, Scenario, **{name: x for name, x in given.items() if x is not None}), out)
    return 0
