"""Sends each prompt in every decoding mode, in turns; writes a row for each mode of a turn."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain, cycle, islice, zip_longest
from pathlib import Path

from rich.console import Console

from outrider.gguf import pretrained
from outrider_bench import prompt_files
from outrider_bench.console import progress
from outrider_bench.experiment import machine
from outrider_bench.experiment.traffic import Encoder, Request, request_of
from outrider_bench.prompt_files import Prompt
from outrider_bench.settings import TableSettings
from outrider_bench.table import modes, peers
from outrider_bench.table.modes import MOST_TOKENS, Mode
from outrider_bench.table.peer_process import PeerDied
from outrider_bench.table.report import markdown
from outrider_bench.table.rows import Answer, Row, Turn

_ROOT = Path(__file__).parents[2]
_WARM_UP_TOKENS = 48
_UNCOUNTED = "warm-up"
FREE = "without a grammar"
BY_GRAMMAR = "by a grammar"


def prompts_of(settings: TableSettings, encoder: Encoder) -> dict[str, list[Prompt]]:
    """Return prompts of each kind: up to `settings.count`, and one more to warm up with.

    A prompt and its answer have at most `MOST_TOKENS` tokens.

    Raises ValueError that names the file and the line, or the kind with too few prompts.
    """
    found: dict[str, list[Prompt]] = {}
    for path in settings.prompts:
        for kind, prompts in prompt_files.read(path).items():
            own = found.setdefault(kind, [])
            short = (p for p in prompts if len(encoder.ids(p)) + settings.tokens <= MOST_TOKENS)
            # A data set may have more prompts than anybody wants to wait for.
            own += islice(short, settings.count + 1 - len(own))
    for kind, prompts in found.items():
        if len(prompts) < 2:
            known = f"{len(prompts)} of at most {MOST_TOKENS - settings.tokens} tokens"
            raise ValueError(f"prompts: kind {kind} has {known}; it needs 2")
    for group, prompts in mixed(found).items():
        if len(prompts) < max(settings.batches):
            known = f"there are {len(prompts)} {group}; ask more with --count"
            raise ValueError(f"batches: {max(settings.batches)} need as many prompts, but {known}")
    return found


def mixed(prompts: Mapping[str, Sequence[Prompt]]) -> dict[str, list[Prompt]]:
    """Return the prompts for batches: the kinds alternate.

    The last prompt of each kind is left out. Prompts with a grammar are a separate group, since
    some decoding modes take no grammars.
    """
    groups: dict[str, list[Prompt]] = {FREE: [], BY_GRAMMAR: []}
    counted = [kind[:-1] for kind in prompts.values()]
    for prompt in filter(None, chain.from_iterable(zip_longest(*counted))):
        groups[FREE if prompt.structured_outputs is None else BY_GRAMMAR].append(prompt)
    return {name: group for name, group in groups.items() if group}


def turns(settings: TableSettings, prompts: Mapping[str, Sequence[Prompt]]) -> Iterator[Turn]:
    """Yield all turns in order.

    A cell is a batch size and a temperature. Within a cell the kinds alternate, so that all kinds
    have some answers if time runs out in the cell.

    At batch 1, a turn is a single prompt. At larger batches, a turn has all prompts of a group:
    when an answer ends, the next prompt takes its place. If a turn were one batch, it would end
    with few answers in progress, and its slowest answer would decide how long it takes.
    """
    for number in range(settings.rounds):
        for batch in settings.batches:
            for temperature in settings.temperatures:
                if batch > 1:
                    groups = mixed(prompts)
                    yield from (Turn(number, each, batch, temperature, 0) for each in groups)
                    continue
                for place in range(settings.count):
                    for kind, own in prompts.items():
                        if place + 1 < len(own):
                            yield Turn(number, kind, batch, temperature, place)


async def run(settings: TableSettings, command: str, console: Console) -> Path:
    """Measure until all is done or the minutes are over, and return the file with the table.

    If a run is interrupted, its table has the rows measured so far. If a peer dies, only its later
    rows are missing. Raises ValueError or OutriderError for wrong settings, and StackFailed,
    OSError or RuntimeError when a process of Outrider fails or a peer does not start.
    """
    began = time.monotonic()
    target = Path(pretrained(settings.target))
    encoder = Encoder(target)
    prompts = prompts_of(settings, encoder)
    folder = settings.out / f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}"
    folder.mkdir(parents=True)
    warnings = list(machine.warnings())
    async with AsyncExitStack() as running:
        console.print("starting a stack for each kind of drafter, which takes a minute or two")
        found, missing = await modes.started(settings, target, running)
        found += await peers.started(settings, target, encoder, running)
        for line in (*warnings, *(f"left out: {each}" for each in missing)):
            console.print(line, markup=False)
        about = {
            "command": command,
            "commit": machine.commit(_ROOT),
            "machine": asdict(machine.this_machine()),
            "warnings": warnings,
            "missing": missing,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": settings.model_dump(mode="json"),
        }
        until = began + 60 * settings.minutes if settings.minutes else math.inf
        rows: list[Row] = []
        table = folder / "table.md"
        compared = Compared(found, missing)
        try:
            with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
                async for row in measured(settings, prompts, encoder, compared, until):
                    rows.append(row)
                    file.write(row.line() + "\n")
        finally:
            (folder / "run.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
            table.write_text(markdown(rows, about), encoding="utf-8")
    return table


@dataclass(slots=True)
class Compared:
    """The decoding modes that a run asks, and a line for each mode that is left out."""

    modes: list[Mode]
    missing: list[str]

    async def ask(
        self, mode: Mode, requests: Sequence[Request], batch: int, temperature: float, tenant: str
    ) -> Answer | None:
        """Send requests in a decoding mode, at most `batch` at once.

        Returns None if the mode's process has died. After a death no later turn asks the mode.
        """
        try:
            return await mode.ask(requests, batch, temperature, tenant)
        except PeerDied as error:
            self.modes.remove(mode)
            self.missing.append(f"{mode.name} from here on, since {error}")
            return None


async def measured(
    settings: TableSettings,
    prompts: Mapping[str, Sequence[Prompt]],
    encoder: Encoder,
    compared: Compared,
    until: float,
) -> AsyncIterator[Row]:
    """Yield the rows of all turns that start before `until`; the first mode of a turn rotates."""
    todo = list(turns(settings, prompts))
    every = chain.from_iterable(prompts.values())
    await _compile(compared, every, encoder, settings.temperatures[0])
    warm: set[tuple[int, float]] = set()
    with progress() as bar:
        task = bar.add_task("turns", total=len(todo))
        for number, turn in enumerate(todo):
            if time.monotonic() > until:
                return
            bar.update(task, description=f"{turn.kind}, batch {turn.batch}")
            cell = turn.batch, turn.temperature
            if cell not in warm:
                warm.add(cell)
                await _warm_up(compared, cell, [kept for *_, kept in prompts.values()], encoder)
            asked = _requests(turn, prompts, encoder, settings.tokens)
            first = number % len(compared.modes)
            for mode in (*compared.modes[first:], *compared.modes[:first]):
                if not mode.takes(asked, turn.batch) or (mode.always and turn.round):
                    continue
                tenant = _tenant(mode, turn)
                answer = await compared.ask(mode, asked, turn.batch, turn.temperature, tenant)
                if answer is not None:
                    yield Row.of(turn, mode.name, answer, always=mode.always)
            bar.advance(task)


def _requests(
    turn: Turn, prompts: Mapping[str, Sequence[Prompt]], encoder: Encoder, tokens: int
) -> list[Request]:
    """Return the turn's requests, which are the same for all modes, seeds included."""
    asked = mixed(prompts)[turn.kind] if turn.batch > 1 else [prompts[turn.kind][turn.number]]
    return [
        request_of(prompt, encoder, tokens, 1000 * turn.round + turn.number + place)
        for place, prompt in enumerate(asked)
    ]


def _tenant(mode: Mode, turn: Turn) -> str:
    """Return a tenant's name under which no n-grams of the turn's prompts are known."""
    words = mode.name, mode.always, turn.round, turn.batch, turn.temperature
    return hashlib.sha256(repr(words).encode()).hexdigest()


async def _compile(
    compared: Compared, prompts: Iterable[Prompt], encoder: Encoder, temperature: float
) -> None:
    """Make every process compile each grammar beforehand: compiling takes as long as many steps."""
    distinct = {json.dumps(each.structured_outputs): each for each in prompts}
    for prompt in distinct.values():
        request = request_of(prompt, encoder, 2, 0)
        for mode in tuple(compared.modes):
            if request.grammar is not None and mode.takes([request], 1) and not mode.always:
                await compared.ask(mode, [request], 1, temperature, _UNCOUNTED)


async def _warm_up(
    compared: Compared, cell: tuple[int, float], prompts: Sequence[Prompt], encoder: Encoder
) -> None:
    """Get uncounted answers in each decoding mode, so that its process learns steps' costs."""
    batch, temperature = cell
    requests = [request_of(prompt, encoder, _WARM_UP_TOKENS, 0) for prompt in prompts]
    for mode in tuple(compared.modes):
        able = [request for request in requests if mode.takes([request], batch)]
        if able and not mode.always:
            some = list(islice(cycle(able), batch))
            await compared.ask(mode, some, batch, temperature, _UNCOUNTED)
