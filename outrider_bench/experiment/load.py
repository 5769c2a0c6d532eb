"""Sends a workload's requests to gateways and times the answers.

Answers are kept as bytes and parsed after the measurement, so that parsing takes no time from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider_bench.experiment.launches import Endpoint
from outrider_bench.experiment.traffic import Request
from outrider_bench.raw_client import stream
from outrider_bench.sample import Sample, counters


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings that all requests of a measurement share."""

    speculation: Mapping[str, Any]
    temperature: float
    tenant: str
    """Drafters keep the n-grams of different tenants apart."""
    ignore_eos: bool = True
    """True if answers continue after an end token, to the length that the request states."""


@dataclass(slots=True)
class _Answer:
    """One request's answer: its blocks of bytes with their times of arrival."""

    started: float
    blocks: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""


@dataclass(slots=True)
class Played:
    """One verifier's answers."""

    sample: Sample
    texts: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def play(requests: Sequence[Request], batch: int, endpoint: Endpoint, asked: Asked) -> Played:
    """Send requests to a verifier, and keep `batch` of them in progress.

    A request that fails adds an error to the result, and raises no exception.
    """
    before = await counters(endpoint.metrics_port)
    started = time.perf_counter()
    answers, full_s = await _ask_all(requests, batch, endpoint, asked)
    seconds = time.perf_counter() - started
    after = await counters(endpoint.metrics_port)
    sample = Sample(0, seconds, full_s=full_s)
    sample.counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
    played = Played(sample)
    for request, answer in zip(requests, answers, strict=True):
        _read(request, answer, started, played, may_end=not asked.ignore_eos)
    return played


async def _ask_all(
    requests: Sequence[Request], batch: int, endpoint: Endpoint, asked: Asked
) -> tuple[list[_Answer], float]:
    """Send all requests; return the answers, and for how many seconds the batch was full."""
    answers: dict[int, _Answer] = {}
    waiting = iter(enumerate(requests))
    ended: list[float] = []
    started = time.perf_counter()

    async def worker() -> None:
        """Send one request after the other, until none waits."""
        for i, request in waiting:
            answers[i] = await _ask(request, endpoint, asked)
        ended.append(time.perf_counter() - started)

    await asyncio.gather(*(worker() for _ in range(batch)))
    return [answers[i] for i in range(len(requests))], ended[0]


async def _ask(request: Request, endpoint: Endpoint, asked: Asked) -> _Answer:
    body = {
        "model": endpoint.model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": asked.temperature,
        "speculation": {**asked.speculation, "metrics": True},
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": asked.ignore_eos,
        **({} if request.seed is None else {"seed": request.seed}),
    }
    if request.grammar is not None:
        body["structured_outputs"] = request.grammar
    answer = _Answer(time.perf_counter())
    headers = {"Authorization": f"Bearer {asked.tenant}"}
    try:
        async for block in stream(endpoint.http_port, body, headers):
            answer.blocks.append((time.perf_counter(), block))
    except (RuntimeError, OSError) as error:
        answer.error = f"{endpoint.name}: {error}"
    return answer


def _read(
    request: Request, answer: _Answer, started: float, played: Played, *, may_end: bool = False
) -> None:
    """Add an answer to `played`; `started` is the time when the first request was sent.

    An answer that ends early is an error, unless its request has a grammar or `may_end` is True.
    """
    if answer.error:
        played.errors.append(answer.error)
        return
    text = ""
    count = 0
    first = last = 0.0
    drafts: dict[str, Any] | None = None
    for at, event in _events(answer.blocks):
        text += "".join(choice.get("text", "") for choice in event.get("choices", ()))
        drafts = (event.get("metrics") or {}).get("speculative_decoding") or drafts
        now = (event.get("usage") or {}).get("completion_tokens", count)
        if now > count:
            first = first or at
            last = at
            count = now
    played.texts.append(text)
    may_end = may_end or request.grammar is not None
    if count != request.output_tokens and not (may_end and 0 < count < request.output_tokens):
        played.errors.append(f"an answer has {count} tokens, not {request.output_tokens}")
    if count == 0:
        return
    sample = played.sample
    sample.tokens += count
    sample.ttft.append(first - answer.started)
    sample.tpot.append((last - first) / max(count - 1, 1))
    sample.requests.append((first - started, last - started, count))
    if drafts is not None and drafts["num_spec_steps"]:
        histogram = drafts["acceptance_histogram"]
        sample.count_drafts(request.kind, drafts["num_draft_tokens"], histogram)


def _events(blocks: Sequence[tuple[float, bytes]]) -> list[tuple[float, dict[str, Any]]]:
    """Return the stream's JSON events, each with the time of its last byte."""
    found = []
    rest = b""
    for at, block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data: ")
            if data != line.strip() and data != b"[DONE]":
                found.append((at, json.loads(data)))
    return found


def digest(played: Played) -> str:
    """Return the SHA-256 of all texts in order."""
    return hashlib.sha256(json.dumps(played.texts).encode()).hexdigest()
