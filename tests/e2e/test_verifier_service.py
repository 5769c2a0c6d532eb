"""The verifier's gRPC service: invalid input, cancellation, health, reflection and draining."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from raw_drafter import dialled  # lies beside this file
from stack import Client, Process, Stack, running

from outrider.errors import Reason
from outrider.internal.v1.token_streams_pb2_grpc import TokenStreamServiceStub
from outrider.process import rpc
from outrider.process.ports import free_port
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from outrider.protocol.model_info import Stage
from outrider.protocol.wire import requests as wire_requests

GREEDY = SamplingParams(temperature=0.0)
GOOD = TokenRequest([5, 6, 7], 4, GREEDY)
NAN = float("nan")

BAD_REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "an empty prompt": ({"prompt": []}, "prompt_token_ids", "must hold at least 1 token"),
    "no tokens to generate": ({"max_tokens": 0}, "max_tokens", "must be at least 1, not 0"),
    "a negative number of tokens, with a scored prompt": (
        {"max_tokens": -1, "prompt_logprobs": 0},
        "max_tokens",
        "must be at least 0, not -1",
    ),
    "too many alternatives for a prompt's tokens": (
        {"prompt_logprobs": 21},
        "prompt_logprob_count",
        r"must be in \[0, 20\], not 21",
    ),
    "more than the context holds": (
        {"max_tokens": 2046},
        "max_tokens",
        "the model's context holds 2048",
    ),
    "an id out of range": (
        {"prompt": [4096]},
        "prompt_token_ids",
        r"must be in \[0, 4096\), not 4096",
    ),
    "a stop id out of range": (
        {"stop_token_ids": frozenset({5000})},
        "stop_token_ids",
        r"must be in \[0, 4096\), not 5000",
    ),
    "too many stop ids": (
        {"stop_token_ids": frozenset(range(65))},
        "stop_token_ids",
        "must hold at most 64 ids, not 65",
    ),
    "a negative temperature": (
        {"sampling": SamplingParams(-1.0)},
        "sampling.temperature",
        r"must be in \[0, 2\], not -1",
    ),
    "a temperature that is not a number": (
        {"sampling": SamplingParams(NAN)},
        "sampling.temperature",
        "not nan",
    ),
    "top_p of zero": (
        {"sampling": SamplingParams(top_p=0.0)},
        "sampling.top_p",
        r"must be in \(0, 1\], not 0.0",
    ),
    "a negative top_k": (
        {"sampling": SamplingParams(top_k=-1)},
        "sampling.top_k",
        r"must be in \[0, 4096\], not -1",
    ),
    "too many draft tokens": (
        {"speculation": SpeculationOptions(draft_tokens=65)},
        "speculation.draft_tokens",
        r"must be in \[0, 64\], not 65",
    ),
    "an unknown drafter": (
        {"speculation": SpeculationOptions(drafter_id="nobody")},
        "speculation.drafter_id",
        "must be one of",
    ),
    "too long a tenant": ({"tenant": "x" * 200}, "tenant", "must be 0 to 128 printable characters"),
}


@pytest.mark.parametrize("kind", BAD_REQUESTS)
async def test_invalid_requests_are_refused_with_the_field_and_the_limit(
    stack: Stack, kind: str
) -> None:
    changes, field, message = BAD_REQUESTS[kind]
    async with Client(stack.address) as client:
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await client.generate(replace(GOOD, **changes))
        error = rpc.error_of(caught.value)
        assert error.field == field
        expected = grpc.StatusCode.INVALID_ARGUMENT
        if kind == "an unknown drafter":
            expected = grpc.StatusCode.NOT_FOUND
        assert caught.value.code() is expected
        assert len(await client.tokens(GOOD)) >= 1


async def test_a_cancelled_request_frees_its_sequence_within_a_second(stack: Stack) -> None:
    async with Client(stack.address) as client:
        long = replace(GOOD, max_tokens=2000, ignore_eos=True)
        call = client.stub.GenerateTokens(wire_requests.request_to_proto(long))
        await call.read()
        call.cancel()
        deadline = time.monotonic() + 1
        while any(info.sequence_count for info in (await client.model()).drafters):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def test_a_seed_gives_the_same_text_with_any_drafter_and_in_any_batch(stack: Stack) -> None:
    sampled = replace(
        GOOD,
        max_tokens=40,
        sampling=SamplingParams(0.9, top_k=50, top_p=0.95, seed=7),
        ignore_eos=True,
    )
    async with Client(stack.address) as client:
        plain = await client.tokens(replace(sampled, speculation=SpeculationOptions(enabled=False)))
        for family in ("", "ngram", "model"):
            drafted = replace(sampled, speculation=SpeculationOptions(drafter_family=family))
            assert await client.tokens(drafted) == plain
        others = (
            client.tokens(replace(sampled, sampling=SamplingParams(1.0, seed=i))) for i in range(7)
        )
        assert (await asyncio.gather(client.tokens(sampled), *others))[0] == plain


async def test_health_is_per_service_and_reflection_lists_the_services(stack: Stack) -> None:
    async with rpc.dial(stack.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "outrider.v1.VerifierService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(stack.address) as channel:
        services = await asyncio.to_thread(
            lambda: set(ProtoReflectionDescriptorDatabase(channel).get_services())
        )
    assert services >= {"outrider.v1.VerifierService", "grpc.health.v1.Health"}


@pytest.mark.slow
async def test_a_verifier_without_a_tokenizer_file_ends_with_the_reason(tmp_path: Any) -> None:
    address = f"127.0.0.1:{free_port()}"
    process = Process("verifier_svc", "--target", str(tmp_path), "--listen", address)
    assert process.popen.wait(60) == 1
    assert f"{tmp_path} has no tokenizer.json" in process.output()
    process.log.close()


@pytest.mark.slow
async def test_a_draining_verifier_finishes_requests_and_takes_no_new_ones() -> None:
    # It runs for seconds on any machine.
    long = replace(GOOD, max_tokens=2000, ignore_eos=True)
    with running(Stack("--drain-seconds", "60")) as stack:
        async with Client(stack.address) as client, dialled(client, "mute") as drafter:
            running_call = aiter(client.stub.GenerateTokens(wire_requests.request_to_proto(long)))
            chunks = [wire_requests.chunk_from_proto(await anext(running_call))]
            stack.verifier.popen.terminate()
            # Another process has no event to wait for.
            while (await client.model()).stage is not Stage.DRAINING:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.generate(GOOD)
            assert rpc.error_of(caught.value).reason is Reason.DRAINING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(TokenStreamServiceStub(client.channel).StreamTokens(iter([]))))
            assert rpc.error_of(caught.value).reason is Reason.DRAINING
            while not (message := await drafter.hear()).HasField("draining"):
                pass
            assert message.draining.grace_duration.seconds == 60
            chunks += [wire_requests.chunk_from_proto(response) async for response in running_call]
            ended = await drafter.error()
            assert (ended.reason, ended.retry_after_s) == (Reason.DRAINING, 1.0)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 2000
        assert await asyncio.to_thread(stack.verifier.popen.wait, 10) == 0
