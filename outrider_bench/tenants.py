"""Plays recorded traffic of several tenants at a running gateway, and times the answers by kind.

The simulator plays the same file: `outrider simulate --arrivals recorded --recording FILE`. Tenants
are told apart by their bearer tokens, so the gateway must run without keys.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from outrider_bench.raw_client import asks
from outrider_bench.simulator.traffic import RecordedRequest, read_recording

# Ids that every vocabulary has, and no special ones.
_IDS = range(300, 1000)
_SHARES = (0.5, 0.99, 1.0)


@dataclass(slots=True)
class Timed:
    """One request's times, in seconds since it was sent; an error has a text."""

    kind: str
    first_s: float = 0.0
    whole_s: float = 0.0
    error: str = ""


async def play(
    recorded: Sequence[RecordedRequest], port: int, model: str, kind: str
) -> list[Timed]:
    """Send each request at its time; returns the times of those of this kind, "" for any.

    When they have ended, the other requests are cancelled.
    """
    began = time.perf_counter()
    draw = Random(0)
    asked: list[asyncio.Task[Timed]] = []
    others: list[asyncio.Task[Timed] | asyncio.Task[None]] = []
    for request in recorded:
        body = _body(request, model, draw)
        headers = {"Authorization": f"Bearer {request.tenant}"}
        at = began + request.time
        if not request.reads:
            others.append(asyncio.create_task(_ignore(body, headers, port, at)))
            continue
        asking = asyncio.create_task(_ask(request, body, headers, port, at))
        (asked if kind in ("", request.kind) else others).append(asking)
    timed = await asyncio.gather(*asked)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return timed


def _body(request: RecordedRequest, model: str, draw: Random) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": draw.choices(_IDS, k=request.prompt_tokens),
        "max_tokens": request.output_tokens,
        "n": request.choices,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }


async def _ask(
    request: RecordedRequest,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    port: int,
    at: float,
) -> Timed:
    """Send a request, and time its answer from when it is written to the connection."""
    await asyncio.sleep(at - time.perf_counter())
    timed = Timed(request.kind)
    sent = asks(body, headers)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    started = time.perf_counter()
    last = b""
    while block := await reader.read(65_536):
        if not timed.first_s and b"data: " in block:
            timed.first_s = time.perf_counter() - started
        last = last[-500:] + block
    timed.whole_s = time.perf_counter() - started
    if b"[DONE]" not in last or b'data: {"error"' in last:
        timed.error = last.decode(errors="replace")
    writer.close()
    return timed


async def _ignore(
    body: Mapping[str, Any], headers: Mapping[str, str], port: int, at: float
) -> None:
    """Send a request, and never read its answer."""
    await asyncio.sleep(at - time.perf_counter())
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(asks(body, headers))
        await asyncio.Event().wait()
    finally:
        with suppress(OSError):
            writer.close()


def summary(timed: Sequence[Timed]) -> dict[str, dict[str, Any]]:
    """Percentiles of the seconds to the first token and to the end, by kind."""
    found: dict[str, dict[str, Any]] = {}
    for kind in sorted({each.kind for each in timed}):
        own = [each for each in timed if each.kind == kind]
        good = [each for each in own if not each.error]
        found[kind] = {
            "requests": len(own),
            "errors": len(own) - len(good),
            "first_s": _percentiles([each.first_s for each in good]),
            "whole_s": _percentiles([each.whole_s for each in good]),
            "refused_s": _percentiles([each.whole_s for each in own if each.error]),
        }
    return found


def _percentiles(seconds: list[float]) -> list[float]:
    """The shares of `_SHARES`; nothing of nothing."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return [ordered[round(share * last)] for share in _SHARES] if ordered else []


def main() -> None:
    """Play a recording, and print the seconds of its answers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="models/target")
    parser.add_argument("--kind", default="", help="Time only requests of this kind.")
    given = parser.parse_args()
    recorded = list(read_recording(given.recording))
    timed = uvloop.run(play(recorded, given.port, given.model, given.kind))
    print(given.recording.stem, json.dumps(summary(timed)), flush=True)


if __name__ == "__main__":
    main()
