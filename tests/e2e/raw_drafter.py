"""A drafter that says what a test tells it to, over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from stack import Client  # lies beside this file

from outrider.errors import OutriderError
from outrider.process import rpc
from outrider.v1 import drafts_pb2, verifier_pb2


class RawDrafter:
    """A draft stream in the test's hands."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def say(self, **message: Any) -> None:
        await self.call.write(verifier_pb2.StreamDraftsRequest(**message))

    async def propose(self, **fields: Any) -> None:
        await self.say(drafts=drafts_pb2.DraftBatch(proposals=[drafts_pb2.Proposal(**fields)]))

    async def hear(self) -> verifier_pb2.StreamDraftsResponse:
        return await asyncio.wait_for(self.call.read(), 10)

    async def opened(self) -> drafts_pb2.Opened:
        while True:
            response = await self.hear()
            assert response != grpc.aio.EOF, await self.error()
            if response.step.opened:
                return response.step.opened[0]

    async def insist(self, **fields: Any) -> OutriderError:
        """Answer one verdict after another until the stream ends.

        With a rest in between, long enough on a busy machine: grpc.aio forgets the status of a call that is being written to when
        it ends.
        """
        rested_at = 0.0
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (response := await self.hear()) != grpc.aio.EOF:
                for said in response.step.verdicts:
                    if time.monotonic() > rested_at:
                        await self.propose(
                            **{
                                "sequence_id": said.sequence_id,
                                "base_length": said.committed_length,
                                **fields,
                            }
                        )
                        rested_at = time.monotonic() + 0.2
        return await self.error()

    async def error(self) -> OutriderError:
        """What the verifier ended the stream with; the status comes behind the messages, so those are read first."""
        with suppress(grpc.aio.AioRpcError):
            while await self.hear() != grpc.aio.EOF:
                pass
        code, trailing = await self.call.code(), await self.call.trailing_metadata()
        assert code is not grpc.StatusCode.OK
        return rpc.error_of(
            grpc.aio.AioRpcError(
                code, grpc.aio.Metadata(), trailing, await self.call.details(), None
            )
        )


@asynccontextmanager
async def dialled(client: Client, name: str, **hello: Any) -> AsyncIterator[RawDrafter]:
    """A drafter that has said Hello."""
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
