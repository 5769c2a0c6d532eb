"""`outrider demo`: plain decoding and each drafter on real prompts, as separate processes.

It prints one table per target. The bundled target in float32 shows that all texts are identical.
Its forward costs too little for drafts to save much time, so the same function grown to 154 M
parameters in bfloat16 shows the speed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from outrider.errors import OutriderError
from outrider.launch.client import Answer, complete, until_ready
from outrider.launch.grow import grow_head, modest_checkpoint
from outrider.launch.prompts import DEMO_PROMPTS
from outrider.launch.serve_settings import ServeSettings
from outrider.launch.stack_plan import Stack, plan_stack
from outrider.launch.start_log import start_status
from outrider.launch.supervisor import StartFailed, Supervisor

# The bundled pair, and the grown target that `make serve` serves too: folders of the sources.
_TARGET = Path("models/target")
_DRAFT = Path("models/draft")
_HEAD = Path("models/heads/eagle3")
_GROWN = Path("grown/target-154m")
_GROWN_HEAD = Path("grown/eagle3-154m")
_LOADING_S = 600.0
_MANY_STEPS = 30
_CAPTION = (
    "measured on this machine, now; the accepted length is that of steps with a draft, the tokens "
    "per forward those of all steps"
)
_COLUMNS = (
    "tokens/s",
    "× plain",
    "tokens per\nforward",
    "mean accepted\nlength",
    "acceptance\nrate",
)

# Tokens of an answer in the first part; the second part has a larger model, and answers half as
# long.
_MAX_TOKENS = 128


@dataclass
class Row:
    """One way of decoding, and its answers to all prompts."""

    name: str
    speculation: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)

    @property
    def token_count(self) -> int:
        """Tokens of all answers."""
        return sum(answer.token_count for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers per second of all requests."""
        return self.token_count / sum(answer.seconds for answer in self.answers)

    @property
    def texts(self) -> list[str]:
        """One text per prompt."""
        return [answer.text for answer in self.answers]

    def total(self, key: str) -> int:
        """Sum of one statistic of `metrics.speculative_decoding` over all answers."""
        return sum(a.speculative[key] for a in self.answers if a.speculative is not None)

    @property
    def histogram(self) -> Counter[int]:
        """Number of verifying steps by their number of accepted draft tokens."""
        counts: Counter[int] = Counter()
        for answer in self.answers:
            if answer.speculative is not None:
                counts.update(dict(enumerate(answer.speculative["acceptance_histogram"])))
        return counts

    @property
    def forward_count(self) -> int:
        """Target forwards: each commits its accepted tokens and a token of the target's own."""
        return self.token_count - self.total("num_accepted_draft_tokens")


@dataclass(frozen=True, slots=True)
class Part:
    """A target that the demo decodes with; `is_exact` compares all texts with plain decoding's."""

    title: str
    target: Path
    head: Path
    dtype: str
    max_tokens: int
    is_exact: bool


def run() -> int:
    """Run both parts, and return the exit status.

    It is 0 if every drafter's texts in float32 are plain decoding's, 1 if not or if a process
    failed, 2 without the bundled models, 130 after Ctrl-C.
    """
    console = Console(width=None if sys.stdout.isatty() else 110)
    for model in (_TARGET, _DRAFT, _HEAD):
        if not (model / "config.json").is_file():
            hint = "run the demo in the folder of Outrider's sources"
            console.print(f"outrider demo: {model} is not a model; {hint}")
            return 2
    try:
        statuses = [_run_part(part, console) for part in _parts(console)]
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; all processes are stopped")
        return 130
    except (OutriderError, StartFailed, TimeoutError, OSError, httpx.HTTPError) as error:
        console.print(f"outrider demo: {error}", markup=False)
        return 1
    console.print("Next, `make serve` keeps such a stack up, with a page on http://127.0.0.1:8000.")
    return max(statuses)


def _parts(console: Console) -> Iterator[Part]:
    yield Part(
        "1. Exactness: 12 M parameters, float32", _TARGET, _HEAD, "float32", _MAX_TOKENS, True
    )
    with start_status(console, f"growing the target to 154 M parameters in {_GROWN}, once ..."):
        modest_checkpoint(_TARGET, _GROWN)
        grow_head(_HEAD, _TARGET, _GROWN, _GROWN_HEAD)
    tokens = _MAX_TOKENS // 2
    yield Part(
        "2. Speed: 154 M parameters, bfloat16", _GROWN, _GROWN_HEAD, "bfloat16", tokens, False
    )


def _run_part(part: Part, console: Console) -> int:
    model = f"model={_DRAFT}"
    last_core = max(os.sched_getaffinity(0))
    settings = ServeSettings.model_validate(
        {
            "target": str(part.target),
            "dtype": part.dtype,
            "drafter": [
                "ngram",
                model,
                f"{model},id=model-pinned,cores={last_core}",
                f"head={part.head},id=eagle3,dtype=float32",
            ],
            "http_port": 0,
            "grpc_port": 0,
            "verifier_port": 0,
            "log_level": "warning",
        }
    )
    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as directory:
        return asyncio.run(_demo(plan_stack(settings, Path(directory)), settings, part, console))


async def _demo(stack: Stack, settings: ServeSettings, part: Part, console: Console) -> int:
    main = asyncio.current_task()
    if main is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    lines: list[str] = []
    supervisor = Supervisor(lambda name, line: lines.append(f"{name}: {line}"))
    rows = [Row("plain", {"enabled": False})]
    rows += [
        Row(name, {"drafter_id": name, "metrics": True})
        for name in ("ngram-1", "model-1", "model-pinned", "eagle3")
    ]
    try:
        for child in stack.children:
            supervisor.start(child)
        drafters = len(settings.drafter)
        loading = f"loading {settings.target} and {drafters} drafters ..."
        with start_status(console, loading) as show:
            ready = until_ready(stack.http_url, show, drafters)
            async with asyncio.timeout(_LOADING_S):
                await supervisor.settle(ready)
        with _progress(console) as progress:
            await _measure(stack.http_url, settings.target, rows, part.max_tokens, progress)
    except (StartFailed, TimeoutError) as error:
        console.print("\n".join(lines[-20:]), markup=False)
        if isinstance(error, TimeoutError):
            raise StartFailed(f"not ready within {_LOADING_S:.0f} s") from error
        raise
    finally:
        await supervisor.stop()
    return _report(part, rows, console)


def _progress(console: Console) -> Progress:
    description = TextColumn("{task.description}")
    left = TextColumn("time left:")
    columns = [description, BarColumn(), MofNCompleteColumn(), left, TimeRemainingColumn()]
    return Progress(*columns, console=console)


async def _measure(
    url: str, model: str, rows: list[Row], max_tokens: int, progress: Progress
) -> None:
    """Request every prompt in every way, one request at a time.

    The ways take turns, so that other work on the machine slows all of them alike.
    """
    task = progress.add_task("prompts", total=len(DEMO_PROMPTS) * len(rows))
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for row in rows:
            await complete(client, model, "warm up", 16, row.speculation)
        for kind, prompt in DEMO_PROMPTS:
            for row in rows:
                progress.update(task, description=f"{kind} with {row.name}")
                answer = await complete(client, model, prompt, max_tokens, row.speculation)
                row.answers.append(answer)
                progress.advance(task)


def _report(part: Part, rows: list[Row], console: Console) -> int:
    """Print a part's table, and return its exit status."""
    plain = rows[0]
    title = f"{part.title}; {len(plain.answers)} prompts, greedy"
    table = Table("decoding", title=title, caption=_CAPTION)
    compared = ["identical\nto plain"] if part.is_exact else []
    for column in [*_COLUMNS, *compared]:
        table.add_column(column, justify="right")
    for row in rows:
        compared = [_identical(row, plain)] if part.is_exact else []
        table.add_row(row.name, *_figures(row, plain), *compared)
    console.print(table)
    if not part.is_exact:
        return 0
    for row in rows[1:]:
        _histogram(row, console)
    same = all(row.texts == plain.texts for row in rows)
    if same:
        console.print("All texts are identical.\n")
    else:
        console.print("[bold red]Some texts differ from plain decoding.[/]\n")
    return int(not same)


def _figures(row: Row, plain: Row) -> list[str]:
    steps = row.total("num_spec_steps")
    drafted = row.total("num_draft_tokens")
    accepted = row.total("num_accepted_draft_tokens")
    return [
        f"{row.tokens_per_s:.1f}",
        f"{row.tokens_per_s / plain.tokens_per_s:.2f}",
        f"{row.token_count / row.forward_count:.2f}",
        f"{1 + accepted / steps:.2f}" if steps else "–",
        f"{accepted / drafted:.1%}" if drafted else "–",
    ]


def _identical(row: Row, plain: Row) -> str:
    count = sum(ours == its for ours, its in zip(row.texts, plain.texts, strict=True))
    return f"{count} of {len(plain.texts)}"


def _histogram(row: Row, console: Console) -> None:
    counts = row.histogram
    total = sum(counts.values())
    if total == 0:
        console.print(f"\n{row.name}: no step verified a draft")
        return
    console.print(f"\n{row.name}: accepted draft tokens in {total} verifying steps")
    for accepted in range(max(counts) + 1):
        share = counts[accepted] / total
        bar = "█" * round(40 * share)
        # Shares of a few steps would look more exact than they are.
        shown = f"{share:6.1%}" if total >= _MANY_STEPS else f"{counts[accepted]:>6}"
        console.print(f"  {accepted:>2} │{bar:<40}│ {shown}", highlight=False)
