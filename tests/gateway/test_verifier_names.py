"""Verifiers behind a name come and go, and no request notices."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import httpx
import pytest
import pytest_asyncio

from gateway import server
from gateway.metrics import GatewayMetrics
from gateway.server import Gateway, running
from gateway.text.prompts import Prompts
from gateway.upstream import routing
from outrider.errors import OutriderError, Reason
from outrider.process.network import addresses
from outrider.protocol.messages import FinishReason, TokenRequest
from outrider.protocol.model_info import Stage
from tests.gateway.gateway_process import gateway_process
from tests.gateway.gateway_rig import settings
from tests.gateway.mortal_verifiers import TEXT, Verifier, text_of
from tests.gateway.scripted_verifier import Step, last, plain
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAME = "dns:verifiers.test:50051"
LEAVES = OutriderError(Reason.DRAINING, "the verifier is about to stop")
FAILS = socket.gaierror(-3, "Temporary failure in name resolution")


@dataclass
class Fleet:
    """Verifiers that write TEXT, and a gateway that finds them by a name."""

    prompts: Prompts
    verifiers: list[Verifier]
    listed: list[Verifier] = field(default_factory=list)
    """The verifiers that the name stands for."""
    error: OSError | None = None
    """If set, the resolver raises this error instead."""
    gateway: Gateway = field(init=False)
    http: httpx.AsyncClient = field(init=False)

    async def resolve(self, host: str, port: int) -> list[str]:
        assert (host, port) == ("verifiers.test", 50051)
        if self.error is not None:
            raise self.error
        return [verifier.address for verifier in self.listed]

    def serves(self, verifier: Verifier, pause_s: float = 0.0) -> None:
        """Make a verifier ready, and let it continue TEXT after the committed tokens."""
        ids = self.prompts.tokenizer.encode(TEXT).ids

        def steps(request: TokenRequest) -> list[Step]:
            rest = ids[len(request.committed) :]
            pauses: list[Step] = [pause_s] * bool(pause_s)
            chunks: list[Step] = [step for each in rest for step in (*pauses, plain([each]))]
            return [*chunks, last([3], FinishReason.STOP)]

        verifier.script.answer = steps
        verifier.script.info = replace(verifier.script.info, stage=Stage.READY)

    def ask(self) -> asyncio.Task[httpx.Response]:
        body = {"prompt": "x", "max_tokens": 500, "stream": True}
        return asyncio.create_task(self.http.post("/v1/completions", json=body))

    async def ask_the_first_and_delist_it(self) -> asyncio.Task[httpx.Response]:
        """Start a request at the first verifier; then let the name stand for the second."""
        first, second = self.verifiers
        self.serves(first, 0.05)
        begun = self.ask()
        await until(lambda: first.script.running == 1)
        self.listed = [second]
        await self.ready(second)
        return begun

    @property
    def known(self) -> list[str]:
        """Return the addresses that the gateway has, ready or not."""
        return [replica.address for replica in self.gateway.router.replicas]

    async def ready(self, *verifiers: Verifier) -> None:
        """Wait until requests go only to these verifiers."""
        wanted = sorted(verifier.address for verifier in verifiers)
        picks = self.gateway.router.ready_picks
        await until(lambda: sorted(pick.replica.address for pick in picks()) == wanted)


@contextlib.asynccontextmanager
async def running_fleet(
    prompts: Prompts, count: int, *plain_addresses: int, error: OSError | None = None
) -> AsyncIterator[Fleet]:
    """Run `count` verifiers, the first of them behind the name, and a gateway.

    The gateway also gets the addresses of the verifiers numbered `plain_addresses`. If `error` is
    given, the resolver raises it at first.
    """
    fleet = Fleet(prompts, [Verifier(prompts) for _ in range(count)], error=error)
    async with contextlib.AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(routing, "_POLL_READY_S", 0.05)
        patch.setattr(routing, "_POLL_LOADING_S", 0.05)
        patch.setattr(addresses, "_RESOLVE_S", 0.05)
        patch.setattr(addresses, "resolve", fleet.resolve)
        patch.setattr(server, "Prompts", lambda *_: prompts)
        for verifier in fleet.verifiers:
            await verifier.start()
            stack.push_async_callback(verifier.kill)
            fleet.serves(verifier)
        fleet.listed = fleet.verifiers[:1]
        given = [NAME, *(fleet.verifiers[index].address for index in plain_addresses)]
        chosen = settings(*given, drain_seconds=0)
        fleet.gateway = await stack.enter_async_context(running(chosen, GatewayMetrics()))
        fleet.http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=fleet.gateway.http_url, timeout=60)
        )
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(prompts: Prompts) -> AsyncIterator[Fleet]:
    async with running_fleet(prompts, 2) as made:
        await made.ready(made.verifiers[0])
        yield made


async def test_what_a_vanished_verifier_has_it_finishes(fleet: Fleet) -> None:
    first, second = fleet.verifiers
    begun = await fleet.ask_the_first_and_delist_it()
    assert text_of(await fleet.ask()) == TEXT
    assert fleet.known == [first.address, second.address]
    assert text_of(await begun) == TEXT
    assert (len(first.script.requests), len(second.script.requests)) == (1, 1)
    await until(lambda: fleet.known == [second.address])
    assert (await fleet.http.get("/readyz")).json()["status"] == "ready"


async def test_a_vanished_verifier_takes_requests_until_another_is_ready(fleet: Fleet) -> None:
    """A name changes at once from an old to a new verifier, which the gateway must reach first."""
    first, second = fleet.verifiers
    second.script.info = replace(second.script.info, stage=Stage.LOADING)
    fleet.listed = [second]
    await until(lambda: second.address in fleet.known)
    assert text_of(await fleet.ask()) == TEXT
    assert (len(first.script.requests), len(second.script.requests)) == (1, 0)
    fleet.serves(second)
    await until(lambda: fleet.known == [second.address])
    assert text_of(await fleet.ask()) == TEXT
    assert (len(first.script.requests), len(second.script.requests)) == (1, 1)


async def test_a_vanished_verifier_takes_no_requests_for_a_name_that_another_serves(
    fleet: Fleet,
) -> None:
    first, second = fleet.verifiers
    for verifier, model in ((first, "m1"), (second, "m2")):
        verifier.script.info = replace(verifier.script.info, model_id=model, aliases=("chat",))
    await until(lambda: "chat" in fleet.gateway.router.names)
    begun = await fleet.ask_the_first_and_delist_it()
    assert list(fleet.gateway.router.names) == ["m1", "m2", "chat"]
    assert {fleet.gateway.router.pick(name).replica.address for name in (None, "", "chat")} == {
        second.address
    }
    assert text_of(await begun) == TEXT


async def test_a_vanished_verifier_takes_requests_for_a_limited_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "_HANDOVER_S", 0.0)
    first, second = fleet.verifiers
    second.script.info = replace(second.script.info, stage=Stage.LOADING)
    fleet.listed = [second]
    await until(lambda: fleet.known == [second.address])
    assert (await fleet.ask()).status_code == 503
    assert not first.script.requests


async def test_a_verifier_that_comes_back_is_used_again(fleet: Fleet) -> None:
    first, second = fleet.verifiers
    begun = await fleet.ask_the_first_and_delist_it()
    fleet.listed = [first, second]
    await fleet.ready(first, second)
    assert text_of(await begun) == TEXT
    fleet.listed = [first]
    await until(lambda: fleet.known == [first.address])
    assert text_of(await fleet.ask()) == TEXT


async def test_a_resolver_that_fails_changes_nothing_but_is_told(fleet: Fleet) -> None:
    fleet.error = FAILS
    problems = fleet.gateway.router.addresses.problems
    await until(lambda: problems)
    state = (await fleet.http.get("/readyz")).json()
    assert state["status"] == "degraded"
    assert f"{NAME} cannot be resolved (Temporary failure" in state["detail"]
    metric = f'outrider:resolution_failures_total{{name="{NAME}"}}'
    assert metric in (await fleet.http.get("/metrics")).text
    assert text_of(await fleet.ask()) == TEXT
    fleet.error = None
    await until(lambda: not problems)
    assert (await fleet.http.get("/readyz")).json()["status"] == "ready"


async def test_requests_are_refused_until_the_name_has_an_address(prompts: Prompts) -> None:
    async with running_fleet(prompts, 1, error=FAILS) as fleet:
        await until(lambda: fleet.gateway.router.addresses.problems)
        state = await fleet.http.get("/readyz")
        assert (state.status_code, state.json()["status"]) == (503, "unavailable")
        assert f"{NAME} cannot be resolved" in state.json()["detail"]
        refused = await fleet.ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        fleet.error = None
        await fleet.ready(fleet.verifiers[0])
        assert text_of(await fleet.ask()) == TEXT


async def test_plain_addresses_stay_beside_a_name(prompts: Prompts) -> None:
    async with running_fleet(prompts, 3, 1) as fleet:
        first, second, third = fleet.verifiers
        await fleet.ready(first, second)
        fleet.listed = [second, third]
        await until(lambda: sorted(fleet.known) == sorted([second.address, third.address]))
        fleet.listed = [third]
        await fleet.ready(second, third)


async def test_a_gateway_process_finds_its_verifier_by_name(prompts: Prompts) -> None:
    async with gateway_process(prompts, verifier="dns:localhost:{port}") as (gateway, _):
        async with httpx.AsyncClient(timeout=60) as http:
            [verifier] = (await http.get(f"{gateway.url}/readyz")).json()["verifiers"]
        [name] = [word for word in gateway.arguments if word.startswith("dns:")]
        assert verifier["address"] == name.replace("dns:localhost", "127.0.0.1")


async def test_a_name_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match="must name dns:NAME:PORT, not dns:verifiers"):
        settings("127.0.0.1:9", "dns:verifiers")


async def test_scaling_and_rolling_updates_lose_and_alter_nothing(prompts: Prompts) -> None:
    """Verifiers keep joining and draining. The address of a draining verifier vanishes at once.

    The resolver sometimes fails. At least one verifier is always ready.
    """
    draw = random.Random(5)
    async with running_fleet(prompts, 4) as fleet:
        for verifier in fleet.verifiers:
            fleet.serves(verifier, 0.004)
        await fleet.ready(*fleet.listed)
        texts: list[str] = []
        churning = True

        async def client() -> None:
            while churning:
                texts.append(text_of(await fleet.ask()))

        async def leave(verifier: Verifier) -> None:
            """Leave as a verifier does on SIGTERM, while its address vanishes."""
            fleet.listed = [each for each in fleet.listed if each is not verifier]
            verifier.script.answer = lambda _: [LEAVES]
            verifier.drain()
            await until(lambda: verifier.script.running == 0)
            await verifier.kill()
            await verifier.start()
            fleet.serves(verifier, 0.004)

        clients = [asyncio.create_task(client()) for _ in range(12)]
        for _ in range(12):
            fleet.error = FAILS if draw.random() < 0.3 else None
            await asyncio.sleep(0.1)
            fleet.error = None
            joins = draw.choice([each for each in fleet.verifiers if each not in fleet.listed])
            fleet.listed = [*fleet.listed, joins]
            await fleet.ready(*fleet.listed)
            if draw.random() < 0.8:
                await leave(draw.choice(fleet.listed[:-1]))
            if len(fleet.listed) == len(fleet.verifiers):
                await leave(fleet.listed[0])
        churning = False
        await asyncio.gather(*clients)
        assert len(texts) > 50
        assert set(texts) == {TEXT}
        assert all(verifier.script.requests for verifier in fleet.verifiers)
        resumed = (await fleet.http.get("/metrics")).text
        assert (
            'outrider:request_resumed_total{model_name="models/target",reason="draining"}'
            in resumed
        )
