"""Threefold load at a real verifier with four places: goodput stays, the rest is refused at once.

Goodput is answers that are complete within their deadline, each second. The test measures what fits
first. Seconds in which the verifier was ready to run and had no processor, which Linux counts, are
no seconds: on a shared machine they would decide.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stack import GatewayProcess, Stack, free_port

from outrider_bench.chaos.requests import COUNT, body, kind_of

PLACES = 4
NUMBERS = [
    number for number in range(COUNT) if kind_of(number) in ("greedy", "seeded", "truncated")
]
"""Requests of 16 to 100 tokens whose texts do not depend on the batch."""
MEASURED_S = 4.0
SENT_S = 10.0
# By then the queue is as long as it gets.
WARM_UP_S = 3.0
# 0.9, and a tenth for what Linux does not count, such as another process's use of shared caches.
LEAST_SHARE = 0.8
# The aim is 20 ms. Here clients, gateway and verifier share the processors with other processes.
MOST_MS = 50.0
USED = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}


@dataclass
class Answer:
    """A client's answer and its times."""

    number: int
    status: int
    text: str
    retry_after: str | None
    took_s: float
    ended_at: float


@dataclass
class Scheduled:
    """For how many seconds threads had run, and had waited for a processor, by a moment."""

    at: float
    threads: dict[str, tuple[float, float]]

    def seconds_to(self, later: Scheduled) -> float:
        """The seconds until then, without those for which the busiest thread waited.

        That is the engine's: it computes the forwards.
        """
        name = max(self.threads, key=lambda name: later.threads[name][0] - self.threads[name][0])
        waited_s = later.threads[name][1] - self.threads[name][1]
        print(f"{later.at - self.at:.1f} s, of which the verifier waited {waited_s:.1f}")
        return later.at - self.at - waited_s


class Site:
    """A verifier and its gateway."""

    def __init__(self, places: int) -> None:
        self.metrics_port = free_port()
        most = ("--max-sequences", str(places), "--metrics-port", str(self.metrics_port))
        self.stack = Stack(*most)
        self.gateway = GatewayProcess(self.stack.address)

    def wait_ready(self) -> None:
        """Wait until the gateway takes requests."""
        self.stack.wait_ready()
        self.gateway.wait_ready()

    def stop(self) -> None:
        self.gateway.close()
        self.stack.stop()

    def scheduled(self) -> Scheduled:
        """How long the verifier's threads have run and waited."""
        threads = Path(f"/proc/{self.stack.verifier.popen.pid}/task").iterdir()
        read = {each.name: (each / "schedstat").read_text().split() for each in threads}
        times = {
            name: (int(ran) / 1e9, int(waited) / 1e9) for name, (ran, waited, _) in read.items()
        }
        return Scheduled(time.perf_counter(), times)

    def used(self) -> dict[str, float]:
        """The metrics in `USED` that are not 0."""
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text
        samples = [one for each in text_string_to_metric_families(text) for one in each.samples]
        named = {one.name.removeprefix("outrider:"): one.value for one in samples}
        assert named.keys() >= USED
        return {name: named[name] for name in USED if named[name]}


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site(PLACES)
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


class Clients:
    """Any number of clients of a site. Each answer must come within `patience_s`."""

    def __init__(self, site: Site, http: httpx.AsyncClient) -> None:
        self.patience_s = 60.0
        self._site = site
        self._http = http

    async def ask(self, number: int) -> Answer:
        asked: dict[str, Any] = body(number) | {"stream": False, "timeout": self.patience_s}
        del asked["stream_options"]
        began = time.perf_counter()
        response = await self._http.post("/v1/completions", json=asked)
        ended = time.perf_counter()
        ok = response.status_code == 200
        text = response.json()["choices"][0]["text"] if ok else response.json()["error"]["code"]
        retry_after = response.headers.get("retry-after")
        return Answer(number, response.status_code, text, retry_after, ended - began, ended)

    async def fit(self) -> float:
        """How many answers/s as many clients get as there are places, each asking again at once.

        From then on, clients wait eight times as long as these answers took. In less than ten
        seconds a machine that others use may become twice as slow.
        """
        answers: list[Answer] = []
        began = self._site.scheduled()

        async def one(first: int) -> None:
            place = first
            while time.perf_counter() < began.at + MEASURED_S:
                answers.append(await self.ask(NUMBERS[place % len(NUMBERS)]))
                place += PLACES

        await asyncio.gather(*(one(first) for first in range(PLACES)))
        self.patience_s = max(10.0, 8 * mean(each.took_s for each in answers))
        return len(answers) / began.seconds_to(self._site.scheduled())

    async def open(self, rate: float) -> tuple[list[Answer], float]:
        """The answers to `rate` requests/s for SENT_S, whatever becomes of them; and the goodput.

        They come at even intervals, so that two runs differ by the machine alone.
        """
        began = time.perf_counter()
        warm: Scheduled | None = None
        asked: list[asyncio.Task[Answer]] = []
        for place in range(round(rate * SENT_S)):
            await asyncio.sleep(began + place / rate - time.perf_counter())
            if warm is None and place / rate >= WARM_UP_S:
                warm = self._site.scheduled()
            asked.append(asyncio.create_task(self.ask(NUMBERS[place % len(NUMBERS)])))
        assert warm is not None
        end = self._site.scheduled()
        answers = await asyncio.gather(*asked)
        good = [
            each.status == 200
            and each.took_s <= self.patience_s
            and warm.at < each.ended_at <= end.at
            for each in answers
        ]
        return answers, sum(good) / warm.seconds_to(end)


def must_be_whole(answers: list[Answer], texts: dict[int, str]) -> None:
    """Check that each answer is late, refused or its request's whole text."""
    whole = [each for each in answers if each.status == 200]
    late = [each for each in answers if each.status == 504]
    refused = [each for each in answers if each.status == 429]
    print(f"{len(answers)} sent: {len(whole)} whole, {len(late)} late, {len(refused)} refused")
    assert len(whole) + len(late) + len(refused) == len(answers)
    assert [each.text for each in whole] == [texts[each.number] for each in whole]


def must_be_refused_at_once(refused: list[Answer]) -> None:
    """Check that these are 429 with Retry-After, and quick."""
    assert {each.text for each in refused} == {"overloaded"}
    assert all(1 <= int(each.retry_after or 0) <= 60 for each in refused)
    times = sorted(1000 * each.took_s for each in refused)
    middle, most = median(times), times[9 * len(times) // 10]
    print(f"{len(times)} refused in {middle:.1f} ms, p90 {most:.1f}, at most {times[-1]:.1f}")
    assert middle < MOST_MS


@pytest.mark.slow
async def test_threefold_load_leaves_goodput_and_the_rest_is_refused_at_once(site: Site) -> None:
    """`pytest -s` prints what it measured."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=site.gateway.url, timeout=120, limits=limits) as http:
        clients = Clients(site, http)
        calm = await asyncio.gather(*map(clients.ask, NUMBERS))
        fits = await clients.fit()
        print(f"\n{fits:.1f}/s fit, patience {clients.patience_s:.1f} s")
        once, most = await clients.open(fits)
        threefold, goodput = await clients.open(3 * fits)
    texts = {each.number: each.text for each in calm}
    must_be_whole(once, texts)
    must_be_whole(threefold, texts)
    refused = [each for each in threefold if each.status == 429]
    assert len(refused) > len(threefold) / 5, "threefold load is too much"
    must_be_refused_at_once(refused)
    print(f"goodput {most:.1f}/s, at threefold load {goodput:.1f}/s: {goodput / most:.2f}")
    assert goodput >= LEAST_SHARE * most
    assert site.used() == {}
