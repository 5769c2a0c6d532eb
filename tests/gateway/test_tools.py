"""Chats with tools: the requests to the verifier, and the answers that the client reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.grammar.kinds import GrammarKind
from outrider.protocol.messages import FinishReason
from outrider.v1 import common_pb2, generation_pb2
from tests.gateway.gateway_rig import Rig, rig_with_template

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = [{"role": "user", "content": "Is it cold?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ARGUMENTS = '{"city": "a </tool_call> \\" {[b", "days": 3}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CLOCK_CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


async def answer_of(rig: Rig, **given: Any) -> dict[str, Any]:
    body = {"messages": CHAT, "tools": [WEATHER, CLOCK]} | given
    response = await rig.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def tag_of(rig: Rig) -> dict[str, Any]:
    """Return the structural tag of the verifier's last request."""
    grammar = rig.script.requests[-1].grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    tag: dict[str, Any] = json.loads(grammar.text)
    return tag


def schemas(tag: Any) -> list[Any]:
    """Return all schemas within a structural tag."""
    if isinstance(tag, list):
        return [found for part in tag for found in schemas(part)]
    if not isinstance(tag, dict):
        return []
    own = [tag["json_schema"]] if "json_schema" in tag else []
    return own + [
        found for key, part in tag.items() if key != "json_schema" for found in schemas(part)
    ]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_an_answer_is_split_into_content_and_calls(rig: Rig, chunk: int) -> None:
    rig.says(f"Let me look.\n{CALL}\n{CLOCK_CALL}", chunk)
    choice = await answer_of(rig)
    message = choice["message"]
    assert message["content"] == "Let me look."
    called = [(call["type"], call["function"]) for call in message["tool_calls"]]
    assert called == [
        ("function", {"name": "weather", "arguments": ARGUMENTS}),
        ("function", {"name": "clock", "arguments": "{}"}),
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_a_stream_has_the_same_parts_as_a_whole_answer(rig: Rig, chunk: int) -> None:
    rig.says(f"Let me look.\n{CALL}\n{CLOCK_CALL}", chunk)
    whole = (await answer_of(rig))["message"]
    stream = await rig.client.chat.completions.create(
        model="", messages=CHAT, tools=[WEATHER, CLOCK], stream=True
    )
    content = ""
    calls: dict[int, dict[str, str]] = {}
    async for piece in stream:
        [choice] = piece.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, {"name": "", "arguments": ""})
            known["name"] += call.function.name or ""
            known["arguments"] += call.function.arguments or ""
    assert content == whole["content"]
    assert list(calls.values()) == [call["function"] for call in whole["tool_calls"]]
    assert choice.finish_reason == "tool_calls"


async def test_an_answer_without_a_call_is_content_to_the_last_blank(rig: Rig) -> None:
    text = ' It is <tool_call, or {"name": not.\n\n'
    rig.says(text)
    choice = await answer_of(rig)
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


async def test_a_call_that_the_limit_cuts_off_keeps_the_arguments_so_far(rig: Rig) -> None:
    for end in range(CALL.index(ARGUMENTS), CALL.index(ARGUMENTS) + len(ARGUMENTS) + 1):
        rig.says(CALL[:end], 1000, FinishReason.LENGTH)
        choice = await answer_of(rig)
        [call] = choice["message"]["tool_calls"]
        assert ARGUMENTS.startswith(call["function"]["arguments"])
        assert len(call["function"]["arguments"]) >= end - CALL.index(ARGUMENTS) - 1
        assert choice["finish_reason"] == "length"


async def test_a_forced_call_cut_off_before_its_name_leaves_no_content(rig: Rig) -> None:
    for end in range(CALL.index("weather")):
        rig.says(CALL[:end], 1000, FinishReason.LENGTH)
        choice = await answer_of(rig, tool_choice="required")
        assert choice["message"]["content"] == ""
        assert choice["finish_reason"] == "length"


async def test_stop_strings_look_at_content_alone(rig: Rig) -> None:
    rig.says(f"Wait. {CALL}\n done, Observation: x")
    choice = await answer_of(rig, stop=["city", "tool_call", "Observation:"])
    message = choice["message"]
    assert message["content"] == "Wait. done, "
    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


async def test_arguments_follow_the_schema_if_forced_or_strict(rig: Rig) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for tools, choice, held in (
        ([WEATHER], "auto", False),
        ([strict], "auto", True),
        ([WEATHER], "required", True),
        ([WEATHER], {"type": "function", "function": {"name": "weather"}}, True),
    ):
        rig.says(CALL)
        await answer_of(rig, tools=tools, tool_choice=choice)
        closed = {**SCHEMA, "additionalProperties": False}
        assert (closed in schemas(tag_of(rig))) is held


async def test_only_the_tools_of_the_choice_may_be_called(rig: Rig) -> None:
    only_clock: list[Any] = [
        {"type": "function", "function": {"name": "clock"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "clock"}}],
            },
        },
    ]
    for choice in only_clock:
        rig.says(CLOCK_CALL)
        await answer_of(rig, tool_choice=choice)
        text = json.dumps(tag_of(rig))
        assert "clock" in text
        assert "weather" not in text


async def test_one_call_at_most_without_parallel_calls(rig: Rig) -> None:
    for choice in ("auto", "required"):
        for parallel in (True, False):
            rig.says(CALL)
            await answer_of(rig, tool_choice=choice, parallel_tool_calls=parallel)
            assert tag_of(rig)["format"]["stop_after_first"] is not parallel


async def test_with_the_choice_none_a_call_is_plain_text(rig: Rig) -> None:
    rig.says(CALL)
    choice = await answer_of(rig, tool_choice="none")
    assert rig.script.requests[-1].grammar is None
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


async def test_an_answer_is_a_call_or_has_the_format_asked_for(rig: Rig) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    rig.says('{"answer": "no"}')
    choice = await answer_of(rig, response_format=wanted)
    assert choice["message"]["content"] == '{"answer": "no"}'
    assert tag_of(rig)["format"]["type"] == "or"
    assert schema in schemas(tag_of(rig))


async def test_the_template_sees_tools_calls_and_results(rig: Rig) -> None:
    rig.says("5 degrees")
    history = [
        *CHAT,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]},
    ]
    await answer_of(rig, messages=history)
    prompt = rig.prompts.decode(rig.script.requests[-1].prompt)
    assert '"name": "clock"' in prompt
    assert '{"name": "weather", "arguments": {"city": "Oslo"}}' in prompt
    assert "<tool_response>\n5\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": []}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1]"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, None),
    ],
)
async def test_tools_that_cannot_be_called_are_refused(
    rig: Rig, given: dict[str, Any], param: str | None
) -> None:
    rig.says("x")
    body = {"messages": CHAT, "tools": [WEATHER], "tool_choice": "required"} | given
    response = await rig.http.post("/v1/chat/completions", json=body)
    if param is None:
        assert response.status_code == 200
    else:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert not rig.script.requests


GRPC_WEATHER = generation_pb2.Tool(name="weather", parameters=json.dumps(SCHEMA))
GRPC_CLOCK = generation_pb2.Tool(name="clock", description="The time.")
GRPC_CHAT = generation_pb2.Chat(
    messages=[generation_pb2.ChatMessage(role="user", content="Is it cold?")],
    tools=[GRPC_WEATHER, GRPC_CLOCK],
)


async def grpc_answer(rig: Rig, chat: generation_pb2.Chat) -> list[Any]:
    request = generation_pb2.GenerateTextRequest(chat=chat)
    return [response async for response in rig.generation.GenerateText(request)]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_grpc_gives_the_same_calls_as_http(rig: Rig, chunk: int) -> None:
    rig.says(f"Let me look.\n{CALL}\n{CLOCK_CALL}", chunk)
    message = (await answer_of(rig))["message"]
    responses = await grpc_answer(rig, GRPC_CHAT)
    http_tag, grpc_tag = [json.loads(request.grammar.text) for request in rig.script.requests]
    assert http_tag == grpc_tag
    assert "".join(response.text for response in responses) == message["content"]
    pieces = [call for response in responses for call in response.tool_calls]
    for index, call in enumerate(message["tool_calls"]):
        of_call = [piece for piece in pieces if piece.index == index]
        assert of_call[0].id.startswith("call_")
        assert "".join(piece.name for piece in of_call) == call["function"]["name"]
        assert "".join(piece.arguments for piece in of_call) == call["function"]["arguments"]


async def test_grpc_takes_a_history_of_calls(rig: Rig) -> None:
    rig.says("5 degrees")
    call = generation_pb2.ToolCall(id="a", name="weather", arguments='{"city":"Oslo"}')
    chat = generation_pb2.Chat()
    chat.CopyFrom(GRPC_CHAT)
    chat.messages.add(role="assistant", tool_calls=[call])
    chat.messages.add(role="tool", content="5", tool_call_id="a")
    await grpc_answer(rig, chat)
    prompt = rig.prompts.decode(rig.script.requests[-1].prompt)
    assert '{"name": "weather", "arguments": {"city": "Oslo"}}' in prompt
    assert "<tool_response>\n5\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tools": [generation_pb2.Tool(name="a b")]}, "chat.tools[0].name"),
        ({"tools": [GRPC_CLOCK, GRPC_CLOCK]}, "chat.tools"),
        ({"tools": [GRPC_CLOCK] * 129}, "chat.tools"),
        ({"tools": [generation_pb2.Tool(name="a", parameters="[")]}, "chat.tools[0].parameters"),
        ({"tool_mode": 9}, "chat.tool_mode"),
        ({"tool_mode": generation_pb2.TOOL_MODE_REQUIRED}, "chat.tool_mode"),
        ({"tools": [GRPC_CLOCK], "tool_names": ["none"]}, "chat.tool_names"),
        ({"template_variables": '{"messages": 1}'}, "chat.template_variables"),
        (
            {
                "messages": [
                    generation_pb2.ChatMessage(
                        role="assistant",
                        tool_calls=[generation_pb2.ToolCall(id="a", name="f", arguments="1")],
                    )
                ]
            },
            "chat.messages[0].tool_calls[0].arguments",
        ),
        (
            {"messages": [generation_pb2.ChatMessage(role="tool", content="x")]},
            "chat.messages[0]",
        ),
    ],
)
async def test_a_bad_chat_over_grpc_names_the_field(
    rig: Rig, given: dict[str, Any], field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await grpc_answer(rig, generation_pb2.Chat(**{"messages": GRPC_CHAT.messages} | given))
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (failed.value.details() or "")


@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_an_answer_in_the_format_asked_for_may_hold_marks_of_calls(
    rig: Rig, chunk: int
) -> None:
    text = '{"answer": "use <tool_call> tags, or <tool_call>\\n{"}'
    rig.says(text, chunk)
    choice = await answer_of(rig, response_format={"type": "json_object"})
    assert choice["message"]["content"] == text
    rig.says(CALL, chunk)
    choice = await answer_of(rig, response_format={"type": "json_object"})
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


@pytest.mark.parametrize("text", ['{"a": "<tool_call>"}', CALL])
async def test_each_token_of_such_an_answer_has_its_part(rig: Rig, text: str) -> None:
    rig.says(text)
    choice = await answer_of(
        rig, response_format={"type": "json_object"}, speculation={"tokens": True}
    )
    parts = {token["part"] for token in choice["speculation"]["tokens"]} - {None}
    assert parts == ({"tool_calls[0]"} if text == CALL else {"content"})


async def test_all_choices_have_the_grammar_and_the_parts_of_the_first(rig: Rig) -> None:
    rig.says(CALL)
    body = {"messages": CHAT, "tools": [WEATHER], "tool_choice": "required", "n": 3, "seed": 5}
    response = await rig.http.post("/v1/chat/completions", json=body)
    requests = rig.script.requests
    assert len({request.grammar for request in requests}) == 1
    assert {request.sampling.seed for request in requests} == {5, 6, 7}
    for choice in response.json()["choices"]:
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["arguments"] == ARGUMENTS


async def test_grpc_names_its_own_field_where_tools_and_a_grammar_contradict(rig: Rig) -> None:
    request = generation_pb2.GenerateTextRequest(
        chat=GRPC_CHAT, grammar=common_pb2.Grammar(regex="a+")
    )
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in rig.generation.GenerateText(request):
            pass
    assert "chat.tools go only with a JSON schema" in (failed.value.details() or "")


@pytest.mark.parametrize(
    "parameters",
    [{"default": float("inf")}, {"a": "\ud800"}, {"a": [[[0]] * 2] * 2} | nested(200)],
    ids=["infinite", "surrogate", "deep"],
)
async def test_a_schema_that_json_cannot_hold_is_refused(
    rig: Rig, parameters: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = json.dumps({"messages": CHAT, "tools": [tool], "tool_choice": "required"})
    response = await rig.http.post(
        "/v1/chat/completions",
        content=body.replace("Infinity", "1e999"),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("schema", "held"),
    [
        ({"type": "integer"}, {"type": "object"}),
        ({"type": ["object", "null"]}, {"type": "object"}),
        ({"nullable": True}, {"nullable": True, "type": "object"}),
        ({"enum": [{"a": 1}, None]}, {"enum": [{"a": 1}, None], "type": "object"}),
    ],
)
async def test_forced_arguments_are_an_object_whatever_their_schema(
    rig: Rig, schema: dict[str, Any], held: dict[str, Any]
) -> None:
    """If a value were no object, the reader would take the text that follows for a part of it."""
    rig.says(CALL)
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    await answer_of(rig, tools=[tool], tool_choice="required")
    found = schemas(tag_of(rig))
    assert found
    assert all(each == held for each in found)


LLAMA = (
    '{% for m in messages %}<|start_header_id|>{{ m["content"] }}{% endfor %}{# "parameters": #}'
)
MISTRAL = '{% for m in messages %}{{ m["content"] }}{% endfor %}{# [TOOL_CALLS] [ARGS] #}'


KIMI = '{% for m in messages %}{{ m["content"] }}{% endfor %}{# <|tool_calls_section_begin|> #}'
KIMI_CALLS = "".join(
    f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    for number, name in enumerate(("clock", "weather"))
)


async def test_the_ids_of_kimi_count_the_calls_of_the_conversation(tmp_path: Path) -> None:
    made: list[dict[str, Any]] = [
        {"id": f"functions.clock:{i}", "type": "function", "function": {"name": "clock"}}
        for i in range(3)
    ]
    for call in made:
        call["function"] |= {"arguments": "{}"}
    past = [
        *CHAT,
        {"role": "assistant", "content": "", "tool_calls": made[:2]},
        *({"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in made[:2]),
        {"role": "assistant", "content": "", "tool_calls": made[2:]},
        {"role": "tool", "tool_call_id": made[2]["id"], "content": "2"},
    ]
    async with rig_with_template(tmp_path, KIMI) as rig:
        for messages, first in ((CHAT, 0), (past, 3)):
            rig.says(f"<|tool_calls_section_begin|>{KIMI_CALLS}<|tool_calls_section_end|>")
            choice = await answer_of(rig, messages=messages)
            ids = [call["id"] for call in choice["message"]["tool_calls"]]
            assert ids == [f"functions.clock:{first}", f"functions.weather:{first + 1}"]


@pytest.mark.parametrize(
    ("template", "text", "body"),
    [
        (
            LLAMA,
            '{"name": "bob", "parameters": {"x": 1}}',
            {"response_format": {"type": "json_object"}},
        ),
        (MISTRAL, '[TOOL_CALLS]clock[ARGS]{"a": 1} and so on', {}),
    ],
    ids=["JSON that begins as a call", "text behind a call"],
)
async def test_an_answer_reads_alike_in_one_chunk_and_token_by_token(
    tmp_path: Path, template: str, text: str, body: dict[str, Any]
) -> None:
    async with rig_with_template(tmp_path, template) as rig:
        messages = []
        for chunk in (1, 1000):
            rig.says(text, chunk)
            asked = {"messages": CHAT, "tools": [CLOCK], "max_tokens": 200, **body}
            answer = await rig.http.post("/v1/chat/completions", json=asked)
            [choice] = answer.json()["choices"]
            for call in choice["message"].get("tool_calls") or []:
                call.pop("id")
            messages.append(choice)
    assert messages[0] == messages[1]
