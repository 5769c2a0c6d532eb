"""A gateway with API keys, in front of a verifier that plays a test's script."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from gateway.access.key_file import KeyEntry, key_digest, make_entry, new_key, write_keys
from gateway.text.prompts import Prompts
from tests.gateway.gateway_rig import Rig, own_rig

ALICE, BOB, CAROL, OPERATOR, EXPIRED = (new_key() for _ in range(5))


def entry(key: str, tenant: str, **given: Any) -> KeyEntry:
    """Return the entry of a key; the entry's id is the tenant's name."""
    return make_entry({"id": tenant, "sha256": key_digest(key), "tenant": tenant, **given})


def auth(key: str) -> dict[str, str]:
    """Return the header, or metadata, with a key."""
    return {"authorization": f"Bearer {key}"}


@contextlib.asynccontextmanager
async def keyed_rig(
    prompts: Prompts, folder: Path, entries: Sequence[KeyEntry], **given: Any
) -> AsyncIterator[Rig]:
    """Run a gateway whose keys are in `folder`/keys.yaml; `given` has its other settings."""
    path = folder / "keys.yaml"
    write_keys(path, entries)
    async with own_rig(prompts, keys_file=path, **given) as rig:
        yield rig
