"""A relay in front of a verifier makes one of the two sides seem to speak another version."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf import duration_pb2 as _duration
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from outrider.process.network import rpc
from outrider.v1 import common_pb2, drafts_pb2, verifier_pb2

Part = Literal["drafter", "gateway", "verifier"]
Version = Literal["older", "newer"]

_FILES = (_duration, common_pb2, drafts_pb2, verifier_pb2)
_SERVICE = "outrider.v1.VerifierService"
# The parts that an older version lacks.
_REMOVED = {
    "Hello": {
        "capabilities",
        "feature_request",
        "placement",
        "max_sequence_count",
        "requires_grammar",
        "weights_version",
    },
    "Welcome": {"capabilities", "feature_width"},
    "StepBatch": {"features"},
    "Opened": {"grammar", "prediction_token_ids", "traceparent", "tree_tokens"},
    "Proposal": {"parents", "distributions", "confidences", "draft_duration"},
    "Verdict": {"window", "traceparent", "tree_tokens"},
    "GenerateTokensRequest": {"committed_token_ids", "model_fingerprint", "prediction_token_ids"},
    "GenerateTokensResponse": {"prompt_logprobs", "side_draft_token_count"},
    "GetModelResponse": {"load", "server_version", "model_fingerprint"},
}


def _make_older(file: FileDescriptorProto) -> None:
    """Remove the fields of `_REMOVED` from a file of the protos."""
    for message in file.message_type:
        removed = _REMOVED.get(message.name, ())
        kept = [field for field in message.field if field.name not in removed]
        # An optional field is the only field of its own oneof, and no oneof may be empty.
        indices = {field.oneof_index for field in kept if field.HasField("oneof_index")}
        oneofs = [message.oneof_decl[i] for i in sorted(indices)]
        for field in kept:
            if field.HasField("oneof_index"):
                field.oneof_index = sorted(indices).index(field.oneof_index)
        del message.field[:]
        message.field.extend(kept)
        del message.oneof_decl[:]
        message.oneof_decl.extend(oneofs)


def _make_newer(file: FileDescriptorProto) -> None:
    """Add a field to each of Outrider's messages in a file of the protos.

    Each direction of the draft stream also gets a new kind of message.
    """
    for message in file.message_type if file.package == "outrider.v1" else ():
        message.field.add(
            name="later",
            number=2000,
            type=FieldDescriptorProto.TYPE_STRING,
            label=FieldDescriptorProto.LABEL_OPTIONAL,
        )
        if message.name in ("StreamDraftsRequest", "StreamDraftsResponse"):
            message.field.add(
                name="later_kind",
                number=2047,
                type=FieldDescriptorProto.TYPE_MESSAGE,
                type_name=".outrider.v1.Skip",
                label=FieldDescriptorProto.LABEL_OPTIONAL,
                oneof_index=0,
            )


def _grow(message: Any) -> None:
    """Set the fields and the values that only a newer version knows."""
    message.later = "a field of a later version"
    if message.DESCRIPTOR.name == "Hello":
        message.distributions.append(99)
        message.capabilities.append(99)
    for field, value in message.ListFields():
        if field.message_type is not None and "later" in field.message_type.fields_by_name:
            for each in value if field.is_repeated else [value]:
                _grow(each)


class _Relay(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # only stubs give it types
    """Passes calls to a verifier, and removes or adds the parts that only a newer version knows.

    One side, the verifier or its callers, is newer than the other side.
    """

    def __init__(self, channel: grpc.aio.Channel, version: Version, part: Part) -> None:
        pool = descriptor_pool.DescriptorPool()
        for module in _FILES:
            file = descriptor_pb2.FileDescriptorProto()
            module.DESCRIPTOR.CopyToProto(file)
            (_make_older if version == "older" else _make_newer)(file)
            pool.Add(file)
        self._methods = pool.FindServiceByName(_SERVICE).methods_by_name
        self._channel = channel
        self._grows_requests = version == "newer" and part != "verifier"
        self._grows_responses = version == "newer" and part == "verifier"

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of any method; messages are bytes."""
        method: str = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(partial(self._pass_on, method))

    async def _pass_on(
        self, path: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        method = self._methods[path.rpartition("/")[2]]
        sent = _changed(requests, method.input_type, grows=self._grows_requests)
        call: Any = self._channel.stream_stream(path, None, None)(sent)
        try:
            async for message in _changed(call, method.output_type, grows=self._grows_responses):
                yield message
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))
        finally:
            call.cancel()


async def _changed(
    messages: AsyncIterator[bytes], kind: Any, *, grows: bool
) -> AsyncIterator[bytes]:
    """Yield the messages in the other version.

    On the draft stream, a newer version adds a message of an unknown kind after each message.
    """
    made: Callable[..., Any] = message_factory.GetMessageClass(kind)
    async for content in messages:
        message = made()
        message.ParseFromString(content)
        message.DiscardUnknownFields()
        if grows:
            _grow(message)
        yield message.SerializeToString()
        if grows and "later_kind" in kind.fields_by_name:
            yield made(later_kind={"sequence_id": 1}).SerializeToString()


@asynccontextmanager
async def relaying(verifier: str, version: Version, part: Part) -> AsyncIterator[str]:
    """Run a relay to the verifier, where `part` speaks the other version; yield its address."""
    async with rpc.dial(verifier) as channel:
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        server.add_generic_rpc_handlers([_Relay(channel, version, part)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
        await server.stop(None)
