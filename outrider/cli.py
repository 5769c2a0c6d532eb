"""The `outrider` command. Loads neither torch nor a service; `serve` runs them as processes."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from outrider import __version__
from outrider.config import parse
from outrider.errors import OutriderError
from outrider.local import until_ready
from outrider.stack import ServeSettings, Stack, plan_stack
from outrider.supervisor import StartFailed, Supervisor

# The settings' own schema parses what follows, so that flags, environment and YAML cannot differ.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Disaggregated speculative decoding.")


@app.command(context_settings=_PASS_ON)
def serve(context: typer.Context) -> None:
    """Run a verifier, drafters and a gateway on this host until Ctrl-C. `outrider serve --help` lists the settings."""
    settings = parse(ServeSettings, "outrider serve", context.args)
    raise SystemExit(_serve(settings))


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
def version() -> None:
    """Print the version."""
    print(__version__)


def _serve(settings: ServeSettings) -> int:
    with tempfile.TemporaryDirectory(prefix="outrider-") as directory:
        try:
            stack = plan_stack(settings, Path(directory))
            return asyncio.run(_run(stack, settings))
        except OutriderError as error:
            print(f"outrider serve: {error}", file=sys.stderr)
            return 2


async def _run(stack: Stack, settings: ServeSettings) -> int:
    console = Console(highlight=False, soft_wrap=True)
    supervisor = Supervisor(lambda name, line: console.print(f"[bold]{name:>10}[/] │ {escape(line)}"))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    for child in stack.children:
        supervisor.start(child)
    starting = asyncio.create_task(_announce(supervisor, stack, settings, console))
    starting.add_done_callback(lambda task: stop.set() if not task.cancelled() and task.exception() else None)
    try:
        await stop.wait()
        console.print("stopping")
    finally:
        starting.cancel()
        await supervisor.stop()
    try:
        await starting
    except StartFailed as error:
        console.print(f"outrider serve: {error}; its last lines above say why", markup=False)
        return 1
    except asyncio.CancelledError:
        pass  # stopped before it was up
    return 0


async def _announce(supervisor: Supervisor, stack: Stack, settings: ServeSettings, console: Console) -> None:
    """Print the URLs once requests are taken; raises StartFailed."""
    ready = until_ready(stack.http_url, lambda stage: console.print(f"[dim]{escape(stage)}[/]"), len(settings.drafter))
    await supervisor.settle(ready)
    console.print(
        f"""
Ready.
  OpenAI API   {stack.http_url}/v1
  gRPC         {stack.grpc_address} (outrider.v1.GenerationService)
  health       {stack.http_url}/readyz
  drafters     dial {stack.verifier_address}

  curl {stack.http_url}/v1/completions -H 'content-type: application/json' \\
    -d '{{"model": "{settings.target}", "prompt": "def main(", "max_tokens": 64, "temperature": 0}}'
""",
        markup=False,
    )


def main() -> None:
    """Entry point of the `outrider` command."""
    app()


if __name__ == "__main__":
    main()
