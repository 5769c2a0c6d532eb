"""The gateway against a verifier that answers with random and broken messages.

Each request ends with an answer or an error in OpenAI's form. At the same time, an honest
verifier's requests get their texts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from gateway.metrics import GatewayMetrics
from gateway.server import Gateway, running
from gateway.text.prompts import Prompts
from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2
from outrider.process.network import rpc, rpc_errors
from outrider.protocol.wire import model as wire_model
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, verifier_pb2
from tests.gateway.gateway_rig import echo_within_limit, settings
from tests.gateway.scripted_verifier import Script, ready, serving
from tests.hostile_messages import fuzzing, wire
from tests.raw_calls import check_details
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

Message = token_streams_pb2.StreamTokensResponse
Part = token_streams_pb2.TokensPart
SOURCE = common_pb2.TOKEN_SOURCE_PLAIN
DOMAIN = "outrider.dev"


class Liar:
    """A verifier that answers a request with arbitrary bytes, and then ends the request."""

    def __init__(self, prompts: Prompts) -> None:
        self.info = ready(prompts.fingerprint, model_id="lies")
        self.tell_the_truth()

    def tell_the_truth(self) -> None:
        self.model = wire_model.model_to_proto(self.info).SerializeToString()
        self.lies: list[bytes] = []

    async def get_model(self, request: object, context: object) -> bytes:
        return self.model

    async def stream_tokens(
        self, requests: AsyncIterator[token_streams_pb2.StreamTokensRequest], context: object
    ) -> AsyncIterator[bytes]:
        async for request in (each async for message in requests for each in message.requests):
            if not request.HasField("generate"):
                continue
            for lie in self.lies:
                yield aimed(lie, request.call_id)
            ending = verifier_pb2.GenerateTokensResponse(
                finish_reason=common_pb2.FINISH_REASON_STOP
            )
            yield Message(parts=[Part(call_id=request.call_id, tokens=ending)]).SerializeToString()

    def serve(self, server: grpc.aio.Server) -> None:
        """Add both services of a verifier to the server."""
        get_model = grpc.unary_unary_rpc_method_handler(
            self.get_model, verifier_pb2.GetModelRequest.FromString
        )
        stream_tokens = grpc.stream_stream_rpc_method_handler(
            self.stream_tokens, token_streams_pb2.StreamTokensRequest.FromString
        )
        for service, methods in (
            ("outrider.v1.VerifierService", {"GetModel": get_model}),
            ("outrider.internal.v1.TokenStreamService", {"StreamTokens": stream_tokens}),
        ):
            handler = grpc.method_handlers_generic_handler(service, methods)
            server.add_generic_rpc_handlers((handler,))


def aimed(lie: bytes, call_id: int) -> bytes:
    """Return the message with each small call id replaced by the id of a running call."""
    try:
        message = Message.FromString(lie)
    except DecodeError:
        return lie
    for part in message.parts:
        if part.call_id <= 12:
            part.call_id = call_id
    return message.SerializeToString()


def valid_messages() -> Iterator[Message]:
    """Yield messages of an honest verifier: tokens with all their fields, and an error."""
    logprob = common_pb2.TokenLogprob(logprob=-1.0, top_token_ids=[5], top_logprobs=[-1.0], rank=1)
    tokens = verifier_pb2.GenerateTokensResponse(
        token_ids=[5], sources=[SOURCE], logprobs=[logprob], prompt_logprobs=[logprob]
    )
    yield Message(parts=[Part(call_id=1, tokens=tokens)])
    stats = common_pb2.SpeculationStats(forward_count=1, acceptance_histogram=[1, 2])
    last = verifier_pb2.GenerateTokensResponse(finish_reason=SOURCE, stats=stats)
    yield Message(parts=[Part(call_id=1, tokens=last)])
    error = OutriderError(Reason.OVERLOADED, "full", "n", 1.0, {"a": "b"})
    yield Message(parts=[Part(call_id=1, status=rpc_errors.status_of(error).SerializeToString())])


VALID = [message.SerializeToString() for message in valid_messages()]


@st.composite
def statuses(draw: st.DrawFn) -> bytes:
    """Return a message with an error whose details have random and extreme values."""
    odd = ["content-length", "set-cookie", "a\r\nb", "\0", "x" * 50_000, "\N{SNOWMAN}" * 9_000]
    text = st.text(max_size=6) | st.sampled_from(odd)
    status = status_pb2.Status(code=draw(st.integers(-1, 20)), message=draw(text))
    info = error_details_pb2.ErrorInfo(
        domain=DOMAIN,
        reason=draw(st.sampled_from(list(Reason.__members__))),
        metadata=draw(st.dictionaries(text, text, max_size=3)),
    )
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds = draw(st.integers(-9, 9) | st.sampled_from([-(2**63), 2**63 - 1]))
    retry.retry_delay.nanos = draw(st.integers(-(2**31), 2**31 - 1))
    field = error_details_pb2.BadRequest.FieldViolation(field=draw(text))
    for detail in (info, retry, error_details_pb2.BadRequest(field_violations=[field])):
        if draw(st.booleans()) or detail is info:
            status.details.add().Pack(detail)
    part = Part(call_id=1, status=status.SerializeToString())
    return Message(parts=[part]).SerializeToString()


class Rig:
    """A gateway with an honest verifier and a liar, which serves the model "lies"."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient, liar: Liar) -> None:
        self.gateway = gateway
        self.http = http
        self.liar = liar
        self.liar_replica = gateway.router.replicas[0]

    async def ask(self, model: str, **body: Any) -> httpx.Response:
        wanted = {"model": model, "prompt": "if x", "temperature": 0, "max_tokens": 8}
        return await self.http.post("/v1/completions", json=wanted | body)

    async def check_honest(self) -> None:
        """Check that the honest verifier's requests get their text."""
        answer = await self.ask("models/target")
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "if x"

    async def until_well(self) -> None:
        """Wait until the gateway uses the liar again, now that it tells the truth."""
        replica = self.liar_replica
        replica.poll_now.set()
        await until(lambda: replica.problem is None and replica.info == self.liar.info)
        await until(lambda: not replica.sequences)
        # The first request may still meet a lie that was on its way.
        await until(self.answers)

    async def answers(self) -> bool:
        """Return whether a request for the liar's model is answered."""
        return (await self.ask("lies")).status_code == 200


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lied_to(prompts: Prompts) -> AsyncIterator[Rig]:
    liar = Liar(prompts)
    server = rpc.Server()
    liar.serve(server.grpc)
    [port] = await server.start("127.0.0.1:0")
    async with (
        serving(Script(ready(prompts.fingerprint), echo_within_limit)) as honest,
        running(
            settings(f"127.0.0.1:{port}", honest, drain_seconds=0), GatewayMetrics()
        ) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=30) as http,
    ):
        rig = Rig(gateway, http, liar)
        await until(lambda: all(replica.problem is None for replica in gateway.router.replicas))
        yield rig
    await server.stop(0)


def check_error(answer: httpx.Response) -> None:
    """Check that an error is a single object in OpenAI's form, with the status of its code."""
    assert "set-cookie" not in answer.headers
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    reason = Reason[error["code"].upper()]
    assert answer.status_code == reason.kind.http
    # The gateway writes this itself if it meets something unexpected.
    assert "failed; " not in error["message"]
    assert error["type"] == reason.kind.openai_type


def not_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def check_events(text: str) -> None:
    """Check that a stream has events of JSON, and ends with [DONE]."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        json.loads(event.removeprefix("data: "), parse_constant=not_json)


ANSWERS = st.lists(
    st.one_of(wire(Message, VALID), st.sampled_from(VALID), statuses()), min_size=1, max_size=3
)


@fuzzing(80)
@given(ANSWERS, st.booleans())
async def test_any_answer_of_a_verifier_gives_an_answer_or_openais_error(
    lied_to: Rig, lies: list[bytes], stream: bool
) -> None:
    lied_to.liar.lies = lies
    answer, _ = await asyncio.gather(
        lied_to.ask("lies", stream=stream, logprobs=1, speculation={"metrics": True}),
        lied_to.check_honest(),
    )
    if answer.status_code != 200:
        check_error(answer)
    elif stream:
        check_events(answer.text)
    else:
        json.loads(answer.text, parse_constant=not_json)
    lied_to.liar.tell_the_truth()
    await lied_to.until_well()


@fuzzing(40)
@given(ANSWERS)
async def test_any_answer_of_a_verifier_gives_grpc_callers_a_status_of_the_table(
    lied_to: Rig, lies: list[bytes]
) -> None:
    lied_to.liar.lies = lies
    request = generation_pb2.GenerateTextRequest(model="lies", prompt="if x", max_tokens=8)
    async with rpc.dial(lied_to.gateway.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        try:
            async for _ in stub.GenerateText(request):
                pass
        except grpc.aio.AioRpcError as failure:
            check_details(failure)
    lied_to.liar.tell_the_truth()
    await lied_to.until_well()


MODEL = wire_model.model_to_proto(ready("f" * 64, model_id="lies")).SerializeToString()


@fuzzing(40)
@given(wire(verifier_pb2.GetModelResponse, [MODEL]))
async def test_any_model_of_a_verifier_leaves_the_others_in_service(
    lied_to: Rig, model: bytes
) -> None:
    lied_to.liar.model = model
    await lied_to.liar_replica.refresh(lied_to.gateway.router._fingerprint)
    await lied_to.check_honest()
    for path in ("/readyz", "/v1/models"):
        assert (await lied_to.http.get(path)).status_code == 200
    lied_to.liar.tell_the_truth()
    await lied_to.until_well()
