"""`outrider bench --only delay`: the cost of a long way between drafter and verifier.

A shaped link holds back every byte of the draft stream. Half of the delay is added in each
direction, so that a round trip takes `delay` longer.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.launch.prompts import KINDS
from outrider.process.ports import free_port
from outrider.tokenizer import load_tokenizer
from outrider_bench.console import table_of
from outrider_bench.experiment.links import ShapedLink
from outrider_bench.experiment.spec import Link
from outrider_bench.report import LOOKUPS, spread
from outrider_bench.rounds import there_and_back
from outrider_bench.ways import Measure, Pair, Sample, Task, outrider_stack

DELAYS_MS = (0, 1, 5, 20, 50)


async def measure(
    pair: Pair, rounds: int, tokens: int, console: Console
) -> tuple[dict[str, Any], bytes]:
    """Print and plot tokens/s by drafter and delay; returns the record and the plot as PNG.

    The batch is 1. The prompts rewrite a text, which is easy to draft.
    """
    tokenizer = load_tokenizer(str(pair.target))
    prompts = [tokenizer.encode(prompt).ids for _, prompt in KINDS["rewriting"]]
    task = Task(prompts, 1, tokens, 0.0)
    short = Task(prompts, 1, 8, 0.0)
    rates: dict[str, dict[int, list[float]]] = {}
    accepted: dict[str, list[tuple[float, float]]] = {}
    async with AsyncExitStack() as stack:
        way, link = await stack.enter_async_context(delayed_stack(pair))
        ways: dict[str, Measure] = {
            "plain": way({"enabled": False}),
            "ngram": way({"drafter_family": "ngram"}),
            "model": way({"drafter_family": "model"}),
        }
        for round_number in range(1 + rounds):
            for delay_ms in there_and_back(DELAYS_MS, round_number - 1):
                link.change(Link.model_validate({"round_trip_ms": delay_ms}))
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
    """Two shares, or None without drafts.

    The first is the chance that a draft token is accepted if those before it are. The second is the
    chance that a commit finds the next draft in the trie.
    """
    counts = sample.counters
    if not counts.get("spec_decode_num_drafts"):
        return None
    accepted = counts["spec_decode_num_accepted_tokens"]
    drafts = counts["spec_decode_num_drafts"]
    found = [counts.get(f"draft_lookups.{result}", 0.0) for result in LOOKUPS]
    # At most one token of a draft is judged and falls, so this is a lower bound.
    fallen = min(drafts, counts["spec_decode_num_draft_tokens"] - accepted)
    return accepted / (accepted + fallen), (found[0] + found[1]) / max(sum(found), 1.0)


@asynccontextmanager
async def delayed_stack(pair: Pair) -> AsyncIterator[tuple[Any, ShapedLink]]:
    """Start a stack whose drafters reach the verifier over the yielded link."""
    verifier = free_port("127.0.0.1")
    front = free_port("127.0.0.1")
    link = ShapedLink(Link.model_validate({}))
    dial = f"verifier=127.0.0.1:{front},uds=/nonexistent"
    drafters = [f"ngram,{dial}", f"model={pair.draft},{dial}"]
    async with (
        link.forward(("127.0.0.1", front), ("127.0.0.1", verifier)),
        outrider_stack(pair, drafters, pair.shared_threads, verifier_port=verifier) as way,
    ):
        yield way, link


def _table(
    pair: Pair,
    rates: dict[str, dict[int, list[float]]],
    accepted: dict[str, list[tuple[float, float]]],
    rounds: int,
) -> Table:
    how = f"batch 1, median of {rounds} rounds (range); ratios are of the same round"
    table = table_of(
        f"{pair.name}: tokens/s by delay of the draft stream's round trip, {how}",
        (
            "drafter",
            "delay, ms",
            "tokens/s",
            "× no delay",
            "× plain",
            "acceptance",
            "next draft there",
        ),
    )
    for name, by_delay in rates.items():
        for delay_ms in DELAYS_MS:
            values = by_delay[delay_ms]
            plain = rates["plain"][delay_ms]
            shares = ["–", "–"]
            if lookups := accepted.get(f"{name} at {delay_ms} ms"):
                shares = [f"{median(column):.2f}" for column in zip(*lookups, strict=True)]
            table.add_row(
                name,
                str(delay_ms),
                spread(values, 1),
                spread([ours / its for ours, its in zip(values, by_delay[0], strict=True)], 2),
                spread([ours / its for ours, its in zip(values, plain, strict=True)], 2),
                *shares,
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
