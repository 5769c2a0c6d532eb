"""The interfaces between a DraftStream and its verifier.

Messages cross these interfaces as plain data.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from outrider.errors import OutriderError
from outrider.protocol.draft_messages import DraftBatch, Hello, StepBatch, Welcome
from outrider.protocol.model_info import ModelInfo


class StreamEnded(Exception):
    """The verifier refused or ended the stream, for the reason `error`."""

    def __init__(self, error: OutriderError) -> None:
        super().__init__(str(error))
        self.error = error


class Transport(Protocol):
    """One draft stream.

    All methods raise StreamEnded if the verifier ended the stream with an error. If the verifier
    ended the stream without error, `read` returns None, and writes may do nothing or raise
    StreamEnded. `introduce` comes first; later, `read` may run beside the other methods.
    """

    address: str
    """The address of the verifier."""

    async def introduce(self, hello: Hello) -> Welcome:
        """Send Hello and wait for Welcome."""

    async def read(self) -> StepBatch | None:
        """Wait for the next step; return None if the verifier ended the stream without error."""

    async def write(self, batch: DraftBatch) -> None:
        """Send drafts. The transport may keep the batch, so the caller must not change it later."""

    async def say_goodbye(self) -> None:
        """Say that this drafter stops, and write nothing more."""


class Verifier(Protocol):
    """A verifier to which a drafter can connect many times."""

    def address(self) -> str:
        """Return the address of the next connection, for the log."""

    async def model(self) -> ModelInfo:
        """Wait until the verifier serves; return its model. Raises StreamEnded if it refuses."""

    def connect(self, info: ModelInfo) -> AbstractAsyncContextManager[Transport]:
        """Open a stream to the verifier of the model `info`; the block's end closes the stream."""
