"""A gateway with API keys, in front of a verifier that plays a test's script."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from gateway_rig import TARGET, Rig, echo, is_ready, running_rig, until
from scripted_verifier import Script, ScriptedVerifier, ready, serve_verifier

from gateway.config import GatewaySettings
from gateway.text.prompts import Prompts
from outrider.process import rpc
from outrider.process.key_file import KeyEntry, key_digest, make_entry, new_key, write_keys

ALICE, BOB, OPERATOR, EXPIRED = (new_key() for _ in range(4))


def entry(key: str, tenant: str, **given: Any) -> KeyEntry:
    """The entry of a key, with its tenant's name as its id."""
    return make_entry({"id": tenant, "sha256": key_digest(key), "tenant": tenant, **given})


def auth(key: str) -> dict[str, str]:
    """The header, or metadata, with a key."""
    return {"authorization": f"Bearer {key}"}


@contextlib.asynccontextmanager
async def keyed_rig(
    prompts: Prompts, folder: Path, entries: Sequence[KeyEntry], **given: Any
) -> AsyncIterator[Rig]:
    """Run a gateway whose keys are in `folder`/keys.yaml, with more settings if they are given."""
    script = Script(ready(prompts.fingerprint), echo)
    server = rpc.Server("outrider.v1.VerifierService")
    serve_verifier(ScriptedVerifier(script), server.grpc)
    [port] = await server.start("127.0.0.1:0")
    path = folder / "keys.yaml"
    write_keys(path, entries)
    settings = GatewaySettings(
        verifier=[f"127.0.0.1:{port}"],
        tokenizer=TARGET,
        http_port=0,
        grpc_listen="127.0.0.1:0",
        keys_file=path,
        **given,
    )
    async with running_rig(settings, script, prompts) as rig:
        await until(lambda: is_ready(rig.http))
        yield rig
    await server.stop(0)
