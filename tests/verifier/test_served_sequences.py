"""A sequence has the same id in its call's metadata, in its line in the log and in its span."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from outrider.process.network import rpc
from outrider.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from tests.verifier.served_engine import verifier
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub() -> AsyncIterator[verifier_pb2_grpc.VerifierServiceAsyncStub]:
    async with verifier() as served, rpc.dial(served.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


def request(**given: Any) -> verifier_pb2.GenerateTokensRequest:
    known: dict[str, Any] = {"prompt_token_ids": [1, 2], "max_tokens": 5, "ignore_eos": True}
    sampling = common_pb2.SamplingParams(temperature=0.0)
    return verifier_pb2.GenerateTokensRequest(**known | {"sampling": sampling} | given)


async def called(call: Any) -> tuple[str, grpc.StatusCode]:
    """Return the id in a call's metadata, and how it ended."""
    found = dict(await call.initial_metadata())["x-request-id"]
    try:
        _ = [response async for response in call]
    except grpc.aio.AioRpcError as error:
        return found, error.code()
    return found, grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("own", "metadata", "expected"),
    [
        ("field", (), "field"),
        ("", (("x-request-id", "header"),), "header"),
        ("field", (("x-request-id", "header"),), "field"),
        ("", (("x-request-id", "two words"),), None),
        ("", (), None),
    ],
)
@pytest.mark.parametrize(("max_tokens", "outcome"), [(5, "length"), (0, "invalid_value")])
async def test_a_sequence_is_found_by_its_id(
    stub: verifier_pb2_grpc.VerifierServiceAsyncStub,
    spans: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
    own: str,
    metadata: tuple[tuple[str, str], ...],
    expected: str | None,
    max_tokens: int,
    outcome: str,
) -> None:
    caplog.set_level(logging.INFO, "verifier.access")
    asked = request(request_id=own, max_tokens=max_tokens, tenant="t")
    call = stub.GenerateTokens(asked, metadata=(*metadata, ("traceparent", TRACEPARENT)))
    found, code = await called(call)
    assert (found == expected) is (expected is not None)
    assert " " not in found
    assert (code is grpc.StatusCode.OK) is (max_tokens > 0)
    await until(lambda: caplog.records)
    [record] = [each for each in caplog.records if each.name == "verifier.access"]
    fields = vars(record)["fields"]
    assert (fields["request_id"], fields["tenant"], fields["status"]) == (found, "t", outcome)
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (2, max_tokens)
    await until(lambda: any(each.name == "generate_tokens" for each in spans.get_finished_spans()))
    [span] = [each for each in spans.get_finished_spans() if each.name == "generate_tokens"]
    attributes = dict(span.attributes or {})
    assert span.kind is SpanKind.SERVER
    assert attributes["outrider.outcome"] == outcome
    assert attributes["gen_ai.usage.output_tokens"] == max_tokens
    assert attributes.get("error.type") == (None if max_tokens else outcome)


async def test_a_cancelled_sequence_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "verifier.access")
    # The fake model must not generate all tokens before the cancellation arrives.
    async with (
        verifier(page_count=512, context_length=2000) as served,
        rpc.dial(served.address) as channel,
    ):
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        call = stub.GenerateTokens(request(max_tokens=1500))
        await anext(aiter(call))
        call.cancel()
        await until(lambda: caplog.records)
    [record] = [each for each in caplog.records if each.name == "verifier.access"]
    assert vars(record)["fields"]["status"] == "cancelled"
