"""The decoding modes that the table compares, and the stacks that serve them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from outrider_bench.experiment.launches import Endpoint
from outrider_bench.experiment.load import Asked, play
from outrider_bench.experiment.spec import Experiment
from outrider_bench.experiment.stack import drafting, in_process_drafters, server
from outrider_bench.experiment.traffic import Request
from outrider_bench.settings import TableSettings
from outrider_bench.table.rows import PLAIN, Answer

Ask = Callable[[Sequence[Request], int, float, str], Awaitable[Answer]]
"""Sends requests in a mode, and returns the answers.
The other arguments are the number of requests at once, the temperature and the tenant.
"""
MOST_TOKENS = 2048
"""The maximum number of tokens of a prompt and its answer in vLLM's process."""
MOST_AT_ONCE = 8
"""The maximum number of requests that run at once."""
# A page has 16 tokens.
_PAGES = MOST_AT_ONCE * MOST_TOKENS // 16


@dataclass(frozen=True, slots=True)
class Mode:
    """A decoding mode whose processes are ready for requests."""

    name: str
    ask: Ask
    always: bool = False
    grammars: Literal["any", "needed", "none"] = "any"
    """Whether requests may have a grammar, must have one, or must have none."""
    most: int = MOST_AT_ONCE
    """The maximum number of requests that the mode takes at once."""

    def takes(self, requests: Sequence[Request], batch: int) -> bool:
        """Return whether the mode can answer these requests, `batch` at once."""
        has = requests[0].grammar is not None
        fits = {"any": True, "needed": has, "none": not has}[self.grammars]
        return fits and batch <= self.most


@dataclass(frozen=True, slots=True)
class Stack:
    """A verifier with drafters. `modes` maps a mode to the field `speculation` of its requests."""

    drafters: dict[str, dict[str, Any]]
    modes: dict[str, dict[str, Any]]
    threads: int

    def experiment(self, target: Path) -> Experiment:
        """Return the experiment whose processes are this stack's."""
        settings = {"max_sequences": MOST_AT_ONCE, "page_count": _PAGES}
        served = {"model": target, "dtype": "auto", "threads": self.threads, "settings": settings}
        names = [*self.drafters]
        return Experiment.model_validate(
            {"name": "table", "target": served, "drafters": self.drafters, "use": names}
        )


def stacks(settings: TableSettings) -> tuple[list[Stack], list[str]]:
    """Return the stacks with a mode that the settings ask for, and a line for each missing drafter.

    Each stack is as `outrider serve` starts it: a draft model gets one of the target's cores.
    """
    cores = len(os.sched_getaffinity(0))
    missing = []
    cheap = ["ngram", "suffix", "grammar"]
    if find_spec("arctic_inference") is None:
        cheap.remove("suffix")
        missing.append("suffix: arctic-inference is not installed")
    beside = {"transport": "unix"}
    plain = {PLAIN: {"enabled": False}}
    found = [
        Stack(
            {family: {"family": family, **beside} for family in cheap},
            plain | {family: {"drafter_family": family} for family in cheap},
            cores,
        )
    ]
    for name in ("eagle3", "mtp"):
        if _is_there(name, getattr(settings, name), missing):
            head = {"family": "head", "model": getattr(settings, name), "transport": "in-process"}
            modes = {name: {"drafter_family": "head"}, f"ngram + {name}": {}}
            ngram = {"family": "ngram", **beside}
            found.append(Stack({"head": head, "ngram": ngram}, modes, cores))
    if _is_there("draft", settings.draft, missing):
        model = {"family": "model", "model": settings.draft, "threads": 1, **beside}
        found.append(Stack({"model": model}, {"draft model": {}}, max(1, cores - 1)))
    wanted = [
        Stack(
            stack.drafters,
            {
                name: who
                for name, who in stack.modes.items()
                if name == PLAIN or settings.asks(name)
            },
            stack.threads,
        )
        for stack in found
    ]
    return [stack for stack in wanted if stack.modes], missing


def has_model(folder: Path) -> bool:
    """Return whether a folder has a model or a head."""
    return (folder / "config.json").is_file()


def _is_there(name: str, folder: Path, missing: list[str]) -> bool:
    if has_model(folder):
        return True
    missing.append(f"{name}: {folder} is not a model")
    return False


async def started(
    settings: TableSettings, target: Path, running: AsyncExitStack
) -> tuple[list[Mode], list[str]]:
    """Start all stacks, which run until `running` is closed, and return their decoding modes.

    Plain decoding is the first mode. Also returns a line for each missing drafter. Raises
    StackFailed or RuntimeError if a process does not start.
    """
    found: list[Mode] = []
    wanted, missing = stacks(settings)
    for stack in wanted:
        experiment = stack.experiment(target)
        in_process = in_process_drafters(experiment, target)
        serving = await running.enter_async_context(server(experiment.target, target, in_process))
        await running.enter_async_context(drafting(experiment, serving))
        endpoint = serving.endpoint
        for name, who in stack.modes.items():
            grammars: Literal["any", "needed"] = "needed" if name == "grammar" else "any"
            found.append(Mode(name, _ours(endpoint, who), grammars=grammars))
            if name != PLAIN:
                always = _ours(endpoint, {**who, "always_draft": True})
                found.append(Mode(name, always, always=True, grammars=grammars, most=1))
    return found, missing


def _ours(endpoint: Endpoint, speculation: Mapping[str, Any]) -> Ask:
    async def ask(
        requests: Sequence[Request], batch: int, temperature: float, tenant: str
    ) -> Answer:
        asked = Asked(speculation, temperature, tenant, ignore_eos=False)
        played = await play(requests, batch, endpoint, asked)
        if played.errors:
            raise RuntimeError(played.errors[0])
        drafts: defaultdict[str, float] = defaultdict(float)
        for counts in played.sample.by_kind.values():
            for name, count in counts.items():
                drafts[name] += count
        return Answer(played.sample, drafts, tuple(played.texts))

    return ask
