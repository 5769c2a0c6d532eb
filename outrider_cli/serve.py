"""`outrider serve`: runs the stack's processes under a supervisor until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console
from rich.text import Text

from outrider.errors import OutriderError, Reason
from outrider.process.observability.output import Output
from outrider.process.settings.check_config import check_config, check_file
from outrider_cli.client import until_ready
from outrider_cli.drafter_spec import DrafterSpec
from outrider_cli.serve_settings import ServeSettings
from outrider_cli.stack_plan import Stack, plan_stack
from outrider_cli.start_log import StartLog, start_status
from outrider_cli.supervisor import StartFailed, Supervisor

_LAST_WRITES_S = 1.0


def run(settings: ServeSettings) -> int:
    """Serve until SIGINT or SIGTERM.

    Returns the exit status; 2 means that a port is taken, that a model was not found, or that a
    drafter's setting is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-") as directory:
        try:
            stack = plan_stack(settings, Path(directory))
            _check_models(settings)
        except OutriderError as error:
            _complain(str(error))
            return 2
        if settings.check_config:
            check_config(settings, "outrider serve")
            return 0
        return asyncio.run(supervise(stack, settings))


def _check_models(settings: ServeSettings) -> None:
    """Raise OutriderError for the first model or head that the processes would not find."""
    from outrider.tokenizer import model_file  # loads the hub's library

    for model in _models(settings):
        for name in ("config.json", "tokenizer.json"):
            if model_file(model, name) is None:
                raise OutriderError(Reason.MODEL_NOT_FOUND, f"{model} has no {name}", "target")
    for spec in map(DrafterSpec.parse, settings.drafter):
        if head := spec.options.get("head"):
            check_file("drafter", Path(head) / "config.json")


def _models(settings: ServeSettings) -> list[str]:
    """Return the names of the target and the draft models, each once."""
    specs = map(DrafterSpec.parse, settings.drafter)
    models = [spec.options["model"] for spec in specs if "model" in spec.options]
    return list(dict.fromkeys([settings.target, *models]))


async def supervise(stack: Stack, settings: ServeSettings) -> int:
    """Run the stack's processes, and return the exit status.

    Ends at SIGINT or SIGTERM (0), when a process cannot start or the supervision fails (1), or when
    nobody reads the log any more (1).
    """
    stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    output = Output(_stdout(), functools.partial(_stop_soon, stop))
    console = Console(file=cast(TextIO, output), highlight=False, soft_wrap=True)
    log = StartLog(lambda name, line: console.print(_shown(name, line)))
    if settings.log_level == "debug":
        log.ready()
    supervisor = Supervisor(log.line)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _stop, stop, 0)
    for child in stack.children:
        supervisor.start(child)
    announcing = supervisor.watch(_announce(supervisor, stack, settings, console, log))
    try:
        await asyncio.wait((stop, supervisor.failed), return_when=asyncio.FIRST_COMPLETED)
        if supervisor.failed.done():
            log.failed()
        console.print("stopping")
    finally:
        announcing.cancel()
        await supervisor.stop()
        output.finish(_LAST_WRITES_S)
    if supervisor.failed.done():
        _complain(_reason(supervisor.failed.exception()))
        return 1
    if stop.result() != 0:
        _complain("stopped, since nobody reads its output any more")
    return stop.result()


def _shown(name: str, line: str) -> Text:
    """Return a line of a process, with the name of the process before it.

    The line is not read as markup, which would change some lines.
    """
    return Text.assemble((f"{name:>10}", "bold"), f" │ {line}")


def _stop(stop: asyncio.Future[int], status: int) -> None:
    if not stop.done():
        stop.set_result(status)


def _stop_soon(stop: asyncio.Future[int]) -> None:
    """Stop with status 1. Another thread calls this, for example after `outrider serve | head`."""
    # The loop may have ended in the meantime.
    with contextlib.suppress(RuntimeError):
        stop.get_loop().call_soon_threadsafe(_stop, stop, 1)


def _stdout() -> int:
    """Return the descriptor of standard output, or of the null device if the process has none."""
    if sys.stdout is None:
        return os.open(os.devnull, os.O_WRONLY)
    return sys.stdout.fileno()


def _reason(error: BaseException | None) -> str:
    if isinstance(error, StartFailed):
        return f"{error}; its last lines above say why"
    return "a supervising task failed: " + "".join(traceback.format_exception(error)).rstrip()


def _complain(text: str) -> None:
    """Write to standard error why the command ends, if standard error can be written."""
    with contextlib.suppress(OSError):
        os.write(2, f"outrider serve: {text}\n".encode(errors="replace"))


async def _announce(
    supervisor: Supervisor, stack: Stack, settings: ServeSettings, console: Console, log: StartLog
) -> None:
    """Show the progress of the start, then print the URLs; raise StartFailed."""
    loading = f"loading {' and '.join(_models(settings))} ..."
    with start_status(console, loading) as show:
        ready = until_ready(stack.http_url, show, len(settings.drafter), stack.ca)
        await supervisor.settle(ready)
    log.ready()
    console.print(
        f"""
Ready.
  page         {stack.http_url}
  OpenAI API   {stack.http_url}/v1
  gRPC         {stack.grpc_address} (outrider.v1.GenerationService)
  health       {stack.http_url}/readyz
  drafters     dial {stack.verifier_address}

  {_example(stack, settings)}
""",
        markup=False,
    )


def _example(stack: Stack, settings: ServeSettings) -> str:
    """Return a request for curl: a chat if the target has a template for chats."""
    from outrider.tokenizer import model_file

    endpoint, asked = "completions", '"prompt": "def main("'
    if model_file(settings.target, "chat_template.jinja") is not None:
        endpoint = "chat/completions"
        asked = '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
    curl = "curl" if stack.ca is None else f"curl --cacert {stack.ca}"
    key = " -H 'authorization: Bearer KEY'" if settings.has_keys else ""
    model = (settings.model_name or [settings.target])[0]
    json = f'{{"model": "{model}", {asked}, "max_tokens": 64, "temperature": 0}}'
    return (
        f"{curl} {stack.http_url}/v1/{endpoint}{key} -H 'content-type: application/json' \\\n"
        f"    -d '{json}'"
    )
