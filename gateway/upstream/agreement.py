"""The version of outrider.internal.v1 that the gateway uses with one verifier."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc

from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2
from outrider.process.network import rpc_errors
from outrider.protocol.link_versions import SPOKEN, agree, from_wire

if TYPE_CHECKING:
    # Only the type stubs have this class.
    from outrider.internal.v1.token_streams_pb2_grpc import TokenStreamServiceAsyncStub

_TIMEOUT_S = 5.0
# A verifier that refused is asked again after this time, even if no poll has seen it stop.
_ASK_AGAIN_S = 60.0


class Agreement:
    """What gateway and verifier agreed on, until the verifier may have been started anew."""

    def __init__(self) -> None:
        self.version = 0
        """The version that was agreed last; 0 before the first agreement."""
        self._holds = False
        self._forgotten = 0  # how often `forget` was called
        self._refusal: OutriderError | None = None
        self._refused_at = 0.0

    def forget(self) -> None:
        """Ask the verifier anew at the next `make`: it may have been started anew."""
        self._holds = False
        self._forgotten += 1
        self._refusal = None

    async def make(self, stub: TokenStreamServiceAsyncStub) -> OutriderError | None:
        """Return why verifier and gateway cannot work together; None if they agree.

        A refusal is kept, so that the verifier does not log it at each poll.
        """
        is_old = time.monotonic() - self._refused_at > _ASK_AGAIN_S
        if self._holds or (self._refusal is not None and not is_old):
            return self._refusal
        forgotten = self._forgotten
        try:
            self.version = await _agreed(stub)
        except OutriderError as refusal:
            if refusal.reason is Reason.NOT_READY:
                self._refusal, self._refused_at = refusal, time.monotonic()
            return refusal
        self._refusal = None
        # If the verifier was lost during the call, the next poll asks it again.
        self._holds = self._forgotten == forgotten
        return None


async def _agreed(stub: TokenStreamServiceAsyncStub) -> int:
    """Return the version that the verifier chooses.

    Raises OutriderError if gateway and verifier share no version, or if the call fails.
    """
    own = token_streams_pb2.AgreeVersionRequest(
        oldest_version=SPOKEN.oldest, newest_version=SPOKEN.newest
    )
    try:
        answer = rpc_errors.readable(await stub.AgreeVersion(own, timeout=_TIMEOUT_S))
        chosen = answer.version
    except grpc.aio.AioRpcError as failure:
        if failure.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise rpc_errors.error_of(failure) from None
        # The verifier is older than the call AgreeVersion, so it speaks version 1.
        chosen = 1
    return agree(SPOKEN, from_wire(chosen, chosen))
