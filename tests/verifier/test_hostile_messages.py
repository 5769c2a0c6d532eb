"""Random and changed messages in both directions of the draft stream.

Each message is taken or refused, and no error is unexpected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fake_model import VOCAB, Client, ScriptedDrafter, make_engine
from google.protobuf.message import DecodeError
from hostile_messages import fuzzing, messages, wire
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.families.ngram import NgramFamily
from drafter_svc.pools.memory import NgramOptions
from outrider.drafter.session import DraftSession
from outrider.errors import OutriderError, Reason
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.protocol.draft_messages import (
    Closed,
    DraftBatch,
    Hello,
    Opened,
    Proposal,
    Skip,
    StepBatch,
    Verdict,
    Window,
)
from outrider.protocol.messages import DraftDistribution, SamplingParams, TokenRequest
from outrider.protocol.model_info import Placement
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire import model as wire_model
from outrider.protocol.wire import requests as wire_requests
from outrider.v1 import verifier_pb2

BOUNDED = fuzzing(60)
GREEDY = SamplingParams(temperature=0.0)
PLACEMENT = Placement("cpu", "h", "cpu", (0, 1), 0, "x")
HELLO = Hello("d", "f", "t", 8, frozenset(DraftDistribution), PLACEMENT)
PROMPT = [1, 2]
CHAIN = Proposal(1, len(PROMPT), [1, 2])
TREE = Proposal(1, len(PROMPT), [1, 3], [0, 1], draft_seconds=0.1)
DRAFTS = DraftBatch([CHAIN, TREE], [Skip(2, len(PROMPT))])
OPENED = Opened(
    1,
    [1, 2, 3, 1, 2],
    GREEDY,
    DraftDistribution.ONE_HOT,
    Window(16, 4),
    2,
    "t",
    grammar=Grammar(GrammarKind.REGEX, "a"),
)
VERDICTS = [Verdict(1, 6, [3], 1, 2), Verdict(1, 7, [4], 1, 2, Window(8, 4))]
STEP = StepBatch([OPENED], VERDICTS, [Closed(1)])


def from_drafter(**fields: object) -> bytes:
    """A drafter's message, as bytes."""
    return verifier_pb2.StreamDraftsRequest(**fields).SerializeToString()  # type: ignore[arg-type]


SAID_BY_DRAFTERS = [
    from_drafter(hello=wire_drafts.hello_to_proto(HELLO)),
    from_drafter(drafts=wire_drafts.drafts_to_proto(DRAFTS)),
]
SAID_BY_VERIFIERS = [
    verifier_pb2.StreamDraftsResponse(step=wire_drafts.step_to_proto(step)).SerializeToString()
    for step in (STEP, replace(STEP, verdicts=[]), replace(STEP, closed=[]))
]


def take(data: bytes) -> int:
    """Give a drafter's message to a working engine, and check its texts and its pages.

    Returns how many guesses the message added; -1 if it was refused.
    """
    engine, model = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine)
    clients = [Client(), Client()]
    for client in clients:
        engine.submit(TokenRequest(PROMPT, 6, GREEDY), client)
    engine.drain_inbox()
    refused = False
    try:
        request = verifier_pb2.StreamDraftsRequest.FromString(data)
        if request.WhichOneof("message") == "hello":
            wire_drafts.hello_from_proto(request.hello)
        drafts = wire_drafts.drafts_from_proto(request.drafts, VOCAB)
        engine.drafting.on_drafts(drafter.handle, drafts)
    except (DecodeError, OutriderError):
        refused = True
    engine.drain_inbox()
    assert drafter.error is None or drafter.error.reason is Reason.PROTOCOL_VIOLATION
    refused = refused or drafter.error is not None
    assignments = [
        a for sequence in engine.sequences.values() for a in sequence.assignments.values()
    ]
    added = sum(assignment.trie.node_count for assignment in assignments)
    while engine.sequences:
        engine.step()
    assert [client.tokens for client in clients] == [model.greedy(PROMPT, 6)] * 2
    engine.pool.check_integrity()
    return -1 if refused else added


@BOUNDED
@given(wire(verifier_pb2.StreamDraftsRequest, SAID_BY_DRAFTERS))
def test_a_drafters_message_is_taken_or_refused_and_changes_no_text(data: bytes) -> None:
    take(data)


@contextmanager
def refused_by_field() -> Iterator[None]:
    """Check that the block passes, or raises OutriderError with the name of a field."""
    error: OutriderError | None = None
    try:
        yield
    except OutriderError as refusal:
        error = refusal
    assert error is None or error.field


async def draft(said: list[bytes]) -> None:
    """Give a verifier's messages to a drafter; a refusal begins a new stream."""
    session = DraftSession(NgramFamily(NgramOptions(), 100))
    for data in said:
        try:
            response = verifier_pb2.StreamDraftsResponse.FromString(data)
            session.apply(wire_drafts.step_from_proto(response.step, VOCAB))
            batch = await session.round(lambda: False)
            wire_drafts.drafts_from_proto(wire_drafts.drafts_to_proto(batch), VOCAB)
        except (DecodeError, OutriderError):
            session = DraftSession(NgramFamily(NgramOptions(), 100))
        assert session.abandoned_count == 0


@BOUNDED
@given(
    st.lists(
        st.one_of(
            st.sampled_from(SAID_BY_VERIFIERS),
            wire(verifier_pb2.StreamDraftsResponse, SAID_BY_VERIFIERS),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_verifiers_messages_are_followed_or_refused(said: list[bytes]) -> None:
    asyncio.run(draft(said))


@BOUNDED
@given(messages(verifier_pb2.GetModelResponse), messages(verifier_pb2.GenerateTokensResponse))
def test_a_verifiers_answers_to_a_gateway_are_read_or_refused(
    model: verifier_pb2.GetModelResponse, tokens: verifier_pb2.GenerateTokensResponse
) -> None:
    with refused_by_field():
        wire_model.model_to_proto(wire_model.model_from_proto(model))
    wire_requests.chunk_from_proto(tokens)


@BOUNDED
@given(messages(verifier_pb2.GenerateTokensRequest))
def test_a_callers_request_is_taken_or_refused_by_a_field(
    request: verifier_pb2.GenerateTokensRequest,
) -> None:
    request.prompt_token_ids.append(1)
    with refused_by_field():
        wire_requests.request_from_proto(request, vocab_size=VOCAB, context_length=64)


def test_the_unchanged_messages_are_valid() -> None:
    """Otherwise the changed ones would be refused before they reach a trie."""
    assert [take(data) for data in SAID_BY_DRAFTERS] == [0, 3]
