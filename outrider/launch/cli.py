"""The `outrider` command. Loads neither torch nor a service; what a command needs is imported when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import click

from outrider import __version__
from outrider.process.usage import invoke


class _Commands(click.Group):
    """Puts the command that is made from the settings' schema in place of `serve`, once it is asked for: `health` loads little."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "serve":
            return super().get_command(ctx, cmd_name)
        from outrider.launch.serve import run
        from outrider.launch.stack import ServeSettings
        from outrider.process.config import command

        return command(ServeSettings, "serve", run)


@click.group(cls=_Commands)
@click.version_option(__version__, message="%(version)s")
def app() -> None:
    """Disaggregated speculative decoding.

    A shell completes commands and flags after
    eval "$(_OUTRIDER_COMPLETE=bash_source outrider)"; with zsh_source in zsh, and in fish
    _OUTRIDER_COMPLETE=fish_source outrider | source.
    """


@app.command()
def serve() -> None:
    """Run a verifier, drafters and a gateway on this host until Ctrl-C."""


@app.command()
@click.option(
    "--models",
    type=click.Path(path_type=Path),
    default="models",
    help="Directory of the bundled pair, target and draft.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 1024),
    default=128,
    help="Tokens a prompt is answered with at most.",
)
def demo(models: Path, max_tokens: int) -> int:
    """Compare plain decoding with each drafter on the bundled pair; exits with 0 only if all texts are identical."""
    from outrider.launch.demo import run

    return run(models, max_tokens)


def _run_bench(module: str, arguments: tuple[str, ...]) -> int:
    """Run a command of `bench`, which is no part of what `outrider` needs, and which parses the arguments by its own schema."""
    status: int = import_module(module).main(list(arguments))
    return status


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> int:
    """Measure tokens/s beside transformers' generate. `outrider bench --help` lists the options."""
    return _run_bench("bench.__main__", arguments)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def simulate(arguments: tuple[str, ...]) -> int:
    """Run engine, planner and drafters in virtual time. `outrider simulate --help` lists the options."""
    return _run_bench("bench.simulator.__main__", arguments)


@app.group()
def experiment() -> None:
    """Measure and predict where a drafter should sit. docs/placement.md describes the files."""


def _passed_on(group: click.Group, name: str, module: str, text: str) -> None:
    """Add a command of `bench` that parses its own arguments."""

    @group.command(
        name, help=text, add_help_option=False, context_settings={"ignore_unknown_options": True}
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: tuple[str, ...]) -> int:
        return _run_bench(module, arguments)


_passed_on(experiment, "run", "bench.experiment.run", "Measure what an experiment file describes.")
_passed_on(
    experiment,
    "report",
    "bench.experiment.report",
    "Make tables, plots and a page of what was measured.",
)
_passed_on(
    experiment, "predict", "bench.experiment.predict", "Run an experiment file in the simulator."
)
_passed_on(
    experiment,
    "papers",
    "bench.experiment.papers",
    "Compare published figures with theory and the simulator.",
)
_passed_on(
    app,
    "profile",
    "bench.experiment.profile",
    "Measure what forwards, drafting and links cost on this machine.",
)
_passed_on(
    app, "advise", "bench.experiment.advise", "Say which placement of a drafter wins, and why."
)
_passed_on(
    app,
    "agent",
    "bench.experiment.agent",
    "Start and stop processes on this machine for an experiment elsewhere.",
)
_passed_on(
    app,
    "fleet",
    "bench.fleet.command",
    "Simulate thousands of verifiers and drafters by rates and queues.",
)


@app.command(context_settings={"ignore_unknown_options": True})
@click.argument(
    "command",
    metavar="COMMAND... | verifier ADDRESS",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
)
@click.option(
    "--tokenizer",
    help="Directory or hub id of the tokenizer that the drafter has to have; any, unless given.",
)
@click.option(
    "--transcript",
    type=click.Path(path_type=Path),
    help="File for what was said, a line of JSON each.",
)
def conformance(command: tuple[str, ...], tokenizer: str | None, transcript: Path | None) -> int:
    """Check that a drafter, or a verifier, keeps the draft stream's contract.

    COMMAND starts a drafter, behind "--"; {address} in it stands for the verifier's host:port. `verifier ADDRESS` checks the
    verifier that serves there. Exits with 0 if every rule was kept.
    """
    if len(command) == 2 and command[0] == "verifier":
        from outrider.conformance.verifier_side import check_verifier

        return check_verifier(command[1])
    from outrider.conformance.kit import check_drafter
    from outrider.tokenizer import fingerprint, load_tokenizer

    if not any("{address}" in part for part in command):
        raise click.UsageError(
            "COMMAND has to hold {address}, which stands for the verifier's host:port"
        )
    if tokenizer is None:
        return check_drafter(command, transcript=transcript)
    loaded = load_tokenizer(tokenizer)
    return check_drafter(
        command,
        fingerprint=fingerprint(loaded),
        vocab_size=loaded.get_vocab_size(),
        transcript=transcript,
    )


@app.command()
@click.argument("address")
@click.option(
    "--service",
    default="",
    help="A gRPC service by its full name; without one, the process as a whole.",
)
@click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=3.0, help="Seconds to wait for an answer."
)
def health(address: str, service: str, timeout: float) -> int:
    """Ask the process at ADDRESS (host:port or unix:/path) for its gRPC health.

    Exits with 0 if it serves, else with 1 and says why.
    """
    from outrider.launch.health import problem

    why = problem(address, service, timeout)
    if why is not None:
        print(f"outrider health: {address}: {why}", file=sys.stderr)
    return int(why is not None)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point of the `outrider` command."""
    raise SystemExit(invoke(app, "outrider", sys.argv[1:] or ["--help"]))


if __name__ == "__main__":
    main()
