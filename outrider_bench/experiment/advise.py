"""`outrider advise`: where a drafter should sit, for a cost table and a link."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Annotated

import click
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from rich.console import Console
from rich.progress import track

from outrider.process.config import Settings, command
from outrider.process.usage import invoke, refuse
from outrider_bench.console import console_for_output
from outrider_bench.experiment import advice_text, machine_costs
from outrider_bench.experiment.advice import MAX_ACCEPTANCE, Place, Situation, advise
from outrider_bench.experiment.machine_costs import MachineCosts, at_batch, elsewhere
from outrider_bench.simulator.costs import Costs

_PROGRAM = "outrider advise"
_WIDTH = 132


class Question(Settings):
    """Name the best placement of a drafter, its gain and its limit.

    Simulates a drafter on the target's cores, on other cores of its host, and on another host
    over a link.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_ADVISE_")

    costs: str
    """File of `outrider profile` or of a cost table, or the name of a cost table that comes with
    Outrider, for hardware that is not here."""

    round_trip_ms: float = Field(ge=0, le=1000)
    """Round trip of the link to the other host, as ping shows it, without the hosts' own time. The
    link has no jitter and no limit of bandwidth; `outrider experiment predict` takes both."""

    acceptance: float | None = Field(None, ge=0, le=MAX_ACCEPTANCE)
    """Chance that a draft token is accepted if all draft tokens before it are; unset takes the
    profile's. A cost table has none."""

    batch: list[Annotated[int, Field(ge=1, le=256)]] = Field([1, 8, 32], min_length=1, max_length=8)
    """Numbers of requests under way; the first number is answered in words."""

    drafter: str = "model"
    """The cost table's entry for drafting on the target's cores, or on its GPU."""

    cpu_drafter: str | None = None
    """The entry for cores of a CPU beside the target, on its host and on the other host, such as
    Grace beside a GPU; unset is as `drafter`."""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status; exit with 2 for wrong arguments."""
    ask = command(Question, _PROGRAM, _run)
    as_json = click.Option(["--json"], is_flag=True, expose_value=False, callback=_note)
    as_json.help = "Print everything as JSON."
    ask.params.append(as_json)
    status: int = invoke(ask, _PROGRAM, arguments)
    return status


def situations_of(question: Question) -> list[Situation]:
    """The situation of each batch; raises ValueError that names the setting."""
    found = machine_costs.load(question.costs)
    table = found if isinstance(found, Costs) else found.costs
    for name in ("drafter", "cpu_drafter"):
        way = getattr(question, name)
        if way is not None and way not in table.drafting:
            known = ", ".join(sorted(table.drafting)) or "(none)"
            flag = name.replace("_", "-")
            raise ValueError(f"{flag}: must be one of {known} of the cost table, not {way!r}")
    batches = dict.fromkeys(question.batch)
    return [_situation(question, b, at_batch(found, question.drafter, b)) for b in batches]


def _situation(question: Question, batch: int, costs: MachineCosts) -> Situation:
    acceptance = question.acceptance
    if acceptance is None:
        acceptance = costs.acceptance
    if acceptance is None:
        raise ValueError(f"acceptance: give --acceptance, from 0 to {MAX_ACCEPTANCE}")
    places = _places(question, costs)
    acceptance = min(acceptance, MAX_ACCEPTANCE)
    return Situation(costs.plain, costs.drafted, places, acceptance, batch)


def _places(question: Question, costs: MachineCosts) -> tuple[Place, Place, Place]:
    cpu_drafter = question.cpu_drafter or question.drafter
    host = Place(
        "host",
        "on other cores of the host",
        cpu_drafter,
        costs.round_trip_ms,
        costs.jitter_ms,
        interference=costs.interference,
        slowness=costs.slowness,
    )
    own = replace(
        host,
        key="target",
        name="on the target's cores or GPU",
        cost=question.drafter,
        on_target_cores=True,
        interference=0.0,
        slowness=costs.slowness_on_target_cores,
    )
    far = replace(
        host,
        key="far",
        name=f"on another host, {question.round_trip_ms:g} ms away",
        cost=elsewhere(costs.drafted, cpu_drafter),
        round_trip_ms=host.round_trip_ms + question.round_trip_ms,
        interference=0.0,
        slowness=1.0,
    )
    return own, host, far


def _run(question: Question) -> int:
    try:
        situations = situations_of(question)
    except ValueError as error:
        refuse(_PROGRAM, str(error))
    progress = Console(stderr=True)
    shown = progress.is_terminal
    asked = track(situations, "simulating", console=progress, transient=True, disable=not shown)
    found = [advise(situation) for situation in asked]
    drafter = question.cpu_drafter or question.drafter
    costs = machine_costs.load(question.costs)
    profile = None if isinstance(costs, Costs) else costs
    if click.get_current_context().meta["json"]:
        print(json.dumps(advice_text.as_json(drafter, found, profile), indent=1))
        return 0
    console = console_for_output(_WIDTH)
    advice_text.show(console, drafter, found, profile)
    return 0


def _note(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.meta["json"] = value


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
