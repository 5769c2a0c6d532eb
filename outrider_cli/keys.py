"""`outrider keys`: adds, lists and revokes the API keys of a gateway's file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.access.key_file import (
    changing_keys,
    key_digest,
    make_entry,
    new_key,
    read_keys,
    write_keys,
)
from outrider.errors import OutriderError, invalid


def add(path: Path, fields: Mapping[str, Any], days: float | None) -> int:
    """Add a key with these fields of its entry, and print it. The key cannot be shown again."""

    def work() -> None:
        key = new_key()
        with changing_keys(path) as file:
            entries = read_keys(file) if file.exists() else ()
            names = {entry.id for entry in entries}
            name = fields.get("id") or _free_id(str(fields["tenant"]), names)
            if name in names:
                raise invalid("id", f"{name} is a key of {path} already")
            made = {"id": name, "sha256": key_digest(key), "expires": _after(days)}
            entry = make_entry({**fields, **made})
            write_keys(file, [*entries, entry])
        print(f"{path} now has key {entry.id} of tenant {entry.tenant}:", file=sys.stderr)
        print(key)

    return _reporting(work)


def show(path: Path) -> int:
    """Print a table of the keys with all their fields except the hashes."""

    def work() -> None:
        table = Table("id", "tenant", "role", "expires", "sequences at once", box=None)
        now = datetime.now(UTC)
        for entry in read_keys(path):
            most = entry.concurrent_sequences
            shown = "any number" if most is None else str(most)
            expires = "never"
            if entry.expires is not None:
                word = " (expired)" if entry.expires <= now else ""
                expires = f"{entry.expires:%Y-%m-%d %H:%M} UTC{word}"
            table.add_row(entry.id, entry.tenant, entry.role, expires, shown)
        Console(soft_wrap=True).print(table)

    return _reporting(work)


def revoke(path: Path, key_id: str) -> int:
    """Remove a key. Gateways refuse the key within two seconds; its running requests finish."""

    def work() -> None:
        with changing_keys(path) as file:
            entries = read_keys(file)
            left = [entry for entry in entries if entry.id != key_id]
            if len(left) == len(entries):
                names = ", ".join(entry.id for entry in entries) or "none"
                raise invalid("id", f"{key_id} is not a key of {path}, which has {names}")
            write_keys(file, left)

    return _reporting(work)


def _after(days: float | None) -> datetime | None:
    if days is None:
        return None
    return (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)


def _free_id(tenant: str, taken: set[str]) -> str:
    """Return a new id: the tenant's name with the first number that is free."""
    number = 1
    while f"{tenant}-{number}" in taken:
        number += 1
    return f"{tenant}-{number}"


def _reporting(work: Callable[[], None]) -> int:
    """Run `work`; return the exit status. If it fails, print why and return 1."""
    try:
        work()
    except (OutriderError, OSError) as error:
        with suppress(OSError):
            print(f"outrider keys: {error}", file=sys.stderr)
        return 1
    return 0
