"""Unknown enum values are read as the protos say, or refused; they cause no unexpected error.

The enums and their fields come from the protos' descriptors, so that the tests include new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from outrider.errors import OutriderError, Reason
from outrider.protocol import draft_messages as d
from outrider.protocol import messages as m
from outrider.protocol.model_info import Stage
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire import model as wire_model
from outrider.protocol.wire import requests as wire_requests
from outrider.protocol.wire import settings as wire_settings
from outrider.v1 import common_pb2, drafts_pb2, generation_pb2, verifier_pb2

VOCAB = 1000
OPENED = drafts_pb2.Opened(token_ids=[1], window=drafts_pb2.Window(token_count=1, depth=1))
HELLO = drafts_pb2.Hello(drafter_id="d", family="f", tokenizer_fingerprint="t", max_draft_tokens=1)
# For each kind of message from the network, a valid message and its reader.
READERS: list[tuple[Message, Callable[[Any], object]]] = [
    (
        verifier_pb2.GenerateTokensRequest(prompt_token_ids=[1], max_tokens=1),
        lambda proto: wire_requests.request_from_proto(proto, vocab_size=VOCAB, context_length=100),
    ),
    (verifier_pb2.GenerateTokensResponse(token_ids=[1]), wire_requests.chunk_from_proto),
    (HELLO, wire_drafts.hello_from_proto),
    (drafts_pb2.DraftBatch(), lambda proto: wire_drafts.drafts_from_proto(proto, VOCAB)),
    (
        drafts_pb2.StepBatch(
            opened=[OPENED], verdicts=[drafts_pb2.Verdict()], closed=[drafts_pb2.Closed()]
        ),
        lambda proto: wire_drafts.step_from_proto(proto, VOCAB),
    ),
    (
        verifier_pb2.GetModelResponse(stage=verifier_pb2.MODEL_STAGE_READY),
        wire_model.model_from_proto,
    ),
]
UNKNOWN = (0, 99, -1, 2**31 - 1)


def enum_fields(
    of: Descriptor, path: tuple[FieldDescriptor, ...] = ()
) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Paths to all fields within a message whose type is an enum."""
    for field in of.fields:
        if field.enum_type is not None:
            yield (*path, field)
        elif (
            field.message_type is not None
            and field.message_type.file.package == "outrider.v1"
            and field not in path
        ):
            yield from enum_fields(field.message_type, (*path, field))


CASES = [
    (message, reader, path)
    for message, reader in READERS
    for path in enum_fields(message.DESCRIPTOR)
]


def name(value: object) -> str:
    return ".".join(field.name for field in value) if isinstance(value, tuple) else ""


def with_value(message: Message, path: tuple[FieldDescriptor, ...], value: int) -> Message:
    """A copy of the message with this value at the path."""
    whole = type(message)()
    whole.CopyFrom(message)
    part: Any = whole
    for field in path[:-1]:
        held = getattr(part, field.name)
        if field.is_repeated:
            part = held[0] if len(held) else held.add()
        else:
            held.SetInParent()
            part = held
    if path[-1].is_repeated:
        getattr(part, path[-1].name).append(value)
    else:
        setattr(part, path[-1].name, value)
    return whole


@pytest.mark.parametrize(("message", "reader", "path"), CASES, ids=name)
@pytest.mark.parametrize("value", UNKNOWN)
def test_no_enum_value_causes_an_unexpected_error(
    message: Message, reader: Callable[[Any], object], path: tuple[FieldDescriptor, ...], value: int
) -> None:
    reader(message)
    # Serialized and parsed again, since a setter could refuse the value.
    received = type(message).FromString(with_value(message, path, value).SerializeToString())
    # Only a request can ask for something unknown; all other messages are accepted.
    if isinstance(message, verifier_pb2.GenerateTokensRequest) and value != 0:
        with pytest.raises(OutriderError) as caught:
            reader(received)
        assert caught.value.reason is Reason.INVALID_VALUE
        assert caught.value.field == "speculation.acceptance"
    else:
        reader(received)


def test_the_cases_cover_every_enum() -> None:
    declared = {
        enum.full_name
        for file in (common_pb2, drafts_pb2, generation_pb2, verifier_pb2)
        for enum in file.DESCRIPTOR.enum_types_by_name.values()
    }
    assert {path[-1].enum_type.full_name for _, _, path in CASES} == declared


@pytest.mark.parametrize("value", UNKNOWN)
def test_unknown_values_are_read_as_the_protos_say(value: Any) -> None:
    step = drafts_pb2.StepBatch(
        opened=[drafts_pb2.Opened(token_ids=[1], window=OPENED.window, distribution=value)],
        closed=[drafts_pb2.Closed(reason=value)],
    )
    read = wire_drafts.step_from_proto(step, VOCAB)
    assert read.opened[0].distribution is m.DraftDistribution.ONE_HOT
    assert read.closed == [d.Closed(0)]
    info = wire_model.model_from_proto(verifier_pb2.GetModelResponse(stage=value))
    assert info.stage is Stage.LOADING
    hello = drafts_pb2.Hello(
        distributions=[value, drafts_pb2.DRAFT_DISTRIBUTION_COUPLED], capabilities=[value]
    )
    hello.MergeFrom(HELLO)
    assert wire_drafts.hello_from_proto(hello).distributions == {
        m.DraftDistribution.ONE_HOT,
        m.DraftDistribution.COUPLED,
    }
    rules = [value, common_pb2.ACCEPTANCE_RULE_BLOCK]
    response = verifier_pb2.GenerateTokensResponse(
        token_ids=[1, 2],
        sources=[value, common_pb2.TOKEN_SOURCE_BONUS],
        finish_reason=value,
        stats=common_pb2.SpeculationStats(rules=rules),
    )
    chunk = wire_requests.chunk_from_proto(response)
    assert chunk.sources == [m.TokenSource.PLAIN, m.TokenSource.BONUS]
    assert chunk.finish_reason is (m.FinishReason.STOP if value else None)
    assert chunk.stats is not None
    assert chunk.stats.rules == [m.AcceptanceRule.BLOCK]


@pytest.mark.parametrize(
    ("data", "field", "message"),
    [
        (
            b"",
            "grammar",
            "must have one of json_schema, json_object, regex, ebnf, choice, structural_tag;",
        ),
        (b"\x3a\x02hi", "grammar.7", "a field with the number 7, which this version does not know"),
    ],
)
def test_requests_refuse_an_unknown_grammar_and_drafters_ignore_it(
    data: bytes, field: str, message: str
) -> None:
    """A request without its grammar would get free text where the caller asked for a form."""
    grammar = common_pb2.Grammar.FromString(data)
    request = verifier_pb2.GenerateTokensRequest(
        prompt_token_ids=[1], max_tokens=1, grammar=grammar
    )
    with pytest.raises(OutriderError, match=message) as caught:
        wire_requests.request_from_proto(request, vocab_size=VOCAB, context_length=100)
    assert caught.value.field == field
    step = drafts_pb2.StepBatch(
        opened=[drafts_pb2.Opened(token_ids=[1], window=OPENED.window, grammar=grammar)]
    )
    assert wire_drafts.step_from_proto(step, VOCAB).opened[0].grammar is None


@pytest.mark.parametrize("field", ["drafter_id", "drafter_family"])
def test_a_drafters_name_that_is_set_is_not_empty(field: str) -> None:
    """An empty name would be read as no restriction."""
    options = common_pb2.SpeculationOptions(**{field: ""})
    with pytest.raises(OutriderError, match=f"speculation.{field} must have at least 1 character"):
        wire_settings.speculation_from_proto(options)
