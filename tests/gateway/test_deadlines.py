"""Work for which nobody waits any more ends, at the gateway and at the verifier."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from gateway.generation.admission import ClientTimeout
from gateway.http.openai.calls import client_timeout
from outrider.errors import OutriderError
from outrider.protocol.messages import TokenRequest
from outrider.v1 import generation_pb2
from tests.gateway.gateway_rig import Rig, events_of
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = {"prompt": "if x", "temperature": 0, "max_tokens": 64}
SHORT_S = 1.0


@pytest.fixture
def slow(rig: Rig) -> Rig:
    """Return the rig, whose verifier writes for 6 s."""
    rig.says("one two three " * 40, pause_s=0.05)
    return rig


def late(rig: Rig) -> float:
    """Return how many sequences ended at their deadline."""
    failed: Any = rig.gateway.metrics.failed.labels("models/target", "deadline_exceeded")
    return float(failed._value.get())


async def ended(rig: Rig, late_before: float) -> None:
    """Wait until the verifier has nothing to do, and check that the deadline ended its work."""
    await until(lambda: rig.script.running == 0, timeout_s=4.0)
    assert rig.script.cancelled == 1
    await until(lambda: late(rig) == late_before + 1)


async def test_an_answer_ends_at_its_timeout(slow: Rig) -> None:
    before = late(slow)
    answer = await slow.http.post("/v1/completions", json=BODY | {"timeout": SHORT_S})
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
    await ended(slow, before)


async def test_a_stream_ends_at_its_timeout_with_an_error(slow: Rig) -> None:
    before = late(slow)
    body = BODY | {"timeout": SHORT_S, "stream": True}
    answer = await slow.http.post("/v1/completions", json=body)
    first, *_, last = events_of(answer)
    assert "choices" in first
    assert last["error"]["code"] == "deadline_exceeded"
    await ended(slow, before)


async def test_a_call_ends_at_its_deadline(slow: Rig) -> None:
    before = late(slow)
    request = generation_pb2.GenerateTextRequest(prompt="x")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [each async for each in slow.generation.GenerateText(request, timeout=SHORT_S)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await ended(slow, before)


async def test_a_deadline_ends_a_sequence_whose_caller_does_not_read(slow: Rig) -> None:
    admission = slow.gateway.generation.admission
    admitted = admission.admit("models/target", "", 1, ClientTimeout(SHORT_S))
    tokens = slow.gateway.router.replicas[0].tokens
    chunks = tokens.generate(TokenRequest([5, 6], 64), admitted.ends_at)
    await anext(chunks)
    # Nothing reads the other chunks.
    await until(lambda: slow.script.running == 0, timeout_s=4.0)
    with pytest.raises(OutriderError, match="within the request's timeout"):
        _ = [chunk async for chunk in chunks]
    admitted.close()


async def test_an_answer_in_time_is_not_touched(rig: Rig) -> None:
    for seconds, stream in ((30, False), (30.5, True), (1e308, False)):
        given = {"timeout": seconds, "stream": stream}
        answer = await rig.http.post("/v1/completions", json=BODY | given)
        assert answer.status_code == 200
    request = generation_pb2.GenerateTextRequest(prompt="if x")
    texts = [each.text async for each in rig.generation.GenerateText(request, timeout=30.0)]
    assert "".join(texts) == "if x"
    await asyncio.sleep(0)
    assert not rig.gateway.router.replicas[0].sequences


@pytest.mark.parametrize("given", [0.9, "5", True])
async def test_a_timeout_is_a_number_of_seconds(rig: Rig, given: Any) -> None:
    answer = await rig.http.post("/v1/completions", json=BODY | {"timeout": given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout"


@pytest.mark.parametrize(
    ("given", "header", "stream", "expected"),
    [
        (None, None, False, ClientTimeout()),
        (5.0, None, False, ClientTimeout(5.0)),
        (5.0, None, True, ClientTimeout(5.0)),
        (None, "600", False, ClientTimeout(600.0)),
        # The client waits this long for the next bytes, not for the whole answer.
        (None, "600", True, ClientTimeout(None, 600.0)),
        (5.0, "3.5", False, ClientTimeout(3.5)),
        (5.0, "3.5", True, ClientTimeout(5.0, 3.5)),
        (None, "none", False, ClientTimeout()),
        (None, "-1", True, ClientTimeout()),
        (None, "inf", True, ClientTimeout()),
        (None, "nan", True, ClientTimeout()),
    ],
)
async def test_patience_is_what_the_body_and_openais_clients_say(
    given: float | None, header: str | None, stream: bool, expected: ClientTimeout
) -> None:
    for name in ("x-stainless-read-timeout", "x-stainless-timeout"):
        headers = {} if header is None else {name: header}
        assert client_timeout(given, headers, stream=stream) == expected
