"""`outrider lab advise`: its flags, and its output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import click
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from outrider.process.config import Settings, command
from outrider.process.usage import invoke
from outrider_bench.commands.entry import refusing

if TYPE_CHECKING:
    from outrider_bench.experiment.profile_record import Profile

MAX_ACCEPTANCE = 0.99
"""Highest chance that a draft token is accepted."""
_PROGRAM = "outrider lab advise"
_WIDTH = 132


class Question(Settings):
    """Name the best placement of a drafter, its gain and its limit.

    Simulates a drafter on the target's cores, on other cores of its host, and on another host
    over a link: the speed of each, or with --tokens-per-s the clients that each serves.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_ADVISE_")

    costs: str
    """File of `outrider lab profile` or of a cost table, or the name of a cost table that comes
    with Outrider, for hardware that is not here."""

    round_trip_ms: float = Field(ge=0, le=1000)
    """Round trip of the link to the other host, as ping shows it, without the hosts' own time. The
    link has no jitter and no limit of bandwidth; `outrider lab predict` takes both."""

    acceptance: float | None = Field(None, ge=0, le=MAX_ACCEPTANCE)
    """Chance that a draft token is accepted if all draft tokens before it are; unset takes the
    profile's. A cost table has none."""

    batch: list[Annotated[int, Field(ge=1, le=256)]] = Field([1, 8, 32], min_length=1, max_length=8)
    """Numbers of requests under way; the first number is answered in words."""

    tokens_per_s: float | None = Field(None, gt=0)
    """Ask for capacity instead: how many clients get as many tokens/s each, without a drafter and
    by the drafter's place. It takes minutes."""

    share: float = Field(0.95, gt=0, lt=1)
    """For capacity, the share of the requests that must get the rate."""

    remote_drafters: int = Field(1, ge=1, le=64)
    """For capacity, the number of drafters on the other host, which share the sequences."""

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


def _run(question: Question) -> int:
    from outrider_bench.console import console_for_output, progress
    from outrider_bench.experiment import advice, advice_text, situations
    from outrider_bench.experiment.unmeasured import load_profile

    with refusing(_PROGRAM):
        profile = load_profile(question.costs, "costs")
        asked = situations.situations_of(question, profile)
    if question.tokens_per_s is not None:
        return _capacity(question, question.tokens_per_s, profile)
    found = []
    with progress() as bar:
        task = bar.add_task("simulating", total=len(asked) * advice.SIMULATIONS)
        for number, situation in enumerate(asked, 1):
            found.append(advice.advise(situation, lambda: bar.advance(task)))
            bar.update(task, completed=number * advice.SIMULATIONS)
    drafter = question.cpu_drafter or question.drafter
    if click.get_current_context().meta["json"]:
        print(json.dumps(advice_text.as_json(drafter, found, profile), indent=1))
        return 0
    advice_text.show(console_for_output(_WIDTH), drafter, found, profile)
    return 0


def _capacity(question: Question, tokens_per_s: float, profile: Profile) -> int:
    """Print how many clients each place serves."""
    from dataclasses import asdict

    from outrider_bench.console import console_for_output, progress
    from outrider_bench.experiment import capacity, situations

    wanted = capacity.Wanted(tokens_per_s, question.share)
    with progress() as bar:
        task = bar.add_task("simulating", total=4)
        found = capacity.capacities(
            lambda clients: situations.situation_of(question, profile, clients),
            wanted,
            question.remote_drafters,
            lambda: bar.advance(task),
        )
    if click.get_current_context().meta["json"]:
        print(json.dumps([asdict(each) for each in found], indent=1))
    else:
        console = console_for_output(_WIDTH)
        console.print(capacity.answer(found, wanted), markup=False, soft_wrap=True)
        console.print(capacity.table(found, wanted))
        console.print(f"Costs: {profile.described}", markup=False, soft_wrap=True)
    return 0


def _note(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.meta["json"] = value
