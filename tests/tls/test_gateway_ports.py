"""The gateway's HTTP and gRPC ports: TLS, and clients' certificates if settings ask for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest

from gateway.metrics import GatewayMetrics
from gateway.server import Gateway, running
from outrider.errors import Reason
from outrider.process.network import rpc, rpc_errors
from outrider.process.security.tls import Tls
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.certificates import Site
from tests.gateway.gateway_rig import settings

BODY = {"prompt": "def main(", "max_tokens": 4}


@asynccontextmanager
async def gateway(
    site: Site, *, ask: bool, verifier: str = "127.0.0.1:1"
) -> AsyncIterator[Gateway]:
    """Yield a gateway with TLS; with `ask`, its public ports ask callers for certificates."""
    served, mine = site.issue("gateway", "public"), site.issue("gateway")
    chosen = settings(
        verifier,
        drain_seconds=0,
        public_tls_cert=served.cert,
        public_tls_key=served.key,
        public_tls_ca=site.ca if ask else None,
        tls_cert=mine.cert,
        tls_key=mine.key,
        tls_ca=mine.ca,
    )
    async with running(chosen, GatewayMetrics()) as made:
        yield made


async def status(made: Gateway, site: Site, tls: Tls | None) -> int | str:
    """Return the status of GET /livez; "refused" if the handshake failed."""
    try:
        async with httpx.AsyncClient(base_url=made.http_url, verify=site.context(tls)) as client:
            response = await client.get("/livez")
            return response.status_code
    except httpx.TransportError:
        return "refused"


async def outcome(made: Gateway, tls: Tls | None, site: Site) -> grpc.aio.AioRpcError:
    """Call GenerateText; return its error. There is no verifier, so the call never succeeds."""
    trusting = grpc.ssl_channel_credentials(site.ca.read_bytes())
    channel = grpc.aio.secure_channel(made.grpc_address, trusting)
    if tls is not None:
        channel = rpc.dial(made.grpc_address, tls, server=None)
    async with channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateTextRequest(prompt="x", max_tokens=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.GenerateText(request, timeout=10):
                pass
    return caught.value


async def test_clients_need_no_certificate_unless_it_is_asked_for(site: Site) -> None:
    async with gateway(site, ask=False) as made:
        assert made.http_url.startswith("https://")
        assert await status(made, site, None) == 200
        assert (await outcome(made, None, site)).code() is grpc.StatusCode.UNAVAILABLE
        async with httpx.AsyncClient(timeout=60) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(made.http_url.replace("https", "http") + "/livez")


@pytest.mark.parametrize(("role", "admitted"), [("client", True), ("drafter", False)])
async def test_clients_and_operators_are_let_in(site: Site, role: str, admitted: bool) -> None:
    async with gateway(site, ask=True) as made:
        mine = site.issue(role, "caller")
        error = rpc_errors.error_of(await outcome(made, mine, site))
        if admitted:
            assert await status(made, site, mine) == 200
            assert error.reason in (Reason.NOT_READY, Reason.VERIFIER_UNAVAILABLE)
            return
        assert error.reason is Reason.CERTIFICATE_NOT_ALLOWED
        assert f"role {role} ('caller') may not call outrider.v1.Generation" in error.message
        async with httpx.AsyncClient(verify=site.context(mine)) as client:
            response = await client.post(f"{made.http_url}/v1/completions", json=BODY)
        assert response.status_code == 403
        refusal = response.json()["error"]
        assert refusal["code"] == "certificate_not_allowed"
        assert f"role {role} ('caller') may not call the gateway's HTTP API" in refusal["message"]


@pytest.mark.parametrize(("role", "status_code"), [("operator", 200), ("client", 403)])
async def test_metrics_are_for_operators_by_certificate(
    site: Site, role: str, status_code: int
) -> None:
    async with (
        gateway(site, ask=True) as made,
        httpx.AsyncClient(base_url=made.http_url, verify=site.context(site.issue(role))) as client,
    ):
        response = await client.get("/metrics")
        processes = (await client.get("/readyz")).json()["verifiers"]
    assert response.status_code == status_code
    assert bool(processes) is (status_code == 200)


async def test_a_renewed_certificate_is_shown_without_a_restart(site: Site) -> None:
    async with gateway(site, ask=True) as made:
        mine = site.issue("client")
        ports = [int(made.http_url.rpartition(":")[2]), int(made.grpc_address.rpartition(":")[2])]
        first = [await site.serial(port, mine) for port in ports]
        assert first[0] == first[1]
        renewed = site.issue("gateway", "public")
        second = [await site.serial(port, mine) for port in ports]
        assert second[0] == second[1] != first[0]
        renewed.key.write_bytes(mine.key.read_bytes())
        assert [await site.serial(port, mine) for port in ports] == second
        assert await status(made, site, mine) == 200
