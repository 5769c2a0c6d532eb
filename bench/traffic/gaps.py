"""Measure the gaps between the chunks of small streams beside another tenant's flood.

    python bench/traffic/gaps.py --port 8000

The floods are requests whose grammar makes masks expensive (from the 17th token on, each takes a
quarter of a second of a core), and plain sequences for comparison. If gaps beside the
expensive masks are longer than gaps beside plain sequences, the masks delay other tenants. As in
play.py, a tenant is a bearer token, and the flood has a client process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

from play import START_S, summary, wait_ready

from outrider_bench.raw_client import FailedAnswer, stream

SECONDS = 12.0
"""How long the small streams go on beside a flood."""
ALONE_S = 1.0
"""How long they go on before it."""
# The parser keeps every way to read the text so far. A request with this grammar has 94 bytes.
BOMB = "root ::= s\ns ::= s s | s s s | [a-z] | [a-z] [a-z]"


class Flood(NamedTuple):
    """Equal requests that begin at one moment."""

    kind: str
    size: int


FLOODS = (
    Flood("alone", 0),
    Flood("bomb", 1),
    Flood("bomb", 64),
    Flood("plain", 64),
    Flood("bomb", 64),
)


def small(number: int) -> dict[str, object]:
    """The body of a small tenant's request."""
    return {**plain(300 + number % 50), "max_tokens": 50, "temperature": 0.0}


def plain(first: int) -> dict[str, object]:
    """The body of a request whose prompt begins with a token of its own."""
    prompt = [first, 401, 402, 403]
    return {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True}


def bomb() -> dict[str, object]:
    """The body of a request whose masks are expensive."""
    grammar = {"grammar": BOMB}
    return {"prompt": "a", "max_tokens": 60, "structured_outputs": grammar, "stream": True}


def ask(port: int, body: dict[str, object], tenant: str) -> AsyncIterator[bytes]:
    """The blocks of an answer as they arrive."""
    return stream(port, body, {"Authorization": f"Bearer {tenant}"})


def play(flood: Flood, port: int, start: float) -> None:
    """Send a flood at `start` (seconds of the epoch), and print how its requests ended."""

    async def one(number: int) -> str:
        await asyncio.sleep(max(0.0, start - time.time()))
        try:
            body = bomb() if flood.kind == "bomb" else plain(400 + number)
            async for _ in ask(port, body, "flood"):
                pass
        except FailedAnswer as error:
            return error.code
        return "complete"

    async def all_of_them() -> Counter[str]:
        return Counter(await asyncio.gather(*map(one, range(flood.size))))

    ends = asyncio.run(all_of_them())
    print(f"  flood over after {time.time() - start:.1f} s: {dict(ends)}", flush=True)


async def gaps_until(port: int, start: float, end: float) -> list[float]:
    """Ask for one small stream after the other; the gaps that ended from `start` on (seconds)."""
    gaps = []
    number = 0
    while time.time() < end:
        number += 1
        last: float | None = None
        async for _ in ask(port, small(number), "small"):
            now = time.perf_counter()
            if last is not None and time.time() >= start:
                gaps.append(now - last)
            last = now
    return gaps


def measure(flood: Flood, port: int) -> None:
    """Print the gaps beside a flood."""
    start = time.time() + START_S
    spawning = multiprocessing.get_context("spawn")
    client = spawning.Process(target=play, args=(flood, port, start))
    client.start()
    time.sleep(START_S - ALONE_S)
    gaps = asyncio.run(gaps_until(port, start, start + SECONDS))
    client.join(2 * SECONDS)
    if client.is_alive():
        client.terminate()
    print(f"{flood.kind:5} {flood.size:3} {len(gaps):6}  {summary(gaps)}", flush=True)


def main() -> None:
    """Measure each flood in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    port = parser.parse_args().port
    wait_ready(port)
    print("flood       gaps  ms: median, p99, largest")
    for flood in FLOODS:
        measure(flood, port)


if __name__ == "__main__":
    main()
