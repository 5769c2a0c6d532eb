"""A drafter whose messages a test chooses, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from stack import Client

from outrider.errors import OutriderError
from outrider.process import rpc
from outrider.v1 import drafts_pb2, verifier_pb2


class RawDrafter:
    """The drafter's end of a draft stream, driven by a test."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def say(self, **message: Any) -> None:
        """Send one message with these fields."""
        await self.call.write(verifier_pb2.StreamDraftsRequest(**message))

    async def hear(self) -> verifier_pb2.StreamDraftsResponse:
        """The verifier's next message, or EOF; waits for at most 30 s."""
        return await asyncio.wait_for(self.call.read(), 30)

    async def error(self) -> OutriderError:
        """The error that ended the stream; the messages before it are read and dropped."""
        with suppress(grpc.aio.AioRpcError):
            while await self.hear() != grpc.aio.EOF:
                pass
        code = await self.call.code()
        assert code is not grpc.StatusCode.OK
        trailing = await self.call.trailing_metadata()
        details = await self.call.details()
        failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None)
        return rpc.error_of(failure)


@asynccontextmanager
async def dialled(client: Client, name: str, **hello: Any) -> AsyncIterator[RawDrafter]:
    """A drafter that has sent its Hello."""
    fingerprint = (await client.model()).tokenizer_fingerprint
    call = client.stub.StreamDrafts()
    drafter = RawDrafter(call)
    fields = {
        "drafter_id": name,
        "family": name,
        "tokenizer_fingerprint": fingerprint,
        "max_draft_tokens": 16,
        **hello,
    }
    await drafter.say(hello=drafts_pb2.Hello(**fields))
    try:
        yield drafter
    finally:
        call.cancel()
