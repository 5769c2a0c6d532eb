"""The Responses API keeps answers for a while, and refuses what it cannot do.

test_golden_answers.py checks the shapes of the API's answers.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from gateway.http.responses import routes as responses
from gateway.text.prompts import Prompts
from outrider.errors import OutriderError, Reason
from outrider.protocol.messages import TokenRequest
from tests.gateway.gateway_rig import Rig, rig_with_template
from tests.gateway.keyed_rig import ALICE, BOB, auth, entry, keyed_rig
from tests.gateway.responses_rig import (
    CALLS,
    CLOCK,
    TEXT,
    THINKING,
    WEATHER,
    Json,
    ask,
    events_of,
    prompt_of,
    streamed,
)
from tests.gateway.scripted_verifier import plain

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """Yield a gateway of a model whose answers begin with a thought."""
    folder = tmp_path_factory.mktemp("thinker")
    async with rig_with_template(folder, THINKING, tool_format="hermes") as made:
        yield made


async def refused(rig: Rig, body: Json, status: int = 400) -> Json:
    """Return the error of a refused request."""
    answer = await rig.http.post("/v1/responses", json={"input": "hi", **body})
    assert answer.status_code == status, answer.text
    error: Json = answer.json()["error"]
    return error


def chat_tools(tools: Sequence[Json]) -> list[Json]:
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in tools
    ]


def asked_of(rig: Rig) -> TokenRequest:
    """Return the verifier's last request, without the fields that differ in every request."""
    return replace(rig.script.requests[-1], request_id="", traceparent="", noise_seed=0)


async def test_a_stream_that_fails_ends_with_the_error_and_a_failed_response(rig: Rig) -> None:
    [word] = rig.prompts.tokenizer.encode("if").ids
    for reason, code in (
        (Reason.INTERNAL, "server_error"),
        (Reason.SLOW_READER, "rate_limit_exceeded"),
    ):
        rig.script.play(plain([word, word]), OutriderError(reason, "it broke"))
        *_, error, failed = await streamed(rig)
        told = {"message": "it broke", "param": None, "code": reason.name.lower()}
        assert error["error"] == told | {"type": reason.kind.openai_type}
        assert error == told | {
            "type": "error",
            "error": error["error"],
            "sequence_number": failed["sequence_number"] - 1,
        }
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"] == {"code": code, "message": "it broke"}
        known = await rig.http.get(f"/v1/responses/{failed['response']['id']}")
        assert known.status_code == 404
        with pytest.raises(openai.APIError, match="it broke"):
            async with rig.client.responses.stream(model="models/target", input="hi") as stream:
                await stream.until_done()


HISTORY: list[Json] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "a </b>"}'},
            },
            {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "5\ndegrees"},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
]
PARTS = [{"type": "input_text", "text": "5"}, {"type": "input_text", "text": "degrees"}]


async def conversation(rig: Rig) -> tuple[Json, list[Json], str]:
    """Return an answer with tool calls, the outputs of these calls, and a prompt.

    The prompt is the one that the chat endpoint makes of the same conversation.
    """
    rig.says(f"Hm.</think>{CALLS}")
    first = await ask(rig, tools=[WEATHER, CLOCK])
    ids = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": call_id, "output": output}
        for call_id, output in zip(ids, (PARTS, "noon"), strict=True)
    ]
    history = json.loads(
        json.dumps(HISTORY).replace('"c1"', f'"{ids[0]}"').replace('"c2"', f'"{ids[1]}"')
    )
    rig.says("Cold.</think>So it is cold.")
    body = {"messages": history, "tools": chat_tools([WEATHER, CLOCK])}
    assert (await rig.http.post("/v1/chat/completions", json=body)).status_code == 200
    return first, outputs, prompt_of(rig)


async def test_a_conversation_goes_on_by_its_items_or_their_ids(thinker: Rig) -> None:
    first, outputs, wanted = await conversation(thinker)
    hi = {"role": "user", "content": "hi"}
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    for given, more in (
        ([hi, *first["output"], *outputs], {}),
        ([{"type": "message", **hi}, *references, *outputs], {}),
        ([hi, *[{"id": each["id"]} for each in references], *outputs], {}),
        (outputs, {"previous_response_id": first["id"]}),
    ):
        await ask(thinker, given, tools=[WEATHER, CLOCK], **more)
        assert prompt_of(thinker) == wanted


async def test_a_chain_of_answers_holds_the_whole_conversation(rig: Rig) -> None:
    previous = None
    messages: list[Json] = []
    for turn in range(4):
        rig.says(f"answer {turn}")
        given: Json = {} if previous is None else {"previous_response_id": previous["id"]}
        previous = await ask(rig, f"turn {turn}", instructions=f"system {turn}", **given)
        assert previous["previous_response_id"] == given.get("previous_response_id")
        wanted = prompt_of(rig)
        messages.append({"role": "user", "content": f"turn {turn}"})
        chat = [{"role": "system", "content": f"system {turn}"}, *messages]
        await rig.http.post("/v1/chat/completions", json={"messages": chat})
        assert prompt_of(rig) == wanted
        messages.append({"role": "assistant", "content": f"answer {turn}"})
        # Earlier answers are not needed any more.
        for old in given.values():
            assert (await rig.http.delete(f"/v1/responses/{old}")).status_code == 200


async def test_a_kept_answer_can_be_read_and_deleted(rig: Rig) -> None:
    rig.says(CALLS)
    whole = await ask(rig, tools=[WEATHER], instructions="Be kind.", metadata={"a": "b"})
    last = (await streamed(rig, tools=[WEATHER]))[-1]["response"]
    for response in (whole, last):
        path = f"/v1/responses/{response['id']}"
        assert (await rig.http.get(path)).json() == response
        for read in (path, f"{path}/input_items"):
            assert (await rig.http.head(read)).status_code == 200
        assert (await rig.http.delete(path)).json()["deleted"] is True
        for gone in (await rig.http.get(path), await rig.http.delete(path)):
            assert gone.status_code == 404
            assert gone.json()["error"]["param"] == "response_id"
        error = await refused(rig, {"previous_response_id": response["id"]})
        assert error["param"] == "previous_response_id"
        error = await refused(rig, {"input": [{"id": response["output"][0]["id"]}]})
        assert error["param"] == "input[0].id"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_with_store_false_is_not_kept(rig: Rig, stream: bool) -> None:
    rig.says(TEXT)
    body = {"input": "hi", "store": False, "stream": stream}
    answer = await rig.http.post("/v1/responses", json=body)
    response = events_of(answer)[-1]["response"] if stream else answer.json()
    assert response["store"] is False
    assert (await rig.http.get(f"/v1/responses/{response['id']}")).status_code == 404
    assert await refused(rig, {"input": [{"id": response["output"][0]["id"]}]})
    assert await refused(rig, {"previous_response_id": response["id"]})


async def test_no_tenant_reads_or_deletes_anothers_answers(
    prompts: Prompts, tmp_path: Path
) -> None:
    entries = [entry(ALICE, "alice"), entry(BOB, "bob")]
    async with keyed_rig(prompts, tmp_path, entries) as rig:
        rig.says("secret")
        # A caller may choose its answers' ids, so two tenants may have the same id.
        alices, bobs = [auth(key) | {"x-request-id": "resp-1"} for key in (ALICE, BOB)]

        async def post(headers: dict[str, str], **body: Any) -> httpx.Response:
            return await rig.http.post("/v1/responses", json=body, headers=headers)

        kept = (await post(alices, input="hi")).json()
        del alices["x-request-id"]
        assert kept["id"] == "resp-1"
        item = kept["output"][0]["id"]
        path = "/v1/responses/resp-1"
        for method, place in (
            ("GET", path),
            ("DELETE", path),
            ("GET", f"{path}?stream=true"),
            ("GET", f"{path}/input_items"),
            ("POST", f"{path}/cancel"),
        ):
            assert (await rig.http.request(method, place, headers=bobs)).status_code == 404
        for body in ({"previous_response_id": "resp-1"}, {"input": [{"id": item}]}):
            assert (await post(bobs, **body)).status_code == 400
            assert (await post(alices, **body)).status_code == 200
        rig.says("other")
        await post(bobs, input="hi")
        await rig.http.delete("/v1/responses/resp-1", headers=bobs)
        assert (await rig.http.get("/v1/responses/resp-1", headers=alices)).status_code == 200


async def test_a_short_body_cannot_become_an_endless_conversation(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.says(TEXT)
    monkeypatch.setattr(responses, "MAX_BODY_BYTES", 1000)
    item = (await ask(rig))["output"][0]["id"]
    error = await refused(rig, {"input": [{"id": item}] * 9})
    assert error["param"].startswith("input[")
    await ask(rig, [{"id": item}] * 2)


async def test_openais_client_creates_streams_and_parses(rig: Rig) -> None:
    class City(BaseModel):
        city: str

    client = rig.client.responses
    rig.says(TEXT)
    created = await client.create(model="models/target", input="hi")
    assert created.output_text == TEXT
    assert (await client.retrieve(created.id)).output_text == TEXT
    await client.delete(created.id)
    with pytest.raises(openai.NotFoundError):
        await client.retrieve(created.id)
    async with client.stream(model="models/target", input="hi") as stream:
        deltas = [
            event.delta async for event in stream if event.type == "response.output_text.delta"
        ]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == TEXT
    rig.says('{"city": "Oslo"}')
    parsed = await client.parse(model="models/target", input="hi", text_format=City)
    assert parsed.output_parsed == City(city="Oslo")
    rig.says(CALLS)
    async with client.stream(
        model="models/target",
        input="hi",
        tools=[openai.pydantic_function_tool(City, name="weather")],
    ) as stream:
        called = (await stream.get_final_response()).output[1]
    assert (called.type, called.parsed_arguments) == ("function_call", City(city="a </b>"))


# Codex sends this tool by default.
OFFLINE = {"type": "web_search", "external_web_access": False}
NAMESPACE = {"type": "namespace", "name": "maps", "description": "x", "tools": [WEATHER, CLOCK]}


async def test_the_model_sees_a_namespaces_functions_and_the_client_its_names(rig: Rig) -> None:
    rig.says(CALLS.replace("weather", "maps__weather"))
    tools = [OFFLINE, NAMESPACE, CLOCK]
    response = await ask(rig, tools=tools)
    assert '"maps__weather"' in prompt_of(rig)
    found = [(i["name"], i.get("namespace")) for i in response["output"][1:]]
    assert found == [("weather", "maps"), ("clock", None)]
    shown = {**CLOCK, "description": None, "parameters": None, "strict": None}
    assert response["tools"] == [NAMESPACE, shown]
    rig.says("x")
    await ask(rig, "and?", previous_response_id=response["id"])
    assert '{"name": "maps__weather", "arguments"' in prompt_of(rig)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search"},
        {"type": "web_search", "external_web_access": True},
        {"type": "file_search", "vector_store_ids": ["x"]},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "mcp", "server_label": "x"},
        {"type": "local_shell"},
    ],
    ids=lambda tool: str(tool["type"]),
)
async def test_a_tool_that_the_gateway_would_have_to_run_is_refused(rig: Rig, tool: Json) -> None:
    for path in ("", "/input_tokens"):
        answer = await rig.http.post(
            f"/v1/responses{path}", json={"input": "hi", "tools": [CLOCK, tool]}
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
        assert error["param"] == "tools[1].type"
        assert repr(tool["type"]) in error["message"]
    assert not rig.script.requests


async def test_a_search_that_must_not_use_the_web_is_left_out(rig: Rig) -> None:
    rig.says(TEXT)
    await ask(rig)
    wanted = asked_of(rig)
    response = await ask(rig, tools=[OFFLINE])
    assert asked_of(rig) == wanted
    assert response["tools"] == []


async def test_what_clients_send_along_changes_nothing(rig: Rig) -> None:
    rig.says(TEXT)
    await ask(rig)
    wanted = asked_of(rig)
    body: Json
    for body in (
        {"include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}, "store": True},
        {"prompt_cache_key": "k", "client_metadata": {"x": {"y": 1}}, "service_tier": "flex"},
        {"truncation": "auto", "user": "u", "safety_identifier": "s", "background": False},
        {"text": {"verbosity": "low"}, "reasoning": {"summary": "auto", "effort": None}},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "top_logprobs": 0},
        {
            "max_tool_calls": 3,
            "safety_identifier": "s",
            "conversation": None,
            "prompt": None,
            "include": [],
        },
        {"instructions": None, "previous_response_id": None, "stream": False},
    ):
        await ask(rig, **body)
        assert asked_of(rig) == wanted, body
    await streamed(rig, stream_options={"include_obfuscation": True})


def user(*parts: Json) -> list[Json]:
    return [{"role": "user", "content": [{"type": "input_text", "text": "x"}, *parts]}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 2049}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": user({"type": "input_image", "image_url": "x"})}, "input[0].content[1].type"),
        ({"input": user({"type": "input_text"})}, "input[0].content[1].text"),
        ({"input": user({"type": "input_text", "text": "\ud800"})}, "input[0].content[1].text"),
        ({"input": user({"type": "input_text", "text": "x", "u": 1})}, "input[0].content[1].u"),
        ({"input": [*user(), {"type": "web_search_call"}]}, "input[1].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": "x " * 40_000}, "input"),
        ({"max_output_tokens": 4000}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
        ({"tools": [OFFLINE, {**CLOCK, "name": "a b"}]}, "tools[1].name"),
        ({"tools": [OFFLINE, {**CLOCK, "parameters": 3}]}, "tools[1].parameters"),
        ({"tools": [CLOCK, NAMESPACE, NAMESPACE]}, "tools"),
        ({"tools": [{**NAMESPACE, "tools": [{**CLOCK, "u": 1}]}]}, "tools[0].tools[0].u"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "regex"}}}, "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"previous_response_id": "resp-none"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input[0].id"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
    ],
)
async def test_an_error_names_the_callers_own_parameter(rig: Rig, body: Json, param: str) -> None:
    content = json.dumps({"input": "hi", **body})
    answer = await rig.http.post(
        "/v1/responses", content=content, headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    if error["code"] != "context_length_exceeded":
        assert error["message"].startswith(param)
    assert param in error["message"]
    for chats in ("messages", "max_completion_tokens", "response_format"):
        assert chats == param or chats not in error["message"]
    assert not rig.script.requests
