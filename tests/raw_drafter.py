"""A drafter on whose stream a test sends any bytes or messages, over real gRPC."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from outrider.errors import OutriderError
from outrider.process.network import rpc_errors
from outrider.v1 import drafts_pb2, verifier_pb2


class RawDrafter:
    """The drafter's end of a draft stream, driven by a test. At first it has sent nothing."""

    def __init__(self, channel: grpc.aio.Channel, name: str, **hello: Any) -> None:
        parse = verifier_pb2.StreamDraftsResponse.FromString
        method = "/outrider.v1.VerifierService/StreamDrafts"
        call: Any = channel.stream_stream(method, None, parse)
        self.call = call()
        names = {"drafter_id": name, "family": "raw", "tokenizer_fingerprint": "f"}
        self._hello = drafts_pb2.Hello(**{**names, "max_draft_tokens": 8, **hello})

    async def send(self, data: bytes) -> None:
        """Send bytes as a message."""
        await self.call.write(data)

    async def say(self, **message: Any) -> None:
        """Send a message with these fields."""
        await self.send(verifier_pb2.StreamDraftsRequest(**message).SerializeToString())

    async def introduce(self) -> None:
        """Send the Hello."""
        await self.say(hello=self._hello)

    async def hear(self) -> verifier_pb2.StreamDraftsResponse:
        """Return the verifier's next message, or EOF; wait for at most 30 s."""
        return await asyncio.wait_for(self.call.read(), 30)

    async def welcomed(self) -> None:
        """Send the Hello and await the welcome; raise OutriderError if it is refused."""
        await self.introduce()
        try:
            response = await self.hear()
        except grpc.aio.AioRpcError as failure:
            raise rpc_errors.error_of(failure) from None
        assert response.HasField("welcome")

    async def error(self) -> OutriderError:
        """Read and drop messages until the stream ends; return the error that ended it."""
        with suppress(grpc.aio.AioRpcError):
            while await self.hear() != grpc.aio.EOF:  # type: ignore[attr-defined]  # grpc-stubs lack it
                pass
        code = await self.call.code()
        assert code is not grpc.StatusCode.OK
        trailing = await self.call.trailing_metadata()
        details = await self.call.details()
        failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None)
        return rpc_errors.error_of(failure)
