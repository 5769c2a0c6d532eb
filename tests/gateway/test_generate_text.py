"""GenerationService over gRPC generates the texts that HTTP does, and its errors have details."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from outrider.protocol.messages import FinishReason, SpeculationStats
from outrider.v1 import common_pb2, generation_pb2
from outrider.v1.generation_pb2 import Chat, ChatMessage, GenerateTextRequest, TokenPrompt
from tests.gateway.gateway_rig import Rig
from tests.gateway.scripted_verifier import last

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


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateTextRequest(), "input"),
        (GenerateTextRequest(prompt="x", grammar=common_pb2.Grammar()), "grammar"),
        (GenerateTextRequest(tokens=TokenPrompt(token_ids=[4096])), "tokens.token_ids"),
        (
            GenerateTextRequest(chat=Chat(messages=[ChatMessage(role="function")])),
            "chat.messages[0].role",
        ),
        (
            GenerateTextRequest(
                prompt="x", sampling=common_pb2.SamplingParams(temperature=float("nan"))
            ),
            "sampling.temperature",
        ),
        (GenerateTextRequest(prompt="x", stop=[""]), "stop[0]"),
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
