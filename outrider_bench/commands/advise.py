"""`outrider lab advise`: its output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from outrider.process.config import command
from outrider.process.usage import invoke
from outrider_bench.commands.entry import refusing
from outrider_bench.settings import Question

if TYPE_CHECKING:
    from outrider_bench.experiment.profile_record import Profile

_PROGRAM = "outrider lab advise"
_WIDTH = 132


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
