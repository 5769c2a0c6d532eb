"""Versions of outrider.internal.v1, the link between a gateway and a verifier."""

from __future__ import annotations

from typing import NamedTuple

from outrider.errors import OutriderError, Reason


class Versions(NamedTuple):
    """The versions that one side speaks, from `oldest` to `newest`."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"version {self.oldest}"
        return f"versions {self.oldest} to {self.newest}"


SPOKEN = Versions(1, 1)
"""This release's versions: the newest, and the version before it if rolling updates need both."""


def agree(gateway: Versions, verifier: Versions) -> int:
    """Return the newest version that both sides speak.

    Raises OutriderError(NOT_READY) if there is no such version.
    """
    newest = min(gateway.newest, verifier.newest)
    if newest < max(gateway.oldest, verifier.oldest):
        message = (
            f"the gateway speaks {gateway} of outrider.internal.v1, and the verifier {verifier};"
            " update the older of the two"
        )
        raise OutriderError(Reason.NOT_READY, message)
    return newest


def from_wire(oldest: int, newest: int) -> Versions:
    """Return a peer's versions. A peer that leaves a number out speaks version 1."""
    return Versions(oldest or 1, newest or 1)
