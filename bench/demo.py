"""`outrider demo`: plain decoding and each drafter on real prompts, as separate processes, with a table of what it gave."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.prompts import DEMO_PROMPTS
from outrider.errors import OutriderError
from outrider.local import Answer, complete, until_ready
from outrider.stack import ServeSettings, Stack, plan_stack
from outrider.supervisor import StartFailed, Supervisor

_LOADING_S = 180.0


@dataclass
class Row:
    """What one way of decoding gave over all prompts."""

    name: str
    speculation: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(a.token_count for a in self.answers) / sum(a.seconds for a in self.answers)

    def total(self, key: str) -> int:
        return sum(a.speculative[key] for a in self.answers if a.speculative is not None)

    @property
    def histogram(self) -> Counter[int]:
        """Accepted tokens of a verifying step, and how many steps accepted so many."""
        counts: Counter[int] = Counter()
        for answer in self.answers:
            if answer.speculative is not None:
                counts.update(dict(enumerate(answer.speculative["acceptance_histogram"])))
        return counts

    @property
    def forward_count(self) -> int:
        """Target forwards: each commits the tokens that it accepted and one of the target's own."""
        return sum(a.token_count for a in self.answers) - self.total("num_accepted_draft_tokens")


def run(models: Path, max_tokens: int) -> int:
    """The exit status: 0 when every drafter's texts are those of plain decoding."""
    console = Console() if sys.stdout.isatty() else Console(width=110)
    for name in ("target", "draft"):
        if not (models / name / "config.json").is_file():
            console.print(
                f"outrider demo: {models / name} is not a model; run it where the repository's models are, or say --models"
            )
            return 2
    draft = f"model={models / 'draft'}"
    settings = ServeSettings.model_validate(
        {
            "target": str(models / "target"),
            "dtype": "float32",
            "drafter": ["ngram", draft, f"{draft},id=model-pinned,placement=cpu,cores={max(os.sched_getaffinity(0))}"],
            "http_port": 0,
            "grpc_port": 0,
            "verifier_port": 0,
            "log_level": "warning",
        }
    )
    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as directory:
        try:
            return asyncio.run(_demo(plan_stack(settings, Path(directory)), settings, max_tokens, console))
        except (KeyboardInterrupt, asyncio.CancelledError):
            console.print("interrupted; everything is stopped")
            return 130
        except (OutriderError, StartFailed, TimeoutError, httpx.HTTPError) as error:
            console.print(f"outrider demo: {error}", markup=False)
            return 1


async def _demo(stack: Stack, settings: ServeSettings, max_tokens: int, console: Console) -> int:
    main = asyncio.current_task()
    if main is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    lines: list[str] = []
    supervisor = Supervisor(lambda name, line: lines.append(f"{name}: {line}"))
    rows = [Row("plain", {"enabled": False})]
    rows += [Row(name, {"drafter": name, "metrics": True}) for name in ("ngram-1", "model-1", "model-pinned")]
    try:
        for child in stack.children:
            supervisor.start(child)
        with _progress(console) as progress:
            await _load(supervisor, stack.http_url, len(settings.drafter), progress)
            await _measure(stack.http_url, settings.target, rows, max_tokens, progress)
    except (StartFailed, TimeoutError):
        console.print("\n".join(lines[-20:]), markup=False)
        raise
    finally:
        await supervisor.stop()
    return _report(rows, console)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


async def _load(supervisor: Supervisor, url: str, drafters: int, progress: Progress) -> None:
    task = progress.add_task("loading", total=1)

    def tell(stage: str) -> None:
        progress.update(task, description=stage[:70])
        if not progress.console.is_terminal:
            progress.console.print(stage, markup=False)

    await asyncio.wait_for(supervisor.settle(until_ready(url, tell, drafters)), _LOADING_S)
    progress.update(task, description="loaded", completed=1)


async def _measure(url: str, model: str, rows: list[Row], max_tokens: int, progress: Progress) -> None:
    """Every prompt in every way, one request at a time, so that the ways share what the machine does meanwhile."""
    task = progress.add_task("prompts", total=len(DEMO_PROMPTS) * len(rows))
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for row in rows:
            await complete(client, model, "warm up", 16, row.speculation)
        for kind, prompt in DEMO_PROMPTS:
            for row in rows:
                progress.update(task, description=f"{kind} with {row.name}")
                row.answers.append(await complete(client, model, prompt, max_tokens, row.speculation))
                progress.advance(task)
            if not progress.console.is_terminal:
                progress.console.print(f"prompt done: {kind}")


def _report(rows: list[Row], console: Console) -> int:
    plain = rows[0]
    same = {row.name: sum(a.text == b.text for a, b in zip(row.answers, plain.answers, strict=True)) for row in rows}
    table = Table(title=f"{len(plain.answers)} prompts, greedy, float32", caption="measured on this machine, now")
    table.add_column("decoding")
    for column in (
        "tokens/s",
        "× plain",
        "tokens per\nforward",
        "mean accepted\nlength",
        "acceptance\nrate",
        "identical\nto plain",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        steps, drafted, accepted = (row.total(k) for k in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"))
        tokens = sum(a.token_count for a in row.answers)
        table.add_row(
            row.name,
            f"{row.tokens_per_s:.1f}",
            f"{row.tokens_per_s / plain.tokens_per_s:.2f}",
            f"{tokens / row.forward_count:.2f}",
            f"{1 + accepted / steps:.2f}" if steps else "–",
            f"{accepted / drafted:.1%}" if drafted else "–",
            f"{same[row.name]} of {len(plain.answers)}",
        )
    console.print(table)
    for row in rows[1:]:
        _histogram(row, console)
    identical = all(count == len(plain.answers) for count in same.values())
    console.print("All texts are identical." if identical else "[bold red]Some texts differ from plain decoding.[/]")
    return 0 if identical else 1


def _histogram(row: Row, console: Console) -> None:
    counts = row.histogram
    total = sum(counts.values())
    if total == 0:
        console.print(f"\n{row.name}: no step verified a draft")
        return
    console.print(f"\n{row.name}: accepted draft tokens in {total} verifying steps")
    for accepted in range(max(counts) + 1):
        share = counts[accepted] / total
        console.print(f"  {accepted:>2} │{'█' * round(40 * share):<40}│ {share:6.1%}", highlight=False)
