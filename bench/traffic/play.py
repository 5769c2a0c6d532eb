"""Play traffic files at a running gateway, and print how long the answers of a kind took.

    python bench/traffic/play.py --port 8000 bench/traffic/alone.jsonl bench/traffic/burst.jsonl
    python bench/traffic/play.py --kind burst bench/traffic/2000-at-once.jsonl

The simulator plays the same files (tests/simulator/test_tenants_in_simulation.py). A tenant is a
bearer token, so the gateway must run without keys. Each kind of request has a client process of its
own, because a flood would also delay small requests within a shared client.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx

from outrider_bench.raw_client import FailedAnswer, asks, stream
from outrider_bench.simulator.recorded import RecordedRequest, read_recording

# Ids that every vocabulary has, without special tokens.
IDS = range(300, 1000)
# Time for the client processes to start before the first request (seconds).
START_S = 3.0
# How long a gateway may take until it is ready (seconds).
READY_S = 60.0


class Timed(NamedTuple):
    """Seconds from a request's sending to its first token and to its end."""

    first_s: float
    whole_s: float


class Failed(NamedTuple):
    """A request that failed: the error's code, and the seconds from its sending to the error."""

    code: str
    after_s: float


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


async def ask(request: RecordedRequest, port: int, start: float, draw: Random) -> Timed | Failed:
    """Send a request at its time. If its client does not read the answer, this never returns."""
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
    except FailedAnswer as error:
        return Failed(error.code, time.perf_counter() - sent)
    return Timed(first_s, time.perf_counter() - sent)


def play(requests: Sequence[RecordedRequest], port: int, start: float) -> list[Timed | Failed]:
    """Play requests of one kind from `start` on (seconds of the epoch)."""

    async def all_of_them() -> list[Timed | Failed]:
        draw = Random(0)
        return await asyncio.gather(*[ask(request, port, start, draw) for request in requests])

    return asyncio.run(all_of_them())


def summary(seconds: Sequence[float]) -> str:
    """Return the median, the 99th percentile and the largest, in milliseconds."""
    if not seconds:
        return "none"
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
        others = clients.submit(play, [each for each in requests if each.kind != kind], port, start)
        found = timed.result()
        beside = others.result() if others.done() else []
        # A client that reads nothing would wait for ever.
        for process in multiprocessing.active_children():
            process.terminate()
    answers = [each for each in found if isinstance(each, Timed)]
    first, whole = (summary([each[i] for each in answers]) for i in range(2))
    print(f"{path.stem:12} {len(answers):5}  first {first}  whole {whole}", flush=True)
    failures: defaultdict[str, list[float]] = defaultdict(list)
    for each in [*found, *beside]:
        if isinstance(each, Failed):
            failures[each.code].append(each.after_s)
    for code, after_s in failures.items():
        print(f"{code:12} {len(after_s):5}  failed after {summary(after_s)}", flush=True)


def wait_ready(port: int) -> None:
    """Wait until the gateway is ready. Raises SystemExit if this takes longer than READY_S."""
    url = f"http://127.0.0.1:{port}/readyz"
    until = time.monotonic() + READY_S
    while True:
        try:
            said = f"status {httpx.get(url).status_code}"
        except httpx.TransportError as error:
            said = str(error)
        if said == "status 200":
            return
        if time.monotonic() > until:
            raise SystemExit(f"{url} is not ready after {READY_S:g} s: {said}")
        time.sleep(0.2)


def main() -> None:
    """Play each file in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--kind", default="small", help="The kind of request to time.")
    given = parser.parse_args()
    wait_ready(given.port)
    print("file         count  ms: median, p99, largest")
    for path in given.files:
        measure(path, given.port, given.kind)


if __name__ == "__main__":
    main()
