"""Every port of a stack with TLS: which callers it refuses and why, and the bytes on the wire."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
import redis.asyncio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from tokenizers import Tokenizer

from outrider.process.network import rpc
from outrider.process.security.certs import Authority
from outrider.process.security.roles import Role
from outrider.process.security.tls import Tls, explain
from outrider.v1 import generation_pb2, generation_pb2_grpc, verifier_pb2
from outrider_bench.experiment.links import ShapedLink
from outrider_cli.health import problem
from tests.stack import DRAFT
from tests.tls.served_stack import PORTS, Served, served

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served(tmp_path_factory.mktemp("stack"), encrypted=True) as made:
        yield made


# Calls a port with the given files. Returns "" if the port serves the call, else the reason.
Ask = Callable[[Served, int, Tls | None], Awaitable[str]]
# grpc.aio's words in place of the status if a call is refused while it sends its request.
HIDDEN = "Internal error from Core"


def over_grpc(server: Role | None) -> Ask:
    """Return a function that requests the list of services, as clients and operators may."""

    async def ask(made: Served, port: int, tls: Tls | None) -> str:
        async with rpc.dial(f"127.0.0.1:{port}", tls, server) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            for _ in range(5):
                said = ""
                try:
                    await stub.ServerReflectionInfo(iter([request]), timeout=10).read()
                except grpc.aio.AioRpcError as error:
                    said = str(error.details())
                if said != HIDDEN:
                    break
        return explain(said, tls)

    return ask


def over_http(path: str, server_name: str = "127.0.0.1") -> Ask:
    async def ask(made: Served, port: int, tls: Tls | None) -> str:
        async with made.http(f"127.0.0.1:{port}", tls) as client:
            try:
                response = await client.get(path, extensions={"sni_hostname": server_name})
            # httpx does not convert an alert that comes after the client's handshake.
            except (httpx.TransportError, ssl.SSLError) as error:
                # A reset that overtakes the alert has no text.
                return explain(str(error) or "Connection reset", tls)
        return "" if response.status_code == 200 else response.text

    return ask


async def over_redis(made: Served, port: int, tls: Tls | None) -> str:
    """Call a Redis. Redis knows no roles; a gateway has a certificate, but not the password."""
    files = {"username": "outrider", "password": "a guess"}
    if tls is not None:
        files |= {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key)}
    if tls is not None and tls.cert.stem != "gateway":
        files["password"] = made.redis.password_file.read_text().strip()
    assert made.certificates is not None
    once = Retry(NoBackoff(), 0)
    async with redis.asyncio.Redis(
        port=port, ssl=True, ssl_ca_certs=str(made.certificates.ca), retry=once, **files
    ) as client:
        try:
            await client.mget("outrider:1")
        except redis.RedisError as error:
            return explain(str(error), tls)
    return ""


ASK: dict[str, Ask] = {
    "gateway HTTP": over_http("/livez"),
    "gateway gRPC": over_grpc(None),
    "verifier": over_grpc(Role.VERIFIER),
    "verifier metrics": over_http("/metrics"),
    "drafter health": over_grpc(Role.DRAFTER),
    "drafter metrics": over_http("/metrics", Role.DRAFTER.server_name),
    "Redis": over_redis,
}
REQUIRED = "certificate required|tls-cert, tls-key and tls-ca are not given"
NO_CERTIFICATE = {
    "gateway HTTP": "requires a client certificate, and the client has shown none",
    "verifier metrics": REQUIRED,
    "drafter metrics": REQUIRED,
    "Redis": REQUIRED,
}
WRONG_ROLE = {"Redis": "invalid username-password pair"}
REASONS: dict[str, Callable[[str], str]] = {
    "none": lambda port: NO_CERTIFICATE.get(port, "tls-cert, tls-key and tls-ca are not given"),
    "foreign": lambda port: r"no authority in .*ca\.pem has signed the certificate .*foreign\.pem",
    "expired": lambda port: r"the certificate .*expired\.pem has expired \(20",
    "wrong role": lambda port: WRONG_ROLE.get(port, r"role gateway \('gateway'\) may not call "),
}


def shown(made: Served, stranger: str) -> Tls | None:
    """Return the certificate that a stranger shows."""
    assert made.certificates is not None
    folder = made.certificates.folder
    signer, hours = made.certificates.authority, 1
    if stranger == "none":
        return None
    if stranger == "wrong role":
        return made.tls("gateway")
    if stranger == "foreign":
        signer = Authority.new()
    if stranger == "expired":
        hours = -1
    signer.write_issued(folder, "operator", stranger, [], timedelta(hours=hours))
    return Tls(folder / f"{stranger}.pem", folder / f"{stranger}.key", made.certificates.ca)


# The ports that check no roles: Prometheus' library accepts every certificate of the authority.
WITHOUT_ROLES = ("verifier metrics", "drafter metrics")
REFUSED = [
    (port, stranger)
    for port in PORTS
    for stranger in REASONS
    if (port, stranger) not in [(name, "wrong role") for name in WITHOUT_ROLES]
]


@pytest.mark.parametrize(("port", "stranger"), REFUSED)
async def test_a_port_refuses_a_stranger_with_the_reason(
    stack: Served, port: str, stranger: str
) -> None:
    said = await ASK[port](stack, stack.ports[port], shown(stack, stranger))
    assert re.search(REASONS[stranger](port), said), said


ADMITTED = [*((port, "operator") for port in PORTS), *((port, "gateway") for port in WITHOUT_ROLES)]


@pytest.mark.parametrize(("port", "role"), ADMITTED)
async def test_a_port_admits_its_callers(stack: Served, port: str, role: str) -> None:
    assert await ASK[port](stack, stack.ports[port], stack.tls(role)) == ""


PROMPT = "The recipe is secret: three spoons of saffron, and three spoons of saffron."
_IDS = Tokenizer.from_file(f"{DRAFT}/tokenizer.json").encode(PROMPT).ids
# The ids as in messages, without the field's tag and length, which take one byte each.
TOKENS = verifier_pb2.GenerateTokensRequest(prompt_token_ids=_IDS).SerializeToString()[2:]
PREFACE = b"PRI * HTTP/2.0\r\n"
READABLE = {
    "gateway HTTP": [b"HTTP/1.1", PROMPT.encode()],
    "gateway gRPC": [PREFACE, PROMPT.encode()],
    "verifier": [PREFACE, TOKENS, b"ngram-1"],
    "verifier metrics": [b"GET /metrics", b"outrider:"],
    "drafter health": [PREFACE, b"/grpc.health.v1.Health"],
    "drafter metrics": [b"GET /metrics", b"outrider:"],
    "Redis": [b"\r\nAUTH\r\n", b"\r\nMGET\r\n", b"outrider:"],
}
"""What can be read on each wire without TLS."""


async def talk(made: Served) -> None:
    """Use every port through its wire, and wait until the n-grams are in Redis."""
    wires = made.addresses
    operator = made.tls("operator")
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    async with made.http(wires["gateway HTTP"], operator) as client:
        response = await client.post("/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
    async with rpc.dial(wires["gateway gRPC"], operator, None) as channel:
        request = generation_pb2.GenerateTextRequest(prompt=PROMPT, max_tokens=24)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert [part async for part in stub.GenerateText(request, timeout=60)]
    for name, role in (("verifier metrics", Role.VERIFIER), ("drafter metrics", Role.DRAFTER)):
        async with made.http(wires[name], operator) as client:
            names = {"sni_hostname": role.server_name}
            # Compressed metrics would not show whether they are encrypted.
            plain = {"accept-encoding": "identity"}
            got = await client.get("/metrics", headers=plain, extensions=names)
            assert got.status_code == 200
    files: tuple[Path | None, Path | None, Path | None] = (None, None, None)
    if operator is not None:
        files = (operator.cert, operator.key, operator.ca)
    health = asyncio.to_thread(problem, wires["drafter health"], "", *files, Role.DRAFTER)
    assert await health is None
    async with asyncio.timeout(20):
        while not made.redis.all_keys():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.slow  # This test starts a second stack.
async def test_without_tls_every_wire_can_be_read(tmp_path: Path) -> None:
    """This test shows that the next test's capture would find text if it could be read."""
    async with served(tmp_path, encrypted=False) as made:
        await talk(made)
        for name, texts in READABLE.items():
            for text in texts:
                assert any(text in said for said in carried(made.wires[name])), (name, text)


def carried(wire: ShapedLink) -> list[bytearray]:
    """Return the bytes that each connection's client sent, and those that its server sent."""
    return [*wire.up.recordings, *wire.down.recordings]


@pytest.mark.parametrize("port", PORTS)
async def test_with_tls_a_wire_begins_with_a_handshake_and_shows_nothing(
    stack: Served, port: str
) -> None:
    wire = stack.wires[port]
    if not any(wire.up.recordings):
        await talk(stack)
    opened = [said for said in wire.up.recordings if said]
    assert opened
    for said in opened:
        # The record of a handshake, whose first message is ClientHello.
        assert (said[0], said[1], said[5]) == (0x16, 0x03, 0x01)
    for text in {text for texts in READABLE.values() for text in texts}:
        assert not any(text in said for said in carried(wire))
