"""Play traffic files at a running gateway, and print how long the answers of each kind took.

    python bench/traffic/play.py --port 8000 bench/traffic/alone.jsonl bench/traffic/burst.jsonl

The simulator plays the same files (tests/simulator/test_tenants_in_simulation.py). A tenant is a
bearer token, so the gateway must run without keys. Each kind of request has a client process of its
own, because a flood would also delay small requests within a shared client.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import NamedTuple

from outrider_bench.raw_client import asks, stream
from outrider_bench.simulator.recorded import RecordedRequest, read_recording

# Ids that every vocabulary has, and none that is special.
IDS = range(300, 1000)
# Time for the client processes to start before the first request (seconds).
START_S = 3.0


class Timed(NamedTuple):
    """Seconds from a request's sending to its first token and to its end."""

    first_s: float
    whole_s: float


def body(request: RecordedRequest, draw: Random) -> dict[str, object]:
    """The body of `POST /v1/completions`, with a random prompt."""
    return {
        "prompt": draw.choices(IDS, k=request.prompt_tokens),
        "max_tokens": request.output_tokens,
        "n": request.choices,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }


async def ask(request: RecordedRequest, port: int, start: float, draw: Random) -> Timed | None:
    """Send a request at its time. None if its client never reads the answer, or it failed."""
    content = body(request, draw)
    headers = {"Authorization": f"Bearer {request.tenant}"}
    await asyncio.sleep(start + request.time - time.time())
    if not request.reads:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(asks(content, headers))
        await asyncio.Event().wait()
    sent = time.perf_counter()
    first_s = 0.0
    try:
        async for block in stream(port, content, headers):
            if not first_s and b"data: " in block:
                first_s = time.perf_counter() - sent
    except RuntimeError as error:
        print(f"{request.tenant}: {error}")
        return None
    return Timed(first_s, time.perf_counter() - sent)


def play(requests: Sequence[RecordedRequest], port: int, start: float) -> list[Timed]:
    """Play requests of one kind from `start` on (seconds of the epoch)."""

    async def all_of_them() -> list[Timed]:
        draw = Random(0)
        asked = [ask(request, port, start, draw) for request in requests]
        return [timed for timed in await asyncio.gather(*asked) if timed is not None]

    return asyncio.run(all_of_them())


def summary(seconds: Sequence[float]) -> str:
    """The median, the 99th percentile and the largest, in milliseconds."""
    ordered = sorted(seconds)
    shares = (0.5, 0.99, 1.0)
    found = [ordered[round(share * (len(ordered) - 1))] for share in shares]
    return "  ".join(f"{1000 * each:6.0f}" for each in found)


def measure(path: Path, port: int, kind: str) -> None:
    """Play a file, and print the times of the requests of `kind` when they have ended."""
    requests = list(read_recording(path))
    start = time.time() + START_S
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawning) as clients:
        timed = clients.submit(play, [each for each in requests if each.kind == kind], port, start)
        clients.submit(play, [each for each in requests if each.kind != kind], port, start)
        found = timed.result()
        # A client that reads nothing would wait for ever.
        for process in multiprocessing.active_children():
            process.terminate()
    first, whole = (summary([each[i] for each in found]) for i in range(2))
    print(f"{path.stem:10} {len(found):5}  first {first}  whole {whole}", flush=True)


def main() -> None:
    """Play each file in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--kind", default="small", help="The kind of request to time.")
    given = parser.parse_args()
    print("file       count  ms: median, p99, largest")
    for path in given.files:
        measure(path, given.port, given.kind)


if __name__ == "__main__":
    main()
