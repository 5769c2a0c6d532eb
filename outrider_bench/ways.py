"""The ways of decoding that `outrider bench` compares, each behind one call.

transformers and vLLM run in processes of their own. Outrider's whole stack is called through its
gateway's HTTP API.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from outrider.launch.client import until_ready
from outrider.launch.serve_settings import ServeSettings
from outrider.launch.stack import plan_stack
from outrider.launch.supervisor import StartFailed, Supervisor
from outrider.process.ports import free_port
from outrider_bench.raw_client import stream


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts to decode, `batch` at once, `max_tokens` each; ends of text are ignored.

    If `varied`, requests have half to one and a half times as many tokens, with `max_tokens` as
    their mean, and so end at different times, as those of users do. Ways that cannot do that give
    each request the mean.
    """

    prompts: list[list[int]]
    batch: int
    max_tokens: int
    temperature: float
    varied: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt, spread evenly by the golden ratio."""
        count = len(self.prompts)
        if not self.varied:
            return [self.max_tokens] * count
        shares = [0.5 + (i * 0.618034) % 1.0 for i in range(count)]
        return [round(self.max_tokens * share) for share in shares]


@dataclass(slots=True)
class Sample:
    """The measurements of one task. Times are in seconds.

    `ttft` and `tpot` have one entry a request if they are known. `counters` are the growth of the
    verifier's metrics, by metric and labels. `requests`, if known, are the times of a request's
    first and last token and its number of tokens. The batch was full until `full_s`.
    """

    tokens: int
    seconds: float
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    requests: list[tuple[float, float, int]] = field(default_factory=list)
    full_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the seconds from the first request to the last answer."""
        return self.tokens / self.seconds

    @property
    def full_tokens_per_s(self) -> float | None:
        """Tokens/s while the batch was full, or None if unknown.

        Assumes that the tokens of a request arrive evenly.
        """
        if not self.requests or self.full_s <= 0.0:
            return None
        return sum(_tokens_by(self.full_s, *request) for request in self.requests) / self.full_s


def _tokens_by(at: float, first: float, last: float, count: int) -> float:
    if at < first:
        return 0.0
    if at >= last:
        return count
    return 1 + (count - 1) * (at - first) / (last - first)


Measure = Callable[[Task], Awaitable[Sample]]
MakeWay = Callable[..., Measure]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft model.

    Peers verify `draft_tokens` in a step; Outrider chooses its own number. `shared_threads` are the
    verifier's threads when a draft model runs on the same cores.
    """

    name: str
    target: Path
    draft: Path
    dtype: str
    draft_tokens: int
    shared_threads: int


@asynccontextmanager
async def line_peer(*command: str) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[Sample]]]:
    """Start a process that answers each JSON line with one.

    The call raises RuntimeError with the end of the process's standard error if the process dies.
    """
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, stderr=errors)
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the peer has no pipes")
        send = process.stdin
        receive = process.stdout

        async def ask(task: dict[str, Any]) -> Sample:
            """Send a task as a line; raises RuntimeError with the peer's last words if it died."""
            send.write(json.dumps(task).encode() + b"\n")
            answer = await receive.readline()
            if not answer:
                errors.seek(0)
                last_words = errors.read()[-2000:].decode(errors="replace")
                raise RuntimeError(f"{' '.join(command[:3])} died: {last_words}")
            return Sample(**json.loads(answer))

        try:
            yield ask
        finally:
            with suppress(ProcessLookupError):  # it may have died by itself
                process.kill()
            # Unlike `wait`, this reads the remaining output, which closes the pipes.
            await process.communicate()


@asynccontextmanager
async def transformers_ways(pair: Pair) -> AsyncIterator[dict[str, Measure]]:
    """Start transformers with all cores. Its speculation takes one sequence at a time."""
    arguments = [
        str(pair.target),
        str(pair.draft),
        "--dtype",
        pair.dtype,
        "--draft-tokens",
        str(pair.draft_tokens),
    ]
    async with line_peer(sys.executable, "-m", "outrider_bench.peers", *arguments) as ask:

        def way(name: str) -> Measure:
            return lambda task: ask({"way": name, **_fields(task)})

        yield {
            "transformers": way("plain"),
            "transformers, prompt lookup": way("prompt_lookup"),
            "transformers, assisted": way("assisted"),
        }


@asynccontextmanager
async def vllm_way(
    pair: Pair, python: Path, max_sequences: int, speculative: dict[str, Any] | None
) -> AsyncIterator[Measure]:
    """vLLM in the virtual environment that `python` belongs to."""
    arguments = [str(pair.target), "--dtype", pair.dtype, "--max-sequences", str(max_sequences)]
    if speculative:
        arguments += ["--speculative", json.dumps(speculative)]
    async with line_peer(
        str(python), str(Path(__file__).with_name("vllm_peer.py")), *arguments
    ) as ask:
        yield lambda task: ask(_fields(task))


def _fields(task: Task) -> dict[str, Any]:
    return {
        "prompts": task.prompts,
        "batch": task.batch,
        "max_tokens": task.max_tokens,
        "lengths": task.lengths,
        "temperature": task.temperature,
    }


def operator_tls(certs: Path | None) -> ssl.SSLContext | None:
    """TLS of an operator with a folder that `outrider certs` made; None without a folder."""
    if certs is None:
        return None
    context = ssl.create_default_context(cafile=certs / "ca.pem")
    context.load_cert_chain(certs / "operator.pem", certs / "operator.key")
    return context


@asynccontextmanager
async def serving(
    target: Path, drafters: list[str], **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """Start a whole stack with settings of `outrider serve`.

    Yields a client of its gateway and the port of its verifier's metrics. Raises RuntimeError with
    the last output of its processes if it does not start.
    """
    tls = operator_tls(settings.get("certs"))
    metrics_port = free_port("127.0.0.1")
    wanted = {
        "target": str(target),
        "drafter": drafters,
        "metrics_port": metrics_port,
        "verifier_port": 0,
        **settings,
    }
    serve = ServeSettings.model_validate(
        {**wanted, "http_port": 0, "grpc_port": 0, "log_level": "warning"}
    )
    words: deque[str] = deque(maxlen=50)
    supervisor = Supervisor(lambda name, line: words.append(f"{name}: {line}"))
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as directory:
        stack = plan_stack(serve, Path(directory))
        try:
            for child in stack.children:
                supervisor.start(child)
            ready = until_ready(stack.http_url, lambda stage: None, len(drafters), stack.ca)
            try:
                async with asyncio.timeout(300):
                    await supervisor.settle(ready)
            except (StartFailed, TimeoutError) as cause:
                raise RuntimeError(
                    "\n".join([str(cause) or "not ready after 300 s", *words])
                ) from cause
            async with httpx.AsyncClient(
                base_url=stack.http_url, timeout=600, verify=tls or True
            ) as client:
                yield client, metrics_port
        finally:
            await supervisor.stop()


@asynccontextmanager
async def outrider_stack(
    pair: Pair, drafters: list[str], threads: int, **settings: Any
) -> AsyncIterator[MakeWay]:
    """Start a whole stack.

    Call the result with a request's `speculation` and a function that makes its headers; it returns
    a way of decoding.
    """
    # Every round repeats the prompts, and the peers compute them anew each time.
    settings |= {"dtype": pair.dtype, "threads": threads, "prefix_caching": False}
    tls = operator_tls(settings.get("certs"))
    async with serving(pair.target, drafters, **settings) as (client, metrics_port):

        def way(
            speculation: dict[str, Any], headers: Callable[[], dict[str, str]] = dict
        ) -> Measure:
            """Return a way of decoding with a request's `speculation` and headers."""
            stem = {"model": str(pair.target), "speculation": speculation}
            return lambda task: _over_http(client, metrics_port, stem, headers, task, tls)

        yield way


async def _over_http(
    client: httpx.AsyncClient,
    metrics_port: int,
    stem: dict[str, Any],
    headers: Callable[[], dict[str, str]],
    task: Task,
    tls: ssl.SSLContext | None,
) -> Sample:
    """Keep `batch` requests under way, a new one for each that ends."""
    sample = Sample(0, 0.0)
    waiting = list(reversed(list(zip(task.prompts, task.lengths, strict=True))))
    before = await counters(metrics_port, tls=tls)

    async def worker() -> None:
        """Send one request after the other, until none waits."""
        while waiting:
            prompt, length = waiting.pop()
            body = {**stem, "prompt": prompt, "max_tokens": length, "temperature": task.temperature}
            port = client.base_url.port or 0
            first, last, count = await _stream(port, body, headers(), sample, tls)
            sample.requests.append((first - started, last - started, count))
            # A worker that finds no more requests ends.
            sample.full_s = sample.full_s or (0.0 if waiting else last - started)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(task.batch)))
    sample.seconds = time.perf_counter() - started
    after = await counters(metrics_port, tls=tls)
    sample.counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return sample


async def _stream(
    port: int,
    body: dict[str, Any],
    headers: dict[str, str],
    sample: Sample,
    tls: ssl.SSLContext | None,
) -> tuple[float, float, int]:
    """Stream one completion; returns the times of its first and last token and their number.

    A chunk can hold several tokens.
    """
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    started, first, last = time.perf_counter(), 0.0, b""
    async for block in stream(port, {**body, **options}, headers, tls=tls):
        # Blocks before the first event have headers alone.
        first = first or (time.perf_counter() if b"data: " in block else 0.0)
        last = (last + block)[-4096:]
    ended = time.perf_counter()
    usage = next(line for line in reversed(last.splitlines()) if b'"usage":{' in line)
    count = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
    sample.tokens += count
    sample.ttft.append(first - started)
    sample.tpot.append((ended - first) / max(count - 1, 1))
    return first, ended, count


async def counters(
    port: int, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> dict[str, float]:
    """Read a process's Prometheus counters, by name and label of phase, result or drafter."""
    scheme = "http" if tls is None else "https"
    # Reading the system's certificates takes longer than the request, on the measured cores.
    async with httpx.AsyncClient(verify=tls or False) as client:
        text = (await client.get(f"{scheme}://{host}:{port}/metrics")).text
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for point in family.samples:
            if key := counter_key(point.name, point.labels):
                values[key] = values.get(key, 0.0) + point.value
    return values


def counter_key(name: str, labels: Mapping[str, str]) -> str:
    """A counter's key: its name and the label of its phase or result.

    Empty if the metric is not a counter.
    """
    if not name.endswith(("_total", "_count", "_sum")):
        return ""
    label = labels.get("phase") or labels.get("result")
    short = name.removeprefix("outrider:").removesuffix("_total")
    if label:
        return f"{short}.{label}"
    return short
