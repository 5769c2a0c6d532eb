"""The verifier's port takes certificates of the authority, and lets a role make only its calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from gateway.upstream.replica import Replica
from gateway.upstream.routing import Router
from outrider.drafter.grpc_transport import Dialled
from outrider.drafter.serve import own_id
from outrider.drafter.strategy import GuessStrategy
from outrider.drafter.stream import DraftStream, Observer
from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2, token_streams_pb2_grpc
from outrider.process.network import addresses, rpc, rpc_errors
from outrider.process.security.tls import Tls, explain
from outrider.protocol.draft_messages import Hello
from outrider.protocol.messages import DraftDistribution
from outrider.v1 import drafts_pb2, verifier_pb2, verifier_pb2_grpc
from tests.certificates import Site
from tests.tls.sites import FINGERPRINT, verifier
from tests.waiting import until

Call = Callable[[grpc.aio.Channel], Awaitable[Any]]


async def get_model(channel: grpc.aio.Channel) -> Any:
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    return await stub.GetModel(verifier_pb2.GetModelRequest(), timeout=10)


async def generate_tokens(channel: grpc.aio.Channel) -> Any:
    request = verifier_pb2.GenerateTokensRequest(prompt_token_ids=[1], max_tokens=2)
    call = verifier_pb2_grpc.VerifierServiceStub(channel).GenerateTokens(request, timeout=10)
    return [part async for part in call]


async def stream_tokens(channel: grpc.aio.Channel) -> Any:
    request = token_streams_pb2.SequenceRequest(
        call_id=1,
        generate=verifier_pb2.GenerateTokensRequest(prompt_token_ids=[1], max_tokens=2),
    )
    stub: Any = token_streams_pb2_grpc.TokenStreamServiceStub(channel)
    message = token_streams_pb2.StreamTokensRequest(requests=[request])
    call = stub.StreamTokens(iter([message]), timeout=10)
    return await call.read()


async def agree_version(channel: grpc.aio.Channel) -> Any:
    stub = token_streams_pb2_grpc.TokenStreamServiceStub(channel)
    return await stub.AgreeVersion(token_streams_pb2.AgreeVersionRequest(), timeout=10)


def hello(drafter_id: str) -> verifier_pb2.StreamDraftsRequest:
    """Return the first message of a drafter that could draft for the model."""
    return verifier_pb2.StreamDraftsRequest(
        hello=drafts_pb2.Hello(
            drafter_id=drafter_id,
            family="raw",
            tokenizer_fingerprint=FINGERPRINT,
            max_draft_tokens=4,
        )
    )


def stream_drafts(drafter_id: str) -> Call:
    async def call(channel: grpc.aio.Channel) -> Any:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        stream = stub.StreamDrafts(timeout=10)
        try:
            await stream.write(hello(drafter_id))
        except asyncio.InvalidStateError:
            # The call has ended; reading raises its status.
            pass
        return await stream.read()

    return call


def break_protocol(drafter_id: str) -> Call:
    """Return a drafter that says hello again, which ends its stream as a violation."""

    async def call(channel: grpc.aio.Channel) -> Any:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        stream = stub.StreamDrafts(timeout=10)
        for _ in range(2):
            await stream.write(hello(drafter_id))
            await stream.read()

    return call


async def outcome(address: str, tls: Tls | None, call: Call) -> OutriderError | None:
    """Return the error of a call with these files; None if it was answered."""
    async with rpc.dial(address, tls) as channel:
        try:
            await call(channel)
        except grpc.aio.AioRpcError as failure:
            error = rpc_errors.error_of(failure)
            error.message = explain(error.message, tls)
            return error
    return None


CALLS: dict[str, Call] = {
    "GetModel": get_model,
    "GenerateTokens": generate_tokens,
    "AgreeVersion": agree_version,
    "StreamTokens": stream_tokens,
    "StreamDrafts": stream_drafts("drafter/1"),
}
MAY = {
    "gateway": {"GetModel", "GenerateTokens", "AgreeVersion", "StreamTokens"},
    "operator": {"GetModel", "GenerateTokens"},
    "drafter": {"GetModel", "StreamDrafts"},
    "client": set[str](),
    "verifier": set[str](),
}


@pytest.mark.parametrize("role", MAY)
async def test_a_role_makes_its_own_calls_and_no_other(site: Site, role: str) -> None:
    async with verifier(site.issue("verifier")) as (address, _):
        mine = site.issue(role)
        for name, call in CALLS.items():
            error = await outcome(address, mine, call)
            if name in MAY[role]:
                assert error is None, error
                continue
            assert error is not None
            assert error.reason is Reason.CERTIFICATE_NOT_ALLOWED
            assert f"role {role} ('{role}') may not call outrider." in error.message
            assert f"/{name}, which is for " in error.message


SERVERS: dict[str, tuple[dict[str, Any], str]] = {
    "expired": ({"hours": -1.0}, "the peer's certificate is refused: certificate has expired"),
    "foreign": ({"foreign": True}, "refused: unable to get local issuer certificate"),
    "client": ({"kind": "client"}, "refused: unsupported certificate purpose"),
}


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_false_verifier_is_refused(site: Site, kind: str) -> None:
    change, reason = SERVERS[kind]
    served = site.issue(**{"kind": "verifier", "name": "served", **change})
    async with verifier(served) as (address, _):
        replica = Replica(address, site.issue("gateway"))
        await replica.refresh(FINGERPRINT)
        assert replica.problem is not None
        assert reason in replica.problem.message
        assert str(site.ca) in replica.problem.message
        await replica.close()


@pytest.mark.parametrize(
    ("role", "reason"),
    [
        ("redis", "the peer's certificate has another role or name than the one that was dialled"),
        (None, "the peer does not use TLS"),
    ],
)
async def test_a_server_of_another_role_or_without_tls_is_refused(
    site: Site, role: str | None, reason: str
) -> None:
    served = None if role is None else site.issue(role, "served")
    async with verifier(served) as (address, _):
        error = await outcome(address, site.issue("gateway"), get_model)
    assert error is not None
    assert error.message.startswith(reason)


@pytest.mark.parametrize("role", ["verifier", "redis"])
async def test_a_verifier_found_by_name_is_known_by_its_role(
    site: Site, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier's certificate lacks the name in DNS and, in general, the address."""
    async with verifier(site.issue(role, "served")) as (address, _):

        async def resolve(*_: object) -> list[str]:
            return [address]

        async def on_ready(_: bool) -> None:
            """Ignore the call."""

        monkeypatch.setattr(addresses, "resolve", resolve)
        router = Router(["dns:verifiers.test:50051"], FINGERPRINT, site.issue("gateway"))
        router.start(on_ready)
        not_yet = "has not answered yet"
        await until(lambda: router.replicas and not_yet not in str(router.replicas[0].problem))
        assert router.ready is (role == "verifier")
        await router.close()


def drafter(address: str, tls: Tls | None, identity: str) -> DraftStream:
    """Return the stream of a drafter that guesses nothing, as `outrider.drafter.serve` makes it."""

    def hello(strategy: Any, info: Any) -> Hello:
        return Hello(identity, "quiet", FINGERPRINT, 4, frozenset({DraftDistribution.SPARSE}))

    return DraftStream(
        Dialled(lambda: address, tls),
        lambda info: GuessStrategy(lambda text, count: [], "quiet"),
        hello,
        Observer(),
    )


@pytest.mark.parametrize(("role", "trusted"), [("drafter", False), ("trusted-drafter", True)])
async def test_the_role_says_whether_distributions_count(
    site: Site, role: str, trusted: bool
) -> None:
    tls = site.issue(role, "cpu1")
    async with verifier(site.issue("verifier")) as (address, engine):
        stream = drafter(address, tls, own_id("quiet", tls))
        running = asyncio.create_task(stream.run())
        await until(lambda: bool(engine.drafting.roster.connected))
        assert engine.drafting.roster.connected["cpu1/quiet"].trusted is trusted
        stream.stop()
        await running


async def test_a_drafter_cannot_take_the_name_of_another(site: Site) -> None:
    async with verifier(site.issue("verifier")) as (address, engine):
        stream = drafter(address, site.issue("drafter", "cpu1"), "cpu10/quiet")
        with pytest.raises(OutriderError) as caught:
            await asyncio.wait_for(stream.run(), 30)
        assert caught.value.reason is Reason.CERTIFICATE_NOT_ALLOWED
        assert caught.value.message.startswith(
            "hello.drafter_id is 'cpu10/quiet', but the certificate's common name is 'cpu1'"
        )
        assert not engine.drafting.roster.connected


async def test_another_id_of_the_same_certificate_is_in_quarantine_too(site: Site) -> None:
    async with verifier(site.issue("verifier")) as (address, _):
        mine, other = site.issue("drafter", "cpu1"), site.issue("drafter", "cpu2")
        for name in ("cpu1/a", "cpu1/b", "cpu1/c"):
            error = await outcome(address, mine, break_protocol(name))
            assert error is not None
            assert error.reason is Reason.PROTOCOL_VIOLATION
        error = await outcome(address, mine, stream_drafts("cpu1/d"))
        assert error is not None
        assert error.reason is Reason.QUARANTINED
        assert error.message.startswith("drafter cpu1 broke the protocol 3 times")
        assert await outcome(address, other, stream_drafts("cpu2/d")) is None


async def test_new_files_are_used_without_a_restart(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Gateway and drafter start with certificates that have expired; these are then renewed."""
    caplog.set_level(logging.INFO)
    expired = {name: site.issue(name, hours=-1) for name in ("gateway", "drafter")}
    async with verifier(site.issue("verifier")) as (address, engine):
        replica = Replica(address, expired["gateway"])
        await replica.refresh(FINGERPRINT)
        assert replica.problem is not None
        stream = drafter(address, expired["drafter"], "drafter")
        running = asyncio.create_task(stream.run())
        await until(lambda: "drafter.pem has expired" in caplog.text)

        site.issue("gateway")
        site.issue("drafter")
        await replica.refresh(FINGERPRINT)
        assert replica.problem is None
        await until(lambda: "drafter" in engine.drafting.roster.connected)
        stream.stop()
        await running
        await replica.close()


async def test_files_that_are_being_replaced_cost_a_gateway_no_verifier(site: Site) -> None:
    """The key file is missing while the gateway makes a new connection; it comes back unchanged."""
    tls = site.issue("gateway")
    away = site.folder / "away.key"
    async with verifier(site.issue("verifier")) as (address, _):
        replica = Replica(address, tls)
        tls.key.rename(away)
        replica.redial()
        await replica.refresh(FINGERPRINT)
        assert replica.problem is None
        away.rename(tls.key)
        await replica.refresh(FINGERPRINT)
        assert replica.problem is None
        await replica.close()
