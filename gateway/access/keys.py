"""Looks up the gateway's API keys by hash, and reads them again when their file changes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from pathlib import Path

from gateway.access.key_file import KeyEntry, check_distinct, parse_keys, read_keys
from outrider.errors import OutriderError, invalid

log = logging.getLogger(__name__)

_RELOAD_S = 1.0

_Stamp = tuple[int, int, int, int] | None
"""A file's inode, size, and times of modification and of change in ns; None without a file. The
time of change also changes with mode and owner.
"""


class KeyRing:
    """The keys of `keys_file` and `keys`. Raises OutriderError(INVALID_VALUE) for bad keys."""

    def __init__(self, file: Path | None, text: str) -> None:
        """`text` holds entries in the file's form, and may be empty."""
        self._file = file
        self._given = parse_keys(text, "keys") if text else ()
        self._stamp = self._failed = self._current_stamp()
        self._by_digest = self._indexed(() if file is None else read_keys(file))

    def find(self, key: str) -> KeyEntry | None:
        """Return the entry of a key; None for an unknown key.

        The look-up's time depends only on the key's hash, and so reveals nothing about the key.
        """
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
        entry = self._by_digest.get(digest)
        if entry is None or not hmac.compare_digest(entry.sha256, digest):
            return None
        return entry

    async def follow(self) -> None:
        """Watch the file for ever; read it when it has changed. If it is bad, old keys stay."""
        while True:
            await asyncio.sleep(_RELOAD_S)
            if self.has_changed():
                await self.reload()

    def has_changed(self) -> bool:
        """Return whether the file has changed since the present keys were read."""
        return self._current_stamp() != self._stamp

    async def reload(self) -> None:
        """Read the file again. If the file is bad, the log says so, and the old keys stay valid.

        A file that could not be read still counts as changed, so `follow` tries it again.
        """
        stamp = self._current_stamp()
        if self._file is None:
            return
        try:
            entries = await asyncio.to_thread(read_keys, self._file)
            self._by_digest = self._indexed(entries)
        except OutriderError as error:
            if stamp != self._failed:
                log.error("the old keys stay in force: %s", error)
            self._failed = stamp
            return
        self._stamp = stamp
        log.info("%s has changed; there are %d keys now", self._file, len(self._by_digest))

    def _indexed(self, entries: tuple[KeyEntry, ...]) -> dict[str, KeyEntry]:
        both = (*self._given, *entries)
        try:
            check_distinct(both)
        except ValueError as error:
            raise invalid("keys", f"contradicts the keys of {self._file}: {error}") from error
        return {entry.sha256: entry for entry in both}

    def _current_stamp(self) -> _Stamp:
        try:
            found = os.stat(self._file or "")
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
