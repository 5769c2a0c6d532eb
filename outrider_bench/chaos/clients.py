"""The clients of a campaign: they stream requests through the gateways, and record each end."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict

import httpx

from outrider_bench.chaos.history import History
from outrider_bench.chaos.requests import COUNT, Answer, body
from outrider_bench.experiment.child import LOOPBACK

_SILENCE_S = 120.0
_PAUSE_S = 0.5
_HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localh"


class Clients:
    """Clients of gateways; `gateways` maps names to URLs.

    Clients send the requests in numerical order.
    """

    def __init__(
        self, gateways: Mapping[str, str], trust: ssl.SSLContext | bool, history: History
    ) -> None:
        self._gateways = list(gateways.items())
        self._trust = trust
        self._history = history
        self._numbers = itertools.count()
        # Each request has its own connection, so that a dead connection harms no other request.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(_SILENCE_S),
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=trust,
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def ask_all(self, at_once: int) -> None:
        """Send each request once while no fault is played, at most `at_once` at a time."""
        turns = asyncio.Semaphore(at_once)

        async def ask() -> None:
            async with turns:
                await self.ask("undisturbed")

        await asyncio.gather(*(ask() for _ in range(COUNT)))

    async def stream_until(self, over: asyncio.Event) -> None:
        """Send one request after another until `over` is set; wait 0.5 s after a failed request."""
        while not over.is_set():
            if await self.ask() != "finished":
                await asyncio.sleep(_PAUSE_S)

    async def crowd(self, count: int, leaves_after: int = 0, pause_s: float = 0.0) -> None:
        """Send `count` requests at once.

        Each client leaves after `leaves_after` lines; if this is 0, the client stays to the end. It
        waits `pause_s` seconds after each line.
        """
        asks = (self.ask("request", leaves_after, pause_s) for _ in range(count))
        await asyncio.gather(*asks)

    async def half_requests(self, count: int, seconds: float) -> None:
        """Send only the beginning of each of `count` requests, and hang up after some seconds."""
        writers: list[asyncio.StreamWriter] = []
        for number in range(count):
            _, url = self._gateways[number % len(self._gateways)]
            # The gateway may be down.
            with suppress(OSError):
                port = httpx.URL(url).port
                _, writer = await asyncio.open_connection(LOOPBACK, port, ssl=self._trust or None)
                writer.write(_HALF)
                writers.append(writer)
        await asyncio.sleep(seconds)
        for writer in writers:
            writer.close()

    async def ask(self, event: str = "request", leaves_after: int = 0, pause_s: float = 0.0) -> str:
        """Send the next request and record its end; return its outcome.

        Outcomes: finished; failed (an error with a code ended it); refused (there was no answer);
        cut (the answer stopped in the middle); hung (no byte came for 120 s); left (this client
        hung up).
        """
        turn, number = divmod(next(self._numbers), COUNT)
        gateway, url = self._gateways[(turn + number) % len(self._gateways)]
        began = self._history.now()
        answer = Answer()
        outcome = "refused"
        try:
            async with self._post(url, number) as response:
                outcome = "cut"
                if response.status_code == 200:
                    outcome = await _read(response, answer, leaves_after, pause_s)
                else:
                    _read_refusal(await response.aread(), response, answer)
                    outcome = "failed"
        except httpx.TimeoutException:
            outcome = "hung"
        except httpx.TransportError as error:
            answer.code = answer.code or type(error).__name__
        self._history.add(
            event,
            number=number,
            gateway=gateway,
            began=began,
            outcome=outcome,
            answer=asdict(answer),
        )
        return outcome

    def _post(self, url: str, number: int) -> AbstractAsyncContextManager[httpx.Response]:
        return self._http.stream("POST", f"{url}/v1/completions", json=body(number))


def _read_refusal(content: bytes, response: httpx.Response, answer: Answer) -> None:
    try:
        answer.fail(response.json())
    except (ValueError, KeyError, TypeError):
        answer.problems.append(f"status {response.status_code} without an error: {content[:200]!r}")


async def _read(response: httpx.Response, answer: Answer, leaves_after: int, pause_s: float) -> str:
    """Read a stream to its end, or until the client leaves; return the outcome."""
    count = 0
    async for line in response.aiter_lines():
        answer.add(line)
        count += bool(line)
        if leaves_after and count >= leaves_after:
            return "left"
        if pause_s:
            await asyncio.sleep(pause_s)
    return _outcome(answer)


def _outcome(answer: Answer) -> str:
    """Return the outcome of a stream that the gateway ended."""
    if not answer.is_done:
        return "cut"
    return "failed" if answer.code else "finished"
