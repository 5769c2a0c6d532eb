"""A gateway on real sockets in front of a scripted verifier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import fields

import pytest
import pytest_asyncio
from gateway_rig import TARGET, Rig, echo, is_ready, running_rig, until
from mortal_verifiers import Site, running_site
from scripted_verifier import Script, ScriptedVerifier, ready, serve_verifier

from gateway.config import GatewaySettings
from gateway.text.prompts import Prompts
from gateway.upstream import routing
from outrider.process import rpc


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return Prompts(TARGET)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_rig(prompts: Prompts) -> AsyncIterator[Rig]:
    script = Script(ready(prompts.fingerprint), echo)
    server = rpc.Server("outrider.v1.VerifierService")
    serve_verifier(ScriptedVerifier(script), server.grpc)
    [port] = await server.start("127.0.0.1:0")
    settings = GatewaySettings(
        verifier=[f"127.0.0.1:{port}"],
        tokenizer=TARGET,
        http_port=0,
        grpc_listen="127.0.0.1:0",
        max_body_bytes=65536,
        max_sequences=8,
    )
    with pytest.MonkeyPatch.context() as patch:
        # Tests should not wait a second until the gateway sees a change.
        patch.setattr(routing, "_POLL_READY_S", 0.05)
        async with running_rig(settings, script, prompts) as rig:
            yield rig
    await server.stop(0)


@pytest_asyncio.fixture(loop_scope="session")
async def rig(shared_rig: Rig) -> Rig:
    """The shared gateway, ready, with a verifier that is reset and echoes prompts."""
    script = shared_rig.script
    fresh = Script(ready(shared_rig.prompts.fingerprint), echo)
    await until(lambda: script.running == 0)
    for field in fields(Script):
        setattr(script, field.name, getattr(fresh, field.name))
    # Another test may have changed the pause between polls just when this gateway began one.
    shared_rig.gateway.router.replicas[0].suspect.set()
    await until(lambda: is_ready(shared_rig.http))
    await until(lambda: shared_rig.gateway.router.replicas[0].info == script.info)
    return shared_rig


@pytest_asyncio.fixture(loop_scope="session")
async def site(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A gateway that polls its two verifiers often. Both serve the model under one name."""
    monkeypatch.setattr(routing, "_POLL_READY_S", 0.05)
    monkeypatch.setattr(routing, "_POLL_LOADING_S", 0.05)
    async with running_site(prompts, model_name="models/target") as made:
        yield made
