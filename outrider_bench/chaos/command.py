"""`outrider chaos`: plays faults against a real stack and checks every request."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from outrider.process.usage import invoke
from outrider_bench.chaos.campaign import play
from outrider_bench.chaos.check import check
from outrider_bench.chaos.history import Event, History, whole
from outrider_bench.chaos.parts import absent
from outrider_bench.chaos.report import markdown
from outrider_bench.chaos.spec import load
from outrider_bench.experiment.processes import StackFailed

_HISTORY = Path("bench/out/chaos/history.jsonl")


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
    help="File for the events of the campaign, one line of JSON each. Its table is beside it.",
)
def command(
    file: Path | None, minutes: float | None, seed: int | None, only: int | None, path: Path
) -> int:
    """Play the campaign of FILE, or all faults, and exit with 1 if anything was lost.

    docs/contribute.md describes the faults, what is checked, and the file.
    """
    try:
        given = {"minutes": minutes, "seed": seed}
        campaign = load(file, **{name: x for name, x in given.items() if x is not None})
        bag = campaign.bag(absent())
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    is_whole = False
    with closing(History(path)) as history:
        try:
            asyncio.run(_until_stopped(play(campaign, bag, history, _tell, only)))
            is_whole = True
        except StackFailed as error:
            _tell(str(error))
    is_right = _report(path, history.events)
    _tell(f"seed {campaign.seed}; written: {path}")
    return 0 if is_whole and is_right else 1


def _tell(text: str) -> None:
    print(text, flush=True)


async def _until_stopped(playing: Coroutine[Any, Any, None]) -> None:
    """Await a campaign; raises StackFailed on SIGINT and SIGTERM, once it has stopped."""
    task = asyncio.ensure_future(playing)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError as cause:
        raise StackFailed("interrupted") from cause


def _report(path: Path, events: Sequence[Event]) -> bool:
    """Check a history, print its violations and table, and write these beside it.

    Returns whether there are no violations.
    """
    events = whole(events)
    found = check(events)
    table = markdown(events, found)
    path.with_suffix(".md").write_text(table)
    _tell(table)
    for violation in found:
        _tell(f"round {violation.round}: {violation.what}: {violation.detail}")
    return not found


def main(arguments: list[str]) -> int:
    """The exit status."""
    status: int = invoke(command, "outrider chaos", arguments)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
