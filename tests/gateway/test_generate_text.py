"""GenerationService over gRPC generates the same as HTTP, and its errors have details."""

from __future__ import annotations

import grpc
import pytest
from gateway_rig import Rig
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from scripted_verifier import last

from outrider.errors import OutriderError, Reason
from outrider.process import rpc
from outrider.protocol.messages import FinishReason, SpeculationStats
from outrider.v1 import common_pb2, generation_pb2
from outrider.v1.generation_pb2 import Chat, ChatMessage, GenerateTextRequest, TokenPrompt

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "def add(a, b):  # 😀"


async def call(rig: Rig, request: GenerateTextRequest) -> list[generation_pb2.GenerateTextResponse]:
    return [response async for response in rig.generation.GenerateText(request)]


async def test_text_streams_in_whole_characters_with_its_tokens(rig: Rig) -> None:
    ids = rig.says(TEXT)
    responses = await call(rig, GenerateTextRequest(prompt="x"))
    assert "".join(response.text for response in responses) == TEXT
    assert [token for response in responses for token in response.token_ids] == [*ids, 3]
    assert all(
        source == common_pb2.TOKEN_SOURCE_PLAIN
        for response in responses
        for source in response.sources
    )
    *others, final = responses
    assert final.finish_reason == common_pb2.FINISH_REASON_STOP
    assert (final.usage.prompt_token_count, final.usage.completion_token_count) == (1, len(ids) + 1)
    assert not any(response.HasField("usage") or response.finish_reason for response in others)


async def test_a_grammar_without_a_kind_is_refused(rig: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(rig, GenerateTextRequest(prompt="x", grammar=common_pb2.Grammar()))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = rpc.error_of(caught.value)
    assert (error.reason, error.field) == (Reason.INVALID_VALUE, "grammar")
    assert "must have one of json_schema, json_object" in error.message


async def test_a_request_that_cannot_be_parsed_is_refused(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    async with rpc.dial(rig.gateway.grpc_address) as channel:
        unparsed = channel.unary_stream("/outrider.v1.GenerationService/GenerateText")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unparsed(b"\xff" * 30).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc.error_of(caught.value).reason is Reason.MALFORMED_REQUEST
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_the_last_message_says_whether_max_tokens_cut_its_grammar_off(
    rig: Rig, reason: FinishReason
) -> None:
    rig.script.answer = lambda _: [last([5], reason, SpeculationStats(), cached=0)]
    with_grammar = GenerateTextRequest(prompt="x", grammar=common_pb2.Grammar(regex="a+"))
    [final] = await call(rig, with_grammar)
    assert final.grammar_incomplete == (reason is FinishReason.LENGTH)
    [final] = await call(rig, GenerateTextRequest(prompt="x"))
    assert not final.grammar_incomplete


async def test_the_last_message_has_the_statistics_of_the_speculation(rig: Rig) -> None:
    stats = SpeculationStats(5, 4, 12, 6, [1, 1, 1, 1], 3)
    rig.script.answer = lambda _: [last([5], FinishReason.LENGTH, stats, cached=1)]
    [final] = await call(rig, GenerateTextRequest(prompt="x"))
    assert (final.stats.draft_count, list(final.stats.acceptance_histogram)) == (4, [1, 1, 1, 1])
    assert final.usage.cached_token_count == 1


async def test_the_three_forms_of_input_reach_the_verifier(rig: Rig) -> None:
    chat = Chat(messages=[ChatMessage(role="user", content="hi")])
    for request in (
        GenerateTextRequest(prompt="if"),
        GenerateTextRequest(tokens=TokenPrompt(token_ids=[7, 8])),
        GenerateTextRequest(chat=chat),
    ):
        await call(rig, request)
    prompt, tokens, rendered = (request.prompt for request in rig.script.requests)
    assert (prompt, tokens) == (rig.prompts.tokenizer.encode("if").ids, [7, 8])
    assert rig.prompts.decode(rendered) == "<|user|>hi<|end|><|assistant|>"


async def test_settings_reach_the_verifier(rig: Rig) -> None:
    sampling = common_pb2.SamplingParams(temperature=0.0, top_k=3, top_p=0.5, seed=2**63)
    speculation = common_pb2.SpeculationOptions(
        enabled=False, drafter_family="ngram", draft_tokens=2
    )
    await call(
        rig,
        GenerateTextRequest(prompt="x", max_tokens=9, sampling=sampling, speculation=speculation),
    )
    await call(rig, GenerateTextRequest(prompt="x"))
    given, unset = rig.script.requests
    assert given.max_tokens == 9
    assert given.sampling.greedy is True
    assert given.sampling.top_k == 3
    assert given.sampling.seed == 2**63
    assert given.speculation.enabled is False
    assert given.speculation.drafter_family == "ngram"
    assert given.speculation.draft_tokens == 2
    assert unset.max_tokens == 2048 - 1


async def test_stop_strings_end_the_text(rig: Rig) -> None:
    rig.says("one two three", pause_s=0.01)
    responses = await call(rig, GenerateTextRequest(prompt="x", stop=["two"]))
    assert "".join(response.text for response in responses) == "one "
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateTextRequest(), "input"),
        (GenerateTextRequest(prompt=""), "prompt"),
        (GenerateTextRequest(tokens=TokenPrompt()), "tokens.token_ids"),
        (GenerateTextRequest(tokens=TokenPrompt(token_ids=[4096])), "tokens.token_ids"),
        (GenerateTextRequest(chat=Chat()), "chat.messages"),
        (
            GenerateTextRequest(chat=Chat(messages=[ChatMessage(role="tool")])),
            "chat.messages[0].role",
        ),
        (GenerateTextRequest(prompt="x", max_tokens=0), "max_tokens"),
        (GenerateTextRequest(prompt="x", max_tokens=5000), "max_tokens"),
        (
            GenerateTextRequest(
                prompt="x", sampling=common_pb2.SamplingParams(temperature=float("nan"))
            ),
            "sampling.temperature",
        ),
        (
            GenerateTextRequest(prompt="x", sampling=common_pb2.SamplingParams(top_k=-1)),
            "sampling.top_k",
        ),
        (GenerateTextRequest(prompt="x", stop=[""]), "stop[0]"),
        (
            GenerateTextRequest(
                prompt="x", speculation=common_pb2.SpeculationOptions(draft_tokens=99)
            ),
            "speculation.draft_tokens",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bad_input_names_its_field(
    rig: Rig, request_: GenerateTextRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(rig, request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = list(rpc_status.from_call(caught.value).details)
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    assert details[0].Unpack(info)
    assert details[1].Unpack(bad)
    assert info.domain == "outrider.dev"
    assert bad.field_violations[0].field == field


async def test_the_verifiers_errors_pass_through_with_their_details(rig: Rig) -> None:
    rig.script.answer = lambda _: [OutriderError(Reason.OVERLOADED, "full", retry_after_s=2.0)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(rig, GenerateTextRequest(prompt="x"))
    error = rpc.error_of(caught.value, otherwise=Reason.INTERNAL)
    assert (error.reason, error.message, error.retry_after_s) == (Reason.OVERLOADED, "full", 2.0)


async def test_an_unknown_model_is_not_found(rig: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(rig, GenerateTextRequest(prompt="x", model="gpt"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_and_reflection_are_served(rig: Rig) -> None:
    channel = rpc.dial(rig.gateway.grpc_address)
    health = await health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(service="outrider.v1.GenerationService")
    )
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="outrider.v1.GenerationService"
    )
    async for response in stub.ServerReflectionInfo(iter([asked])):
        names = [
            FileDescriptorProto.FromString(data).name
            for data in response.file_descriptor_response.file_descriptor_proto
        ]
        assert "outrider/v1/generation.proto" in names
    await channel.close()


@pytest.mark.parametrize("own", ["mine-7", None, "x" * 97, "two words"])
async def test_a_call_has_an_id_in_its_initial_metadata(rig: Rig, own: str | None) -> None:
    rig.says("a")
    sent = () if own is None else (("x-request-id", own),)
    for request in (GenerateTextRequest(prompt="x"), GenerateTextRequest()):
        call_ = rig.generation.GenerateText(request, metadata=sent)
        metadata = dict(await call_.initial_metadata())
        found = metadata["x-request-id"]
        assert (found == "mine-7") if own == "mine-7" else found.startswith("text-")
        if request.prompt:
            assert [message async for message in call_]
            assert rig.script.requests[-1].request_id == found
