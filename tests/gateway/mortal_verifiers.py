"""A gateway with two scripted verifiers that can be killed, restarted and drained."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gateway import server
from gateway.metrics import GatewayMetrics
from gateway.server import Gateway, running
from gateway.text.prompts import Prompts
from gateway.upstream import routing
from outrider.errors import OutriderError, Reason
from outrider.process.network import rpc
from outrider.protocol.messages import (
    FinishReason,
    SpeculationStats,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
)
from outrider.protocol.model_info import Stage
from outrider_bench.experiment.links import ShapedLink
from outrider_bench.experiment.spec import Link
from tests.gateway.gateway_rig import echo, events_of, settings
from tests.gateway.scripted_verifier import (
    Script,
    ScriptedVerifier,
    Step,
    last,
    plain,
    ready,
    serve_verifier,
)
from tests.waiting import until

TEXT = "def main():\n    return [1, 2, 3]\n\nclass Größe:\n    pass\n"
FOREVER = 600.0
LOST = OutriderError(Reason.VERIFIER_UNAVAILABLE, "the verifier has crashed")


def text_of(response: httpx.Response) -> str:
    """Join the text of a stream's events."""
    return "".join(choice["text"] for event in events_of(response) for choice in event["choices"])


class Verifier:
    """A scripted verifier that can be killed and restarted at the same address."""

    def __init__(self, prompts: Prompts) -> None:
        self.script = Script(ready(prompts.fingerprint), echo)
        self._server: rpc.Server | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = rpc.Server()
        # The stubs call the class abstract, but methods that it lacks answer UNIMPLEMENTED.
        verifier = ScriptedVerifier(self.script)  # type: ignore[abstract]
        serve_verifier(verifier, self._server.grpc)
        [self.port] = await self._server.start(f"127.0.0.1:{self.port}")

    def drain(self) -> None:
        """Announce that the verifier leaves, and let it finish the remaining texts."""
        self.script.info = replace(self.script.info, stage=Stage.DRAINING)
        self.script.leaves = True

    async def kill(self) -> None:
        """Cut all connections."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None


class Site:
    """A gateway with two verifiers. While neither verifier is busy, the gateway picks `first`."""

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts
        self.ids = prompts.tokenizer.encode(TEXT).ids
        self.first = Verifier(prompts)
        self.second = Verifier(prompts)
        self.link = ShapedLink(Link())
        self.gateway: Gateway
        self.http: httpx.AsyncClient

    def writes(
        self, verifier: Verifier, until_token: int | None = None, then: Step = FOREVER
    ) -> None:
        """Let a verifier continue TEXT up to the token `until_token`; then it does `then`."""

        def steps(request: TokenRequest) -> list[Step]:
            done = len(request.committed)
            end = len(self.ids) if until_token is None else until_token
            chunks: list[Step] = [self.chunk(request, at) for at in range(done, end)]
            if until_token is None:
                return [*chunks, last([3], FinishReason.STOP, SpeculationStats(len(chunks) + 1))]
            return [*chunks, then]

        verifier.script.answer = steps

    def chunk(self, request: TokenRequest, at: int) -> TokenChunk:
        """Return the chunk of TEXT's token `at`, with its log probability if requested."""
        chunk = plain([self.ids[at]])
        if request.top_logprobs is not None:
            chunk.logprobs = [TokenLogprob(-0.25 * at, (self.ids[at],), (-0.25 * at,), 1)]
        return chunk

    def ask(self, **body: Any) -> asyncio.Task[httpx.Response]:
        wanted = {"prompt": "x", "max_tokens": 500} | body
        return asyncio.create_task(self.http.post("/v1/completions", json=wanted))

    async def begin(self, count: int, **body: Any) -> asyncio.Task[httpx.Response]:
        """Send a request, and wait for `count` tokens from `first`, which then sends no more."""
        self.writes(self.first, count)
        asked = self.ask(**body)
        await self.sent(self.first, count)
        return asked

    async def pauses(self, pause_s: float, **body: Any) -> asyncio.Task[httpx.Response]:
        """Ask, and wait for the 3 tokens after which `first` pauses before it writes the rest."""
        self.first.script.answer = lambda _: [
            plain(self.ids[:3]),
            pause_s,
            plain(self.ids[3:]),
            last([3], FinishReason.STOP),
        ]
        asked = self.ask(**body)
        await self.sent(self.first, 3)
        return asked

    async def known_lost(self, index: int) -> None:
        """Wait until the gateway gives new requests to other verifiers than this one."""
        await until(lambda: self.gateway.router.replicas[index].problem is not None)

    async def only_first(self) -> None:
        """Kill the second verifier, and wait until the gateway knows."""
        await self.second.kill()
        await self.known_lost(1)

    async def sent(self, verifier: Verifier, count: int) -> None:
        """Wait until the gateway has the verifier's first `count` tokens of every sequence."""

        def has_them() -> bool:
            sequences = {s for r in self.gateway.router.replicas for s in r.sequences}
            here = verifier.script.running
            return 0 < here == sum(len(s._committed) == count for s in sequences)  # type: ignore[attr-defined]

        await until(has_them)

    async def counted(self, reason: str) -> int:
        text = (await self.http.get("/metrics")).text
        name = f'outrider:request_resumed_total{{model_name="models/target",reason="{reason}"}}'
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return int(float(lines[0].split()[-1])) if lines else 0


@contextlib.asynccontextmanager
async def running_site(
    prompts: Prompts, *, poll_s: float = 0.05, through_link: bool = False, **given: Any
) -> AsyncIterator[Site]:
    """Run a gateway with these settings and this pause between two polls of its verifiers.

    With `through_link`, the gateway reaches `first` only through the site's link.
    """
    site = Site(prompts)
    async with contextlib.AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(routing, "_POLL_READY_S", poll_s)
        patch.setattr(routing, "_POLL_LOADING_S", 0.05)
        # With its own templates, a gateway would start a process, which takes half a second.
        patch.setattr(server, "Prompts", lambda *_: prompts)
        for verifier in (site.first, site.second):
            await verifier.start()
            stack.push_async_callback(verifier.kill)
            site.writes(verifier)
        first = site.first.address
        if through_link:
            forward = site.link.forward(("127.0.0.1", 0), ("127.0.0.1", site.first.port))
            first = f"127.0.0.1:{await stack.enter_async_context(forward)}"
        chosen = settings(first, site.second.address, **{"drain_seconds": 0} | given)
        site.gateway = await stack.enter_async_context(running(chosen, GatewayMetrics()))
        site.http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=site.gateway.http_url, timeout=30, verify=False)
        )
        await until(lambda: all(r.problem is None for r in site.gateway.router.replicas))
        yield site
