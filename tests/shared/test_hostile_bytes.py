"""Parsers of other processes' bytes refuse an input or keep its meaning.

A message that a parser accepts does not change when it is written and read again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.ingress.json_size import check_size
from gateway.upstream.chunk_checks import check_chunk, check_model
from outrider.errors import OutriderError
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.protocol.wire import drafts, model, requests
from outrider.v1 import drafts_pb2, verifier_pb2
from tests.hostile_messages import changed, fuzzing, wire

VOCABULARY = 1000
MOST_TOKENS = 8
MOST_VALUES = 8
INFO = ModelInfo("a", Stage.READY, vocab_size=VOCABULARY, context_length=500, max_draft_tokens=8)

REQUEST = verifier_pb2.GenerateTokensRequest(
    request_id="a",
    prompt_token_ids=[1, 2, 3],
    max_tokens=8,
    stop_token_ids=[4],
    tenant="b",
    top_logprob_count=1,
    prediction_token_ids=[5],
    committed_token_ids=[6],
    noise_seed=7,
    sampling={
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 8,
        "seed": 9,
        "logit_bias": {3: 1.5},
        "banned_token_ids": [7],
    },
    speculation={"drafter_id": "a", "draft_tokens": 4, "acceptance": 2, "typical_epsilon": 0.25},
    grammar={"choice": {"texts": ["a", "b"]}},
)
CHUNK = verifier_pb2.GenerateTokensResponse(
    token_ids=[1, 2],
    sources=[2, 3],
    drafter_id="a",
    finish_reason=1,
    draft_token_count=3,
    logprobs=[{"logprob": -0.5, "top_token_ids": [1], "top_logprobs": [-0.5], "rank": 1}] * 2,
    stats={"forward_count": 2, "draft_count": 1, "draft_token_count": 3, "max_draft_tokens": 4},
)
HELLO = drafts_pb2.Hello(
    drafter_id="a", family="b", tokenizer_fingerprint="c", max_draft_tokens=4, distributions=[1, 2]
)
SPARSE = drafts_pb2.SparseDistribution(token_ids=[2, 4], probabilities=[0.75, 0.25])
DRAFTS = drafts_pb2.DraftBatch(
    proposals=[
        drafts_pb2.Proposal(
            sequence_id=1,
            base_length=2,
            token_ids=[2, 4],
            parents=[0, 1],
            distributions=[SPARSE, SPARSE],
            confidences=[0.5, 1.0],
        )
    ],
    skips=[drafts_pb2.Skip(sequence_id=3, base_length=4)],
)
WINDOW = drafts_pb2.Window(token_count=8, depth=4)
STEP = drafts_pb2.StepBatch(
    opened=[
        drafts_pb2.Opened(
            sequence_id=1,
            token_ids=[1, 2],
            prompt_token_count=2,
            distribution=1,
            draft_tokens=4,
            window=WINDOW,
            sampling={"temperature": 0.5, "seed": 9},
            grammar={"regex": "a+"},
        )
    ],
    verdicts=[
        drafts_pb2.Verdict(
            sequence_id=1, committed_length=3, new_token_ids=[5], draft_tokens=4, window=WINDOW
        )
    ],
    closed=[drafts_pb2.Closed(sequence_id=1, reason=1)],
)
MODEL = verifier_pb2.GetModelResponse(
    model_id="a", stage=3, vocab_size=8, context_length=9, drafters=[{"drafter_id": "b"}]
)

PARSERS: dict[str, tuple[Message, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "request": (
        REQUEST,
        partial(requests.request_from_proto, vocab_size=VOCABULARY, context_length=500),
        requests.request_to_proto,
    ),
    "hello": (HELLO, drafts.hello_from_proto, drafts.hello_to_proto),
    "drafts": (
        DRAFTS,
        partial(drafts.drafts_from_proto, vocab_size=VOCABULARY),
        drafts.drafts_to_proto,
    ),
    "step": (
        STEP,
        partial(drafts.step_from_proto, vocab_size=VOCABULARY),
        drafts.step_to_proto,
    ),
}
"""An example of each kind of message, with its reader and writer."""


def received(example: Message) -> st.SearchStrategy[bytes]:
    """Return the bytes sent as a message of the example's type."""
    return wire(type(example), [example.SerializeToString()])


@pytest.mark.parametrize("kind", PARSERS)
@fuzzing(150)
@given(data=st.data())
def test_an_accepted_message_means_the_same_when_it_is_written_and_read(
    kind: str, data: st.DataObject
) -> None:
    example, read, write = PARSERS[kind]
    sent = data.draw(received(example))
    try:
        once = write(read(type(example).FromString(sent)))
    except (OutriderError, DecodeError):
        return
    twice = write(read(once))
    for message in (once, twice):
        for proposal in getattr(message, "proposals", ()):
            # The reader makes the duration a float, so it may lose a nanosecond.
            proposal.ClearField("draft_duration")
    assert once == twice


@fuzzing(150)
@given(received(CHUNK))
def test_an_accepted_chunk_has_few_enough_tokens_of_the_vocabulary(sent: bytes) -> None:
    try:
        message = verifier_pb2.GenerateTokensResponse.FromString(sent)
        chunk = requests.chunk_from_proto(message)
        check_chunk(chunk, INFO, MOST_TOKENS, "127.0.0.1:1")
    except (OutriderError, DecodeError):
        return
    assert len(chunk.token_ids) <= MOST_TOKENS
    assert all(token < VOCABULARY for token in chunk.token_ids)


@fuzzing(150)
@given(received(MODEL))
def test_a_ready_model_that_is_accepted_has_a_vocabulary_and_a_context(sent: bytes) -> None:
    try:
        info = model.model_from_proto(verifier_pb2.GetModelResponse.FromString(sent))
        check_model(info)
    except (OutriderError, DecodeError, ValueError):
        return
    assert info.stage is not Stage.READY or min(info.vocab_size, info.context_length) > 0


BODY = b'{"a": [1, "b\\"", {}], "c": []}'
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


def value_count(value: object) -> int:
    """Count the values of parsed JSON as `check_size` does: an empty list or object is 2 values."""
    if isinstance(value, list):
        return 1 + max(1, sum(map(value_count, value)))
    return 1


@fuzzing(150)
@given(changed([BODY]) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_the_values_of_a_body_are_counted_exactly(body: bytes) -> None:
    try:
        # A key that occurs twice counts twice.
        found = json.loads(body, object_pairs_hook=lambda pairs: [value for _, value in pairs])
    except ValueError:
        return
    if not json.detect_encoding(body).startswith("utf-8"):
        return
    is_refused = False
    try:
        check_size(body, MOST_VALUES)
    except OutriderError:
        is_refused = True
    assert is_refused == (value_count(found) > MOST_VALUES)
