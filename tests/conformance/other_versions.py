"""A drafter that speaks an older or a newer version of the contract, made from this one's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf import duration_pb2 as _duration
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from outrider.v1 import common_pb2, drafts_pb2, verifier_pb2

_FILES = (_duration, common_pb2, drafts_pb2, verifier_pb2)
_PACKAGE = "outrider.v1."
# What an older version lacks.
_REMOVED = {
    "Hello": {"capabilities", "placement", "max_sequence_count"},
    "Welcome": {"capabilities"},
    "Opened": {"grammar", "prediction_token_ids", "traceparent", "tree_tokens"},
    "Proposal": {"parents", "distributions", "confidences", "draft_duration"},
    "Verdict": {"window", "traceparent", "tree_tokens"},
}


def _messages_of(file: FileDescriptorProto) -> dict[str, DescriptorProto]:
    return {message.name: message for message in file.message_type}


def older(file: FileDescriptorProto) -> None:
    """Remove what an older version lacks from a file of the protos."""
    for name, message in _messages_of(file).items():
        kept = [one for one in message.field if one.name not in _REMOVED.get(name, ())]
        del message.field[:]
        message.field.extend(kept)


def newer(file: FileDescriptorProto) -> None:
    """Add fields, enum values and a kind of message to a file of the protos."""
    for name, message in _messages_of(file).items():
        if name in ("Hello", "Proposal"):
            field = message.field.add(name="later", number=2000)
            field.type = FieldDescriptorProto.TYPE_STRING
            field.label = FieldDescriptorProto.LABEL_OPTIONAL
        if name == "StreamDraftsRequest":
            kind = message.field.add(name="later", number=2047, oneof_index=0)
            kind.type = FieldDescriptorProto.TYPE_MESSAGE
            kind.type_name = f".{_PACKAGE}Skip"
            kind.label = FieldDescriptorProto.LABEL_OPTIONAL
    for enum in file.enum_type:
        if enum.name in ("DraftDistribution", "Capability"):
            enum.value.add(name=f"{enum.name}_LATER", number=99)


def compiled(change: Callable[[FileDescriptorProto], None]) -> Callable[[str], Any]:
    """The classes, by name, of the changed protos."""
    pool = descriptor_pool.DescriptorPool()
    for module in _FILES:
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        change(file)
        pool.Add(file)  # type: ignore[no-untyped-call]  # only upb's pool lacks types
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(_PACKAGE + name))


class OtherDrafter:
    """Guesses what followed the last two tokens before, in messages of another version."""

    def __init__(self, address: str, name: str, fingerprint: str) -> None:
        self.name = name
        self.is_newer = name == "newer"
        self._classes = compiled(newer if self.is_newer else older)
        self._hello = self._classes("Hello")(
            drafter_id=name, family=name, tokenizer_fingerprint=fingerprint, max_draft_tokens=8
        )
        self._address = address
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._texts: dict[int, list[int]] = {}

    async def run(self) -> None:
        """Draft until the task is cancelled."""
        request, response = (
            self._classes(name) for name in ("StreamDraftsRequest", "StreamDraftsResponse")
        )
        if self.is_newer:
            self._hello.later = "a field of a later version"
            self._hello.distributions.append(99)
            self._hello.capabilities.append(99)
        self._outbox.put_nowait(request(hello=self._hello))
        if self.is_newer:
            self._outbox.put_nowait(request(later={"sequence_id": 1}))
        async with grpc.aio.insecure_channel(self._address) as channel:
            method = channel.stream_stream(
                "/outrider.v1.VerifierService/StreamDrafts",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            async for message in method(self._requests()):
                for asked in self._follow(message.step):
                    self._outbox.put_nowait(request(drafts=self._answer(asked)))

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            yield await self._outbox.get()

    def _follow(self, step: Any) -> list[Any]:
        """Apply a step; returns the messages to answer."""
        for opened in step.opened:
            self._texts[opened.sequence_id] = list(opened.token_ids)
        for verdict in step.verdicts:
            text = self._texts[verdict.sequence_id]
            fresh = verdict.committed_length - len(text)
            text += list(verdict.new_token_ids)[len(verdict.new_token_ids) - max(fresh, 0) :]
        for closed in step.closed:
            del self._texts[closed.sequence_id]
        asked = [*step.opened, *step.verdicts]
        return [one for one in asked if one.sequence_id in self._texts]

    def _answer(self, asked: Any) -> Any:
        text = self._texts[asked.sequence_id]
        place = {"sequence_id": asked.sequence_id, "base_length": len(text)}
        batch = self._classes("DraftBatch")()
        runs = self._continuations(text, asked.draft_tokens)
        if runs:
            proposal = batch.proposals.add(**place, token_ids=runs[0])
            if self.is_newer:
                self._grow(proposal, runs[1:2])
        if not runs or len(runs[0]) < asked.draft_tokens:
            batch.skips.add(**place)
        return batch

    def _grow(self, proposal: Any, branches: list[list[int]]) -> None:
        """Add another continuation as a branch, confidences, and a field of a later version."""
        proposal.later = "a field of a later version"
        proposal.parents.extend(range(len(proposal.token_ids)))
        for run in branches:
            at = len(proposal.token_ids)
            proposal.parents.extend([0, *range(at + 1, at + len(run))])
            proposal.token_ids.extend(run)
        proposal.confidences.extend([0.5] * len(proposal.token_ids))

    def _continuations(self, text: list[int], count: int) -> list[list[int]]:
        """What followed the last two tokens at earlier places, the newest first."""
        runs: dict[int, list[int]] = {}
        for start in range(len(text) - 3, -1, -1):
            if count and text[start : start + 2] == text[-2:]:
                run = text[start + 2 : start + 2 + count]
                runs.setdefault(run[0], run)
        return list(runs.values())
