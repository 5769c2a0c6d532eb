"""An answer that `max_tokens` cuts off within a call can be sent back unchanged, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.http.openai.conversation import MAX_DEPTH, read_arguments
from outrider.protocol.messages import FinishReason
from outrider.v1 import generation_pb2
from tests.gateway.gateway_rig import Rig

pytestmark = pytest.mark.asyncio(loop_scope="session")

Json = dict[str, Any]
SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: Json = {"name": "weather", "parameters": SCHEMA}
VALUES: Json = {"city": 'a "b" \\ é 😀', "days": [1.5, -2e3, {"x": None}, True], "n": 30}
ARGUMENTS = json.dumps(VALUES)
CALL = f'Look. <tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
BEGIN = CALL.index(ARGUMENTS)
ENDS = range(BEGIN, BEGIN + len(ARGUMENTS))
FEW = [ENDS[at] for at in (0, 1, 5, 20, 60, len(ARGUMENTS) - 1)]
ASK: Json = {"role": "user", "content": "Is it cold?"}
RESULT = "the call was cut off"


def cut_off(rig: Rig, end: int) -> None:
    """Let the model's next answers be the first `end` characters of the call."""
    rig.says(CALL[:end], 1000, FinishReason.LENGTH)


def prompt_of(rig: Rig) -> str:
    return rig.prompts.decode(rig.script.requests[-1].prompt)


async def post(rig: Rig, path: str, **body: Any) -> Json:
    answer = await rig.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


async def after_chat(rig: Rig) -> str:
    """Send a chat, continue its answer in a second chat, and return the second chat's prompt."""
    tools = [{"type": "function", "function": FUNCTION}]
    answer = await post(rig, "chat/completions", messages=[ASK], tools=tools)
    message = answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
        for call in message["tool_calls"]
    ]
    history = [ASK, message, *results, ASK]
    await post(rig, "chat/completions", messages=history, tools=tools)
    return prompt_of(rig)


async def after_response(rig: Rig, kind: str) -> str:
    """Return the prompt of a request that continues an answer of Responses.

    The answer is sent back as items, as items without their status, or as its id.
    """
    tools = [{"type": "function", **FUNCTION}]
    answer = await post(rig, "responses", input=[ASK], tools=tools)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    body: Json = {"input": [*results, ASK], "previous_response_id": answer["id"]}
    if kind != "id":
        items = answer["output"]
        if kind == "bare":
            items = [{k: v for k, v in item.items() if k != "status"} for item in items]
        body = {"input": [ASK, *items, *results, ASK]}
    await post(rig, "responses", tools=tools, **body)
    return prompt_of(rig)


async def after_message(rig: Rig) -> str:
    """Return the prompt of a request that continues an answer of Messages."""
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    asked: Json = {"tools": tools, "max_tokens": 500}
    answer = await post(rig, "messages", messages=[ASK], **asked)
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    said = {"role": "assistant", "content": answer["content"]}
    told = {"role": "user", "content": [*results, {"type": "text", "text": ASK["content"]}]}
    await post(rig, "messages", messages=[ASK, said, told], **asked)
    return prompt_of(rig)


async def after_rpc(rig: Rig) -> str:
    """Do what `after_chat` does, over gRPC."""
    tool = generation_pb2.Tool(name="weather", parameters=json.dumps(SCHEMA))
    chat = generation_pb2.Chat(tools=[tool])
    chat.messages.add(**ASK)
    request = generation_pb2.GenerateTextRequest(chat=chat)
    pieces = [each async for each in rig.generation.GenerateText(request)]
    calls = [call for piece in pieces for call in piece.tool_calls]
    call = generation_pb2.ToolCall(
        id=calls[0].id,
        name=calls[0].name,
        arguments="".join(each.arguments for each in calls),
    )
    text = "".join(piece.text for piece in pieces)
    chat.messages.add(role="assistant", content=text, tool_calls=[call])
    chat.messages.add(role="tool", content=RESULT, tool_call_id=call.id)
    chat.messages.add(**ASK)
    request = generation_pb2.GenerateTextRequest(chat=chat)
    assert [each async for each in rig.generation.GenerateText(request)]
    return prompt_of(rig)


async def test_a_chat_goes_on_wherever_its_call_was_cut_off(rig: Rig) -> None:
    for end in ENDS[::3]:
        cut_off(rig, end)
        prompt = await after_chat(rig)
        assert RESULT in prompt
        shown = prompt.split('{"name": "weather", "arguments": ')[1].split("\n</tool_call>")[0]
        arguments = json.loads(shown.removesuffix("}"))
        assert arguments.keys() <= VALUES.keys()


@pytest.mark.parametrize("end", FEW)
async def test_every_api_goes_on_with_the_same_prompt(rig: Rig, end: int) -> None:
    cut_off(rig, end)
    wanted = await after_chat(rig)
    for kind in ("items", "bare", "id"):
        assert await after_response(rig, kind) == wanted
    assert await after_message(rig) == wanted
    assert await after_rpc(rig) == wanted


async def test_arguments_have_the_values_that_are_complete() -> None:
    whole = '{"a": {"b": [1, "x"]}, "c": -1.5e3, "d": "\\ud83d\\ude00"}'
    found = [read_arguments(whole[:end]) for end in range(1, len(whole) + 1)]
    values = [each.values for each in found if each is not None]
    assert len(values) == len(found)
    assert values[0] == {}
    assert {"a": {"b": [1]}} in values
    assert {"a": {"b": [1, "x"]}} in values
    assert values[-1] == json.loads(whole)
    for each in found:
        assert each is not None
        assert json.loads(each.text) == each.values
    complete = read_arguments(' {"a":1}')
    assert complete is not None
    assert complete.text == ' {"a":1}'


async def answer_to(rig: Rig, arguments: str) -> Any:
    """Return the answer to a chat whose history has a call with these arguments."""
    call = {"id": "a", "function": {"name": "weather", "arguments": arguments}}
    messages = [ASK, {"role": "assistant", "tool_calls": [call]}, ASK]
    return await rig.http.post("/v1/chat/completions", json={"messages": messages})


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "\\ud800"}',
        '{"a": "\\ud800 b", "c',
        '{"a": 1e999}',
        '{"a": 1e999, "b": [1',
        '{"a": NaN',
        '{"a": ' + "1" * 5000,
        '{"a": ' + "1" * 5000 + "}",
        '{"a": ' + "[" * (MAX_DEPTH + 1),
        '{"a": ' + "[" * 20_000,
        '{"a": ' + "[" * 20_000 + "]" * 20_000 + "}",
    ],
    ids=lambda text: text[:20],
)
async def test_what_no_prompt_can_hold_is_left_out(rig: Rig, text: str) -> None:
    """Models sometimes write such arguments, and the conversation must go on."""
    answer = await answer_to(rig, text)
    assert answer.status_code == 200, answer.text
    assert '{"name": "weather", "arguments": {}}' in prompt_of(rig)


@pytest.mark.parametrize(
    "text", ["[", "[1", "[1]", "1", '"a', "x", "{'a': 1", "{1", "{,", '{"a": 1} x', "{} {"]
)
async def test_what_begins_no_object_is_refused(rig: Rig, text: str) -> None:
    answer = await answer_to(rig, text)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
