"""`outrider serve`: the stack's processes under a supervisor, from the first line they print until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from outrider.errors import OutriderError
from outrider.local import until_ready
from outrider.stack import ServeSettings, Stack, plan_stack
from outrider.supervisor import StartFailed, Supervisor


def run(settings: ServeSettings) -> int:
    """Serve until SIGINT or SIGTERM; the exit status."""
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
