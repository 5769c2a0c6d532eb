"""Random and broken messages at the gateway, over gRPC and from browsers.

Each call ends with a clear status, and a request beside it gets its text. A verifier also has the
RPCs for health and reflection, so `tests/verifier/test_hostile_calls.py` tests these RPCs.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from google.protobuf import json_format
from google.rpc import code_pb2
from hypothesis import given
from hypothesis import strategies as st

from outrider.process.network import rpc
from outrider.v1 import common_pb2
from outrider.v1.generation_pb2 import DESCRIPTOR, Chat, ChatMessage, GenerateTextRequest
from tests.gateway.gateway_rig import Rig, echo_within_limit
from tests.gateway.test_connect import JSON, PROTO, WEB, post, reason, retry_class
from tests.hostile_messages import fuzzing, messages, wire
from tests.raw_calls import call_raw, methods
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY = common_pb2.SamplingParams(temperature=0.0)
CHAT = Chat(messages=[ChatMessage(role="user", content="hi")])
VALID = [
    request.SerializeToString()
    for request in (
        GenerateTextRequest(prompt="if x", max_tokens=8, sampling=GREEDY, stop=["y"]),
        GenerateTextRequest(chat=CHAT, top_logprob_count=2, prompt_logprob_count=1),
        GenerateTextRequest(prompt="if x", grammar=common_pb2.Grammar(regex="a+")),
    )
]
[METHOD] = methods(DESCRIPTOR)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def channel(shared_rig: Rig) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.dial(shared_rig.gateway.grpc_address) as channel:
        yield channel


async def check_good_request(rig: Rig) -> None:
    """Check that a well-formed request gets its text, which repeats the prompt."""
    answer = await rig.http.post("/v1/completions", json={"prompt": "if x", "temperature": 0})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "if x"


@fuzzing(60)
@given(request_=wire(GenerateTextRequest, VALID))
async def test_the_rpc_takes_or_clearly_refuses_any_message(
    rig: Rig, channel: grpc.aio.Channel, request_: bytes
) -> None:
    rig.script.answer = echo_within_limit
    await asyncio.gather(check_good_request(rig), call_raw(channel, METHOD, [request_]))
    await until(lambda: rig.script.running == 0)


def as_json(message: GenerateTextRequest) -> bytes:
    return json_format.MessageToJson(message).encode()


ENCODED = {
    JSON: messages(GenerateTextRequest).map(as_json) | st.binary(),
    PROTO: wire(GenerateTextRequest, VALID),
    WEB: wire(GenerateTextRequest, VALID),
}


@pytest.mark.parametrize("encoding", ENCODED)
@fuzzing(40)
@given(data=st.data())
async def test_a_browsers_message_is_answered_or_clearly_refused(
    rig: Rig, encoding: str, data: st.DataObject
) -> None:
    rig.script.answer = echo_within_limit
    message = data.draw(ENCODED[encoding])
    # Bit 0 stays unset. It marks a compressed message, and where no encoding was agreed on, the
    # protocols require INTERNAL.
    flags = data.draw(st.sampled_from([0, 0, 0, 0, 2, 128, 254]))
    length = data.draw(st.sampled_from([*[len(message)] * 6, 0, len(message) + 1, 2**32 - 1]))
    _, status = await post(rig, encoding, struct.pack(">BI", flags, length) + message)
    assert status.code not in (code_pb2.INTERNAL, code_pb2.UNKNOWN), status
    if status.code:
        expected = reason(status).kind.retry.name.lower()
        assert retry_class(status) == expected
    await check_good_request(rig)
    await until(lambda: rig.script.running == 0)
