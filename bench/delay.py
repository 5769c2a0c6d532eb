"""`outrider bench --only delay`: what a long way between drafter and verifier costs.

The way is made long by a proxy that holds back every byte of the draft stream, in both directions; half of the delay each, so that
it is what a round trip takes longer.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.report import LOOKUPS, spread
from bench.ways import Measure, Pair, Sample, Task, outrider_stack
from outrider.launch.prompts import KINDS
from outrider.launch.stack import free_port
from outrider.tokenizer import load_tokenizer

DELAYS_MS = (0, 1, 5, 20, 50)
_CHUNK = 65_536


class Proxy:
    """Forwards TCP connections to `port`, each byte `delay_s` / 2 later than it came; `bytes_per_s` bounds the rate, 0 does not."""

    def __init__(self, port: int, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        self.port = port
        self.delay_s = delay_s
        self.bytes_per_s = bytes_per_s
        self.byte_count = 0

    @asynccontextmanager
    async def listen(self, port: int) -> AsyncIterator[None]:
        """Serve on the loopback interface."""
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except ConnectionRefusedError:
            writer.close()  # the verifier is not there yet, which is what its drafters should see
            return
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Bytes keep their order, and wait in a queue while others are under way."""
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                at, data = await due.get()
                await asyncio.sleep(max(at - loop.time(), 0.0))
                sink.write(data)
                await sink.drain()
                if not data:
                    return

        delivery = asyncio.create_task(deliver())
        free_at = 0.0
        try:
            while data := await source.read(_CHUNK):
                self.byte_count += len(data)
                free_at = max(free_at, loop.time()) + (
                    len(data) / self.bytes_per_s if self.bytes_per_s else 0.0
                )
                due.put_nowait((free_at + self.delay_s / 2, data))
        except (ConnectionError, OSError):
            sink.close()
        finally:
            delivery.cancel()
            sink.close()


async def measure(
    pair: Pair, rounds: int, tokens: int, console: Console
) -> tuple[dict[str, Any], bytes]:
    """tokens/s by drafter and delay, printed and plotted: at batch 1, over prompts that rewrite a text, which drafts well."""
    tokenizer = load_tokenizer(str(pair.target))
    prompts = [tokenizer.encode(prompt).ids for _, prompt in KINDS["rewriting"]]
    task, short = Task(prompts, 1, tokens, 0.0), Task(prompts, 1, 8, 0.0)
    rates: dict[str, dict[int, list[float]]] = {}
    accepted: dict[str, list[tuple[float, float]]] = {}
    async with AsyncExitStack() as stack:
        way, proxy = await stack.enter_async_context(delayed_stack(pair))
        ways: dict[str, Measure] = {
            "plain": way({"enabled": False}),
            "ngram": way({"drafter": "ngram"}),
            "model": way({"drafter": "model"}),
        }
        for round_number in range(1 + rounds):
            # There and back again, so that a machine that gets slower or faster meets all alike.
            for delay_ms in DELAYS_MS[:: -1 if round_number % 2 == 0 else 1]:
                proxy.delay_s = delay_ms / 1000
                for name, run in ways.items():
                    await run(short)
                    sample = await run(task)
                    if round_number:
                        rates.setdefault(name, {}).setdefault(delay_ms, []).append(
                            sample.tokens_per_s
                        )
                        if lookups := _lookups(sample):
                            accepted.setdefault(f"{name} at {delay_ms} ms", []).append(lookups)
    console.print(_table(pair, rates, accepted, rounds))
    record = {"tokens_per_s": rates, "acceptance and hits": accepted}
    return record, _plot(pair, rates)


def _lookups(sample: Sample) -> tuple[float, float] | None:
    """Chance that a draft token stands when those before it do, and of finding the next draft there; None without drafts."""
    counts = sample.counters
    if not counts.get("spec_decode_num_drafts"):
        return None
    accepted, drafts = counts["spec_decode_num_accepted_tokens"], counts["spec_decode_num_drafts"]
    found = [counts.get(f"draft_lookups.{result}", 0.0) for result in LOOKUPS]
    # At most one token of a draft is judged and falls, so this is a lower bound.
    fallen = min(drafts, counts["spec_decode_num_draft_tokens"] - accepted)
    return accepted / (accepted + fallen), (found[0] + found[1]) / max(sum(found), 1.0)


@asynccontextmanager
async def delayed_stack(pair: Pair) -> AsyncIterator[tuple[Any, Proxy]]:
    """A stack whose drafters dial the proxy instead of the verifier."""
    verifier, front = free_port("127.0.0.1"), free_port("127.0.0.1")
    proxy = Proxy(verifier)
    dial = f"verifier=127.0.0.1:{front},uds=/nonexistent"
    drafters = [f"ngram,{dial}", f"model={pair.draft},{dial}"]
    async with (
        proxy.listen(front),
        outrider_stack(pair, drafters, pair.shared_threads, verifier_port=verifier) as way,
    ):
        yield way, proxy


def _table(
    pair: Pair,
    rates: dict[str, dict[int, list[float]]],
    accepted: dict[str, list[tuple[float, float]]],
    rounds: int,
) -> Table:
    table = Table(
        title=f"{pair.name}: tokens/s by delay of the draft stream's round trip, batch 1, median of {rounds} rounds (range); "
        "ratios are of the same round"
    )
    for name in (
        "drafter",
        "delay, ms",
        "tokens/s",
        "× no delay",
        "× plain",
        "acceptance",
        "next draft there",
    ):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for name, by_delay in rates.items():
        for delay_ms in DELAYS_MS:
            values, plain = by_delay[delay_ms], rates["plain"][delay_ms]
            share = accepted.get(f"{name} at {delay_ms} ms")
            table.add_row(
                name,
                str(delay_ms),
                spread(values, 1),
                spread([ours / its for ours, its in zip(values, by_delay[0], strict=True)], 2),
                spread([ours / its for ours, its in zip(values, plain, strict=True)], 2),
                *(
                    [f"{median(column):.2f}" for column in zip(*share, strict=True)]
                    if share
                    else ("–", "–")
                ),
            )
    return table


def _plot(pair: Pair, rates: dict[str, dict[int, list[float]]]) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, by_delay in rates.items():
        axes.plot(
            DELAYS_MS,
            [median(by_delay[delay_ms]) for delay_ms in DELAYS_MS],
            marker="o",
            label=name,
        )
    axes.set(title=pair.name, xlabel="delay of a round trip, ms", ylabel="tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format="png")
    pyplot.close(figure)
    return buffer.getvalue()
