"""The `outrider` command. Loads neither torch nor a service; what a command needs is imported when it is called."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from outrider import __version__

# The settings' own schema parses what follows, so that flags, environment and YAML cannot differ.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Disaggregated speculative decoding.")


@app.command(context_settings=_PASS_ON)
def serve(context: typer.Context) -> None:
    """Run a verifier, drafters and a gateway on this host until Ctrl-C. `outrider serve --help` lists the settings."""
    from outrider.config import parse
    from outrider.serving import run
    from outrider.stack import ServeSettings

    raise SystemExit(run(parse(ServeSettings, "outrider serve", context.args)))


@app.command()
def demo(
    models: Path = typer.Option(Path("models"), help="Directory of the bundled pair, target and draft."),  # noqa: B008
    max_tokens: int = typer.Option(128, min=1, max=1024, help="Tokens a prompt is answered with at most."),
) -> None:
    """Compare plain decoding with each drafter on the bundled pair; exits with 0 only if all texts are identical."""
    from bench.demo import run

    raise SystemExit(run(models, max_tokens))


@app.command(context_settings=_PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure tokens/s beside transformers' generate. `outrider bench --help` lists the options."""
    from bench.__main__ import main as run

    raise SystemExit(run(context.args))


@app.command()
def health(
    address: str = typer.Argument(help="host:port or unix:/path of any of Outrider's processes."),
    service: str = typer.Option("", help="A gRPC service by its full name; without one, the process as a whole."),
    timeout: float = typer.Option(3.0, min=0.1, help="Seconds to wait for an answer."),
) -> None:
    """Ask a process for its gRPC health; exits with 0 if it serves, else with 1 and says why."""
    from outrider.health import problem

    why = problem(address, service, timeout)
    if why is not None:
        print(f"outrider health: {address}: {why}", file=sys.stderr)
        raise SystemExit(1)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point of the `outrider` command."""
    app()


if __name__ == "__main__":
    main()
