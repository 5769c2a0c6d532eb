"""The `outrider` command. Loads neither torch nor a service; what a command needs is imported when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import click

from outrider import __version__
from outrider.usage import invoke


class _Commands(click.Group):
    """Puts the command that is made from the settings' schema in place of `serve`, once it is asked for: `health` loads little."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "serve":
            return super().get_command(ctx, cmd_name)
        from outrider.config import command
        from outrider.serving import run
        from outrider.stack import ServeSettings

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
    "--models", type=click.Path(path_type=Path), default="models", help="Directory of the bundled pair, target and draft."
)
@click.option("--max-tokens", type=click.IntRange(1, 1024), default=128, help="Tokens a prompt is answered with at most.")
def demo(models: Path, max_tokens: int) -> int:
    """Compare plain decoding with each drafter on the bundled pair; exits with 0 only if all texts are identical."""
    from bench.demo import run

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


@app.command()
@click.argument("address")
@click.option("--service", default="", help="A gRPC service by its full name; without one, the process as a whole.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=3.0, help="Seconds to wait for an answer.")
def health(address: str, service: str, timeout: float) -> int:
    """Ask the process at ADDRESS (host:port or unix:/path) for its gRPC health.

    Exits with 0 if it serves, else with 1 and says why.
    """
    from outrider.health import problem

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
