"""`outrider chaos`: plays faults against a real stack and checks every request."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import click
from rich.table import Table

from outrider.process.usage import invoke
from outrider_bench.chaos.campaign import play
from outrider_bench.chaos.check import Violation, check
from outrider_bench.chaos.history import Event, History
from outrider_bench.chaos.site import has_redis
from outrider_bench.chaos.spec import campaign_of, load
from outrider_bench.console import console_for_output, table_of
from outrider_bench.experiment.processes import StackFailed

_HISTORY = Path("bench/out/chaos/history.jsonl")
_WHAT = ("lost", "altered", "leaked")


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--minutes", type=float, help="No round begins later.")
@click.option("--seed", type=int, help="The same seed gives the same schedule.")
@click.option("--round", "only", type=click.IntRange(0), help="Play this round alone.")
@click.option(
    "--history",
    "path",
    type=click.Path(path_type=Path),
    default=_HISTORY,
    show_default=True,
    help="File for the events of the campaign, one line of JSON each.",
)
def command(
    file: Path | None, minutes: float | None, seed: int | None, only: int | None, path: Path
) -> int:
    """Play the campaign of FILE, or all faults, and exit with 1 if anything was lost.

    docs/dependability.md describes the faults, what is checked, and the file.
    """
    try:
        campaign = load(file) if file is not None else campaign_of({})
        given = {"minutes": minutes, "seed": seed}
        changes = {name: value for name, value in given.items() if value is not None}
        campaign = campaign_of({**campaign.model_dump(), **changes})
        bag = campaign.bag(has_redis=has_redis())
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    console = console_for_output()

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    is_whole = False
    with closing(History(path)) as history:
        try:
            asyncio.run(play(campaign, bag, history, tell, only))
            is_whole = True
        except StackFailed as error:
            tell(str(error))
        found = check(history.events)
    console.print(table(history.events, found))
    for violation in found:
        tell(f"round {violation.round}: {violation.what}: {violation.detail}")
    tell(f"seed {campaign.seed}; written: {path}")
    return 0 if is_whole and not found else 1


def table(events: Sequence[Event], violations: Sequence[Violation]) -> Table:
    """Each fault with its tries, and the requests and violations of the rounds that had it."""
    rounds: dict[str, list[int]] = {}
    for event in events:
        if event["event"] == "fault":
            rounds.setdefault(event["name"], []).append(event["round"])
    requests = [event for event in events if event["event"] == "request"]
    finished = [event for event in requests if event["outcome"] == "finished"]
    counts = [Counter(event["round"] for event in some) for some in (requests, finished)]
    counts += [Counter(v.round for v in violations if v.what == what) for what in _WHAT]
    made = table_of("Faults", ["fault", "tries", "requests", "finished", *_WHAT])
    for name, numbers in sorted(rounds.items()):
        sums = (sum(count[number] for number in numbers) for count in counts)
        made.add_row(name, str(len(numbers)), *map(str, sums))
    played = len({number for numbers in rounds.values() for number in numbers})
    made.add_row("all rounds", str(played), *(str(count.total()) for count in counts))
    return made


def main(arguments: list[str]) -> int:
    """The exit status."""
    status: int = invoke(command, "outrider chaos", arguments)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
