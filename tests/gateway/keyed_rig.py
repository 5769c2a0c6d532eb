"""A gateway with API keys, in front of a verifier that plays a test's script."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from gateway_rig import Rig, echo, is_ready, running_rig, settings
from scripted_verifier import Script, ready, serving
from waiting import until

from gateway.text.prompts import Prompts
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
    path = folder / "keys.yaml"
    write_keys(path, entries)
    async with serving(script) as address:
        chosen = settings(address, keys_file=path, **given)
        async with running_rig(chosen, script, prompts) as rig:
            await until(lambda: is_ready(rig.http))
            yield rig
