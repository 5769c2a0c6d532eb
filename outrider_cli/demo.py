"""`outrider demo`: compares plain decoding with each drafter on real prompts.

The processes are those of `outrider serve`; for example, the head drafts in the verifier's process.
The command prints one table for each target. On the bundled pair in float32, every draft is
verified and all texts must be identical. On SmolLM2 in bfloat16, drafts are verified where they
pay, which shows the speed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider import smollm2
from outrider.errors import OutriderError, Reason
from outrider.gguf import pretrained
from outrider_cli.client import ask, until_ready
from outrider_cli.demo_report import Row, report
from outrider_cli.drafter_spec import DrafterSpec
from outrider_cli.prompts import DEMO_PROMPTS, SMOLLM2_QUESTIONS
from outrider_cli.serve_settings import SMOLLM2_DRAFTERS, ServeSettings
from outrider_cli.stack_plan import Stack, plan_stack
from outrider_cli.start_log import start_status
from outrider_cli.supervisor import StartFailed, Supervisor

# The bundled pair: folders of the sources.
_TARGET = Path("models/target")
_DRAFT = Path("models/draft")
_HEAD = Path("models/heads/eagle3")
_LOADING_S = 600.0
_TOKENS = 96
_PLAIN = {"enabled": False}
_GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the demo: a target, its drafters, and the questions to ask.

    Each of `questions` has a kind, and the fields of its request body. With `is_exactness`, every
    draft is verified, each question is asked once, and the exit status says whether all texts equal
    the texts of plain decoding.
    """

    title: str
    target: str
    dtype: str
    drafters: tuple[str, ...]
    questions: tuple[tuple[str, dict[str, Any]], ...]
    is_exactness: bool

    def rows(self) -> list[Row]:
        """Return a row for each kind of question and each decoding mode."""
        kinds = dict(self.questions)
        return [
            Row(kind, name, speculation)
            for kind, question in kinds.items()
            for name, speculation in self._ways(question).items()
        ]

    def _ways(self, question: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Map each decoding mode to the field `speculation` of the question's requests."""
        common = {"metrics": True, "always_draft": self.is_exactness}
        specs = map(DrafterSpec.parse, self.drafters)
        names = [spec.options.get("id", spec.family) for spec in specs]
        # The grammar drafter drafts nothing for a request without a grammar.
        able = [name for name in names if name != _GRAMMAR or "response_format" in question]
        ways: dict[str, dict[str, Any]] = {"plain": _PLAIN}
        ways |= {name: {"drafter_id": name} | common for name in able}
        if len(able) > 1 and not self.is_exactness:
            ways["all drafters"] = common
        return ways


def run() -> int:
    """Run both parts, and return the exit status.

    The status is 0 if every drafter's texts in float32 equal the texts of plain decoding, 1 if not
    or if a process failed, 2 without the bundled models, 130 after Ctrl-C.
    """
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    for model in (_TARGET, _DRAFT, _HEAD):
        if not (model / "config.json").is_file():
            hint = "run the demo in the folder of Outrider's sources"
            console.print(f"outrider demo: {model} is not a model; {hint}")
            return 2
    try:
        statuses = [_run_part(part, console) for part in parts(console)]
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; all processes are stopped")
        return 130
    except (OutriderError, StartFailed, TimeoutError, OSError, httpx.HTTPError) as error:
        console.print(f"outrider demo: {error}", markup=False)
        return 1
    console.print("Next, `make serve` keeps such a stack up, with a page on http://127.0.0.1:8000.")
    return max(statuses)


def parts(console: Console) -> Iterator[Part]:
    """Yield the demo's parts; if SmolLM2's package is missing, print why the second is left out."""
    yield Part(
        "1. Exactness: the bundled pair, 12 M parameters, float32, every draft is verified",
        str(_TARGET),
        "float32",
        ("ngram,id=ngram", f"model={_DRAFT},id=model", f"head={_HEAD},id=eagle3"),
        tuple((kind, {"prompt": prompt}) for kind, prompt in DEMO_PROMPTS[::3]),
        is_exactness=True,
    )
    try:
        pretrained(smollm2.NAME)
    except OutriderError as error:
        if error.reason is not Reason.MODEL_NOT_FOUND:
            raise
        console.print(f"No table of a published model: {error.message}", markup=False)
        return
    yield Part(
        "2. Speed: SmolLM2-135M-Instruct, bfloat16, drafts are verified where they pay",
        smollm2.NAME,
        "bfloat16",
        tuple(f"{family},id={family}" for family in SMOLLM2_DRAFTERS),
        SMOLLM2_QUESTIONS,
        is_exactness=False,
    )


def _run_part(part: Part, console: Console) -> int:
    settings = ServeSettings.model_validate(
        {
            "target": part.target,
            "dtype": part.dtype,
            "drafter": list(part.drafters),
            "http_port": 0,
            "grpc_port": 0,
            "verifier_port": 0,
            "log_level": "warning",
        }
    )
    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as directory:
        return asyncio.run(_demo(plan_stack(settings, Path(directory)), part, console))


async def _demo(stack: Stack, part: Part, console: Console) -> int:
    main = asyncio.current_task()
    if main is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    lines: list[str] = []
    supervisor = Supervisor(lambda name, line: lines.append(f"{name}: {line}"))
    rows = part.rows()
    try:
        for child in stack.children:
            supervisor.start(child)
        drafters = len(part.drafters)
        with start_status(console, f"loading {part.target} and {drafters} drafters ...") as show:
            ready = until_ready(stack.http_url, show, drafters)
            async with asyncio.timeout(_LOADING_S):
                await supervisor.settle(ready)
        with _progress(console) as progress:
            await _measure(stack.http_url, part, rows, progress)
    except (StartFailed, TimeoutError) as error:
        console.print("\n".join(lines[-20:]), markup=False)
        if isinstance(error, TimeoutError):
            raise StartFailed(f"not ready within {_LOADING_S:.0f} s") from error
        raise
    finally:
        await supervisor.stop()
    return report(part.title, part.questions, rows, console, is_exactness=part.is_exactness)


def _progress(console: Console) -> Progress:
    description = TextColumn("{task.description}")
    left = TextColumn("time left:")
    columns = [description, BarColumn(), MofNCompleteColumn(), left, TimeRemainingColumn()]
    return Progress(*columns, console=console)


async def _measure(url: str, part: Part, rows: list[Row], progress: Progress) -> None:
    """Ask every question with every decoding mode, one request at a time.

    To compare speeds, each question is asked twice, the second time with the modes in reverse
    order, so that other work on the machine slows all modes alike.
    """
    orders = [rows] if part.is_exactness else [rows, rows[::-1]]
    asked = [
        (question, row)
        for order in orders
        for kind, question in part.questions
        for row in order
        if row.kind == kind
    ]
    task = progress.add_task("prompts", total=len(asked))
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for _, question in part.questions:
            # The first request of a prompt is not measured. After it, every mode finds the prompt
            # cached.
            await ask(client, question | {"model": part.target}, 1, _PLAIN)
        for question, row in asked:
            progress.update(task, description=f"{row.kind} with {row.name}")
            body = question | {"model": part.target}
            row.answers.append(await ask(client, body, _TOKENS, row.speculation))
            progress.advance(task)
