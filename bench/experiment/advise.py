"""`outrider advise`: where a drafter should sit, for a cost table and a link."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self

import click
from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict
from rich.console import Console
from rich.progress import track

from bench.experiment import advice_text, machine_costs
from bench.experiment.advice import advise
from bench.experiment.arithmetic import MAX_ACCEPTANCE
from bench.experiment.machine_costs import MachineCosts, at_batch, elsewhere
from bench.experiment.situation import Place, Situation, measured_acceptance
from bench.simulator.costs import Costs
from outrider.process.config import Settings, command
from outrider.process.usage import invoke, refuse

_PROGRAM = "outrider advise"
_WIDTH = 132


class Question(Settings):
    """Say which placement of a drafter wins, by how much, and what limits it.

    Compares a drafter on the target's cores, on other cores of its host, and on another host over a
    link: simulated, with the arithmetic beside it.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_ADVISE_")

    profile: Path | None = None
    """File of `outrider profile`, or a cost table."""

    costs: str | None = None
    """Instead of a profile: a cost table of the simulator by its name, or a file of one."""

    round_trip_ms: float = Field(ge=0, le=1000)
    """Round trip of the link to the other host, as ping shows it. That on one host is added."""

    mbit_s: float = Field(0.0, ge=0)
    """Bandwidth of the link in each direction; 0 is no limit."""

    jitter_ms: float = Field(0.0, ge=0, le=1000)
    """By how much a message may be later on the link, in each direction."""

    acceptance: float | None = Field(None, ge=0, le=MAX_ACCEPTANCE)
    """Chance that a draft token stands if those before it do; unset is that of the profile."""

    recording: Path | None = None
    """Instead of an acceptance: recorded requests with the drafter's guesses, as simulated ones."""

    batch: list[Annotated[int, Field(ge=1, le=256)]] = Field([1, 8, 32], min_length=1, max_length=8)
    """Requests under way; the first one is answered in words."""

    drafter: str = "model"
    """The cost table's way of drafting on the target's cores, or on its GPU."""

    host_drafter: str | None = None
    """The same on other cores of the host, such as a CPU's beside a GPU; unset is as `drafter`."""

    far_drafter: str | None = None
    """The same on the other host; unset is as `drafter`."""

    host_round_trip_ms: float | None = Field(None, ge=0, le=1000)
    """Round trip between two processes on one host, with what gRPC takes; unset is the profile's,
    or 0.4 ms with a cost table."""

    interference: float | None = Field(None, ge=0, le=1)
    """Share of the drafting time that forwards lose to drafting on other cores of the host; unset
    is the profile's, or 0 with a cost table."""

    hit_rate: float = Field(0.85, ge=0, le=1)
    """Of the bound of pushed outcomes: chance that one of the pushed drafts fits the outcome."""

    @model_validator(mode="after")
    def _has_one_acceptance(self) -> Self:
        if self.acceptance is not None and self.recording is not None:
            raise ValueError("recording: give either --acceptance or --recording, not both")
        return self


def main(arguments: list[str]) -> int:
    """The exit status; prints what is wrong with the arguments and exits with 2."""
    ask = command(Question, _PROGRAM, _run)
    ask.params.append(
        click.Option(
            ["--json"],
            is_flag=True,
            expose_value=False,
            callback=_note,
            help="Print all of it as JSON.",
        )
    )
    status: int = invoke(ask, _PROGRAM, arguments)
    return status


def situations_of(question: Question) -> list[Situation]:
    """The situation of each batch; raises ValueError that names the setting."""
    found = machine_costs.load(question.profile, question.costs)
    table = found if isinstance(found, Costs) else found.costs
    for name in ("drafter", "host_drafter", "far_drafter"):
        way = getattr(question, name)
        if way is not None and way not in table.drafting:
            known = ", ".join(sorted(table.drafting)) or "(none)"
            flag = name.replace("_", "-")
            raise ValueError(f"{flag}: must be one of {known} of the cost table, not {way!r}")
    acceptance = question.acceptance
    if question.recording is not None:
        acceptance = measured_acceptance(question.recording, question.drafter)
    batches = dict.fromkeys(question.batch)
    figures = {batch: at_batch(found, question.drafter, batch) for batch in batches}
    return [_situation(question, batch, figures[batch], acceptance) for batch in batches]


def _situation(
    question: Question,
    batch: int,
    costs: MachineCosts,
    acceptance: float | None,
) -> Situation:
    chance = costs.acceptance if acceptance is None else acceptance
    if chance is None:
        limits = f"from 0 to {MAX_ACCEPTANCE}"
        raise ValueError(f"acceptance: give --acceptance, {limits}, or --recording")
    places = _places(question, costs)
    chance = min(chance, MAX_ACCEPTANCE)
    return Situation(costs.plain, costs.drafted, places, chance, question.hit_rate, batch)


def _places(question: Question, costs: MachineCosts) -> tuple[Place, Place, Place]:
    given_ms, given = question.host_round_trip_ms, question.interference
    host = Place(
        "host",
        "on other cores of the host",
        question.host_drafter or question.drafter,
        costs.round_trip_ms if given_ms is None else given_ms,
        costs.jitter_ms,
        interference=costs.interference if given is None else given,
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
        cost=elsewhere(costs.drafted, question.far_drafter or question.drafter),
        round_trip_ms=host.round_trip_ms + question.round_trip_ms,
        jitter_ms=host.jitter_ms + question.jitter_ms,
        mbit_s=question.mbit_s,
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
    drafter = question.far_drafter or question.drafter
    if click.get_current_context().meta["json"]:
        print(json.dumps(advice_text.as_json(drafter, found), indent=1))
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    advice_text.show(console, drafter, found)
    return 0


def _note(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.meta["json"] = value


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
