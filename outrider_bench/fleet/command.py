"""`outrider fleet`: thousands of verifiers and drafters by rates and queues."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from outrider.process.usage import invoke
from outrider_bench.console import console_for_output
from outrider_bench.fleet import results
from outrider_bench.fleet.compare import CASES, compare, table
from outrider_bench.fleet.layout import Floats, peak_rates
from outrider_bench.fleet.rates import Cell, cells
from outrider_bench.fleet.servers import Servers
from outrider_bench.fleet.simulation import Simulation
from outrider_bench.fleet.spec import Fleet, load
from outrider_bench.report import write

_EXAMPLE = Path(__file__).parents[2] / "experiments" / "fleet.yaml"
_RATES = Path("bench/out/fleet/rates.json")


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=_EXAMPLE)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Directory for JSON, a page and plots."
)
@click.option(
    "--rates",
    type=click.Path(path_type=Path),
    default=_RATES,
    show_default=True,
    help="File that keeps what was measured in the engine-level simulator.",
)
@click.option("--processes", type=click.IntRange(1), help="Processes to measure rates with.")
@click.option(
    "--compare",
    "compares",
    is_flag=True,
    help="Compare with the engine-level simulator instead, over small fleets.",
)
def command(
    file: Path, out: Path | None, rates: Path, processes: int | None, compares: bool
) -> int:
    """Simulate the fleet of FILE over a day, and its alternatives.

    Without FILE it is the example of 1,000 verifiers. docs/fleet.md describes the file.
    """
    try:
        if compares:
            return _compare(rates, processes)
        return _show(load(file), out, rates, processes)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def main(arguments: list[str]) -> int:
    """The exit status."""
    status: int = invoke(command, "outrider fleet", arguments)
    return status


def simulate(fleet: Fleet, rates: Path, processes: int | None = None) -> dict[str, Any]:
    """The record of a fleet and its alternatives; `rates` keeps measured rates."""
    others = {name: fleet.alternative(name) for name in fleet.alternatives}
    known = cells([fleet, *others.values()], rates, processes=processes)
    peaks = peak_rates(fleet, Servers(fleet, known))
    same_hours = fleet.model_copy(update={"alternatives": {fleet.name: {}}})
    todo = {fleet.name: same_hours.alternative(fleet.name), **others} if others else {}
    jobs = [(other, known, peaks) for other in (fleet, *todo.values())]
    workers = min(processes or len(os.sched_getaffinity(0)), len(jobs))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        told = "simulating the day, then alternatives"
        day, *found = track(pool.map(_run, jobs), told, len(jobs), transient=True)
    records = [run["overall"] for run in found]
    compared = map(results.compared_record, todo.values(), records)
    return results.record(fleet, day, dict(zip(todo, compared, strict=True)))


def _run(job: tuple[Fleet, dict[str, Cell], Floats]) -> dict[str, Any]:
    """Figures by hour and overall, in a process of its own."""
    fleet, known, peaks = job
    recorder = Simulation(fleet, Servers(fleet, known), peaks).run()
    return {"hours": recorder.hours(), "overall": recorder.overall()}


def _show(fleet: Fleet, out: Path | None, rates: Path, processes: int | None) -> int:
    began = time.monotonic()
    written = simulate(fleet, rates, processes)
    console = console_for_output(record=True)
    console.print(written["machine"], markup=False)
    if fleet.question:
        console.print(fleet.question, markup=False)
    for found in results.tables(written):
        console.print(found)
    for sentence in results.findings(written["compared"]):
        console.print(sentence, markup=False, highlight=False)
    if out is not None:
        images = {}
        if find_spec("matplotlib") is not None:
            images = results.plots(written)
        for path in write(out, fleet.name, written, console, images):
            print(f"written: {path}")
    print(f"took {time.monotonic() - began:.0f} s")
    return 0


def _compare(rates: Path, processes: int | None) -> int:
    rows = [compare(case, rates, processes=processes) for case in track(CASES, transient=True)]
    Console(width=200).print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
