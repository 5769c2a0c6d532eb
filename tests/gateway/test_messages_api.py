"""Messages as Anthropic's clients use them; test_golden_answers.py has the answers' shapes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic.types import Message, MessageTokensCount
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel

from gateway.access.gate import tenant_of
from gateway.http.ingress.request_body import MAX_BODY_BYTES
from gateway.text.prompts import Prompts
from gateway.tools.definitions import MAX_TOOLS
from outrider.errors import OutriderError, Reason
from outrider.protocol.limits import MAX_MESSAGES
from outrider.protocol.messages import FinishReason
from tests.gateway.gateway_rig import Rig
from tests.gateway.keyed_rig import ALICE, BOB, EXPIRED, auth, entry, keyed_rig
from tests.gateway.scripted_verifier import plain

pytestmark = pytest.mark.asyncio(loop_scope="session")

URL = "/v1/messages"
COUNT = f"{URL}/count_tokens"
ASK: Any = [{"role": "user", "content": "Is it cold?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER: Any = {"name": "weather", "description": "Looks.", "input_schema": SCHEMA}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object"}, "strict": True}
TOOLS = [WEATHER, CLOCK]
CHAT_TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Looks.", "parameters": SCHEMA},
    },
    {
        "type": "function",
        "function": {"name": "clock", "parameters": {"type": "object"}, "strict": True},
    },
]
ARGUMENTS = '{"city": "a </tool_call> \\" {[b", "days": 3}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CLOCK_CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
EVERYTHING = f"<think>\nlet me\n</think>\n\nLook. {CALL}\n{CLOCK_CALL}\nDone."


def client_of(rig: Rig, **given: Any) -> anthropic.AsyncAnthropic:
    known = {"base_url": rig.gateway.http_url, "api_key": "any", "max_retries": 0}
    return anthropic.AsyncAnthropic(**known | given)


async def whole_of(rig: Rig, **given: Any) -> dict[str, Any]:
    """Return the answer to a message, after a check with Anthropic's type."""
    body = {"messages": ASK, "max_tokens": 500} | given
    response = await rig.http.post(URL, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Message.model_validate(answer)
    assert response.headers["request-id"] == response.headers["x-request-id"] == answer["id"]
    return answer


async def chat_of(rig: Rig, **given: Any) -> dict[str, Any]:
    body = {"messages": ASK, "max_tokens": 500} | given
    response = await rig.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def choice(kind: str, **more: Any) -> dict[str, Any]:
    return {"tool_choice": {"type": kind, **more}}


async def final_message(rig: Rig, **given: Any) -> dict[str, Any]:
    """Return the message that Anthropic's client makes from a stream."""
    async with (
        client_of(rig) as client,
        client.messages.stream(model="", messages=ASK, max_tokens=500, **given) as stream,
    ):
        return (await stream.get_final_message()).to_dict(exclude_unset=True)


async def test_a_call_that_the_limit_cuts_off_has_the_input_so_far(thinker: Rig) -> None:
    begin = CALL.index(ARGUMENTS)
    for end in range(begin, begin + len(ARGUMENTS) + 1):
        thinker.says(CALL[:end], 1000, FinishReason.LENGTH)
        [block] = (await whole_of(thinker, tools=TOOLS))["content"]
        streamed = await final_message(thinker, tools=TOOLS)
        assert block["input"] == streamed["content"][0]["input"]
        assert set(block["input"]) <= {"city", "days"}


async def test_max_tokens_beyond_the_context_takes_what_is_left(rig: Rig) -> None:
    rig.says("x")
    await whole_of(rig, max_tokens=32_000)
    [request] = rig.script.requests
    assert request.max_tokens == 2048 - len(request.prompt)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "cold", "is_error": False}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
# A call, two results, and a text after them.
HISTORY = [
    *ASK,
    {"role": "assistant", "content": [THOUGHT, text("I "), USE, text("look.")]},
    {"role": "user", "content": [RESULT, {**RESULT, "content": [text("x")]}, text("So?")]},
]


async def test_an_answer_sent_back_is_the_chats_answer_sent_back(thinker: Rig) -> None:
    thinker.says(EVERYTHING)
    async with client_of(thinker) as client:
        answer = await client.messages.create(model="", messages=ASK, max_tokens=500, tools=TOOLS)
        messages = [*ASK, {"role": "assistant", "content": answer.content}]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
        await client.messages.create(model="", messages=messages, max_tokens=500, tools=TOOLS)
    chat = (await chat_of(thinker, tools=CHAT_TOOLS))["choices"][0]["message"]
    for call, result in zip(chat["tool_calls"], results, strict=True):
        call["id"] = result["tool_use_id"]
    again = [{"role": "tool", "tool_call_id": r["tool_use_id"], "content": "ok"} for r in results]
    await chat_of(thinker, tools=CHAT_TOOLS, messages=[*ASK, chat, *again])
    prompts = [thinker.prompts.decode(request.prompt) for request in thinker.script.requests]
    assert prompts[1] == prompts[3]


async def test_an_answer_goes_on_with_the_answer_at_the_conversations_end(thinker: Rig) -> None:
    await whole_of(thinker, messages=[*ASK, {"role": "assistant", "content": "It is"}])
    prompt = thinker.prompts.decode(thinker.script.requests[0].prompt)
    assert prompt.endswith("<|assistant|>It is")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"system": "Be brief.", "tools": TOOLS, **choice("any")},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": HISTORY},
        {"messages": [*ASK, {"role": "assistant", "content": "It is"}]},
    ],
)
async def test_count_tokens_is_the_usage_of_the_answer(thinker: Rig, given: dict[str, Any]) -> None:
    response = await thinker.http.post(COUNT, json={"messages": ASK} | given)
    counted = MessageTokensCount.model_validate(response.json())
    assert response.headers["request-id"]
    assert thinker.script.requests == []
    thinker.says(CALL)
    assert counted.input_tokens == (await whole_of(thinker, **given))["usage"]["input_tokens"]


async def test_count_tokens_counts_what_exceeds_the_context(rig: Rig) -> None:
    long = [{"role": "user", "content": "x " * 5000}]
    response = await rig.http.post(COUNT, json={"messages": long})
    assert response.json()["input_tokens"] > 2048
    refused = await rig.http.post(URL, json={"messages": long, "max_tokens": 5})
    assert "maximum context length is 2048 tokens" in error_of(refused, 400)["message"]
    for length in (200_000, 2_000_000):
        longer = [{"role": "user", "content": "x " * length}]
        error = error_of(await rig.http.post(COUNT, json={"messages": longer}), 400)
        assert error["message"] == "messages must have at most 65536 tokens"


class Place(BaseModel):
    city: str
    days: int


async def test_anthropics_client_parses_an_answer_by_its_schema(thinker: Rig) -> None:
    thinker.says(ARGUMENTS, 2)
    asked: dict[str, Any] = {"model": "", "messages": ASK, "max_tokens": 500}
    async with client_of(thinker) as client:
        answer = await client.messages.parse(**asked, output_format=Place)
        beta = await client.beta.messages.create(**asked, betas=["some-2025-01-01"])
    assert answer.parsed_output == Place(**json.loads(ARGUMENTS))
    grammar = thinker.script.requests[0].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["required"] == ["city", "days"]
    assert beta.content[0].text == ARGUMENTS


async def test_anthropics_tool_runner_goes_on_without_a_thread(thinker: Rig) -> None:
    @anthropic.beta_async_tool
    async def clock() -> str:
        """Return the time."""
        return "noon"

    async with client_of(thinker) as client:
        runner = client.beta.messages.tool_runner(
            model="", max_tokens=50, messages=ASK, tools=[clock]
        )
        thinker.says(CLOCK_CALL)
        answer = await anext(runner)
        assert answer.stop_reason == "tool_use"
        thinker.says("It is noon.")
        answer = await anext(runner)
    assert answer.content[0].text == "It is noon."
    prompt = thinker.prompts.decode(thinker.script.requests[-1].prompt)
    assert "Is it cold?" in prompt
    assert "noon" in prompt


async def test_what_clients_send_along_is_ignored(rig: Rig) -> None:
    rig.says("x")
    ignored = {
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
        "diagnostics": {"previous_message_id": None},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "speed": "standard",
    }
    tool = {**CLOCK, "type": "custom", "cache_control": None, "eager_input_streaming": True}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-2025-01-01"}
    body = {"messages": ASK, "max_tokens": 5, "tools": [tool]} | ignored
    for path in (URL, COUNT):
        sent = body if path == URL else {k: v for k, v in body.items() if k != "max_tokens"}
        response = await rig.http.post(f"{path}?beta=true", json=sent, headers=headers)
        assert response.status_code == 200, response.text


def error_of(response: Any, status: int) -> dict[str, str]:
    """Return the error object of a response, after checking the response with Anthropic's type."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["error"].keys() == {"type", "message"}
    ErrorResponse.model_validate(body)
    assert response.headers["request-id"] == body["request_id"] != ""
    error: dict[str, str] = body["error"]
    return error


def said_by(role: str, *content: Any) -> dict[str, Any]:
    return {"messages": [*ASK, {"role": role, "content": list(content)}]}


# Changes to a good body, and the beginning of the error's message.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: "),
    ({"max_tokens": 0}, "max_tokens: "),
    ({"messages": []}, "messages: "),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: "),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content[0].text.text: "),
    (
        said_by("user", {"type": "image", "source": {}}),
        "messages[1].content[0].type must be one of",
    ),
    (said_by("user", {"type": "text"}), "messages[1].content[0].text.text is required"),
    (said_by("user", USE), "messages[1]: the role user has no tool_use"),
    (said_by("assistant", RESULT), "messages[1]: the role assistant has no tool_result"),
    (said_by("assistant", USE), "messages must not end with a tool_use"),
    (
        {"messages": [{"role": "user", "content": [RESULT] * (MAX_MESSAGES + 1)}]},
        "messages hold more",
    ),
    ({"system": [{"type": "thinking", "thinking": "x"}]}, "system[0].type: "),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type 'web_search_20250305' is not supported",
    ),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
    ({"tools": [{**CLOCK, "name": "a b"}]}, "tools[0].name: "),
    ({"tools": [CLOCK] * (MAX_TOOLS + 1)}, "tools: "),
    ({"tools": [CLOCK, CLOCK]}, "tools must not hold two tools of one name"),
    (choice("any"), "tool_choice demands a call"),
    (choice("tool"), "tool_choice: the type tool, and no other, needs a name"),
    (choice("tool", name="x") | {"tools": TOOLS}, "tool_choice names 'x'"),
    (choice("maybe"), "tool_choice.type: "),
    ({"thinking": {"type": "maybe"}}, "thinking.type: "),
    (
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema is required",
    ),
    ({"stop_sequences": [""]}, "stop_sequences[0]: "),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences: "),
    ({"temperature": 5}, "temperature must be in [0, 2]"),
    ({"top_k": -5}, "top_k "),
    ({"max_completion_tokens": 5}, "max_completion_tokens is not a parameter"),
]


@pytest.mark.parametrize(("body", "begins"), BAD, ids=lambda value: str(value)[:50])
async def test_a_bad_parameter_is_named_as_anthropic_names_it(
    rig: Rig, body: dict[str, Any], begins: str
) -> None:
    content = json.dumps({"messages": ASK, "max_tokens": 5} | body)
    headers = {"content-type": "application/json"}
    response = await rig.http.post(URL, content=content, headers=headers)
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(begins)
    assert rig.script.requests == []


async def test_an_unknown_type_is_quoted_in_part(rig: Rig) -> None:
    content = [{"type": "x" * 100_000}]
    for path in (URL, "/v1/chat/completions"):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 5}
        message = (await rig.http.post(path, json=body)).json()["error"]["message"]
        assert message.endswith("xxx…'")
        assert len(message) < 500


async def test_an_answer_that_the_template_cannot_continue_is_in_the_messages(
    thinker: Rig,
) -> None:
    prefilled = [*ASK, {"role": "assistant", "content": "hidden"}]
    for path, more in ((URL, {"max_tokens": 5}), (COUNT, {})):
        refused = await thinker.http.post(path, json={"messages": prefilled, **more})
        assert error_of(refused, 400)["message"].startswith("messages cannot be")


@pytest.mark.parametrize("path", [URL, COUNT])
async def test_errors_around_the_body_have_anthropics_shape(rig: Rig, path: str) -> None:
    good = {"messages": ASK} | ({"max_tokens": 5} if path == URL else {})
    post = rig.http.post
    json_type = {"content-type": "application/json"}
    large = b"x" * (MAX_BODY_BYTES + 1)
    unknown = await post(path, json=good | {"model": "claude"})
    assert error_of(unknown, 404)["type"] == "not_found_error"
    assert error_of(await post(path, content=b"{", headers=json_type), 400)
    assert error_of(await post(path, content=large, headers=json_type), 413)
    assert error_of(await post(path, json=good, headers={"content-encoding": "br"}), 415)
    assert error_of(await rig.http.get(path), 405)
    foreign = await post(path, json=good, headers={"host": "evil.example"})
    assert error_of(foreign, 403)["type"] == "permission_error"
    # The HTTP parser writes this answer, without the header request-id.
    headers = await post(path, json=good, headers={"x": "x" * 70_000})
    assert (headers.status_code, headers.json()["type"]) == (431, "error")


async def test_an_unknown_path_below_has_anthropics_shape(rig: Rig) -> None:
    error = error_of(await rig.http.post(f"{URL}/batches", json={}), 404)
    assert error["type"] == "not_found_error"
    assert "POST /v1/messages" in error["message"]
    assert "type" not in (await rig.http.get("/v1/messagesx")).json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (Reason.OVERLOADED, 429, "rate_limit_error"),
        (Reason.INTERNAL, 500, "api_error"),
        (Reason.VERIFIER_UNAVAILABLE, 503, "overloaded_error"),
        (Reason.DEADLINE_EXCEEDED, 504, "timeout_error"),
    ],
)
async def test_a_verifiers_errors_have_anthropics_types(
    rig: Rig, reason: Reason, status: int, kind: str, stream: bool
) -> None:
    rig.script.answer = lambda _: [OutriderError(reason, "because", retry_after_s=3.0)]
    body = {"messages": ASK, "max_tokens": 5, "stream": stream}
    response = await rig.http.post(URL, json=body, headers={"x-request-id": "mine"})
    assert error_of(response, status) == {"type": kind, "message": "because"}
    assert response.headers["request-id"] == "mine"
    assert response.headers["retry-after"] == "3"


async def test_a_failure_in_mid_stream_is_the_last_event(rig: Rig) -> None:
    rig.script.answer = lambda _: [plain([5]), OutriderError(Reason.INTERNAL, "broken")]
    body = {"messages": ASK, "max_tokens": 5, "stream": True}
    response = await rig.http.post(URL, json=body, headers={"x-request-id": "mine"})
    *_, error, end = response.text.split("\n\n")
    name, data = error.split("\n")
    assert (name, end) == ("event: error", "")
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "broken"},
        "request_id": "mine",
    }
    async with client_of(rig) as client:
        with pytest.raises(anthropic.APIStatusError, match="broken"):
            async with client.messages.stream(model="", messages=ASK, max_tokens=5) as stream:
                await stream.get_final_message()


async def test_a_fault_of_the_gateway_has_anthropics_shape(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.messages.routes.MessagesCall.writer", None)
    response = await rig.http.post(URL, json={"messages": ASK, "max_tokens": 5})
    assert error_of(response, 500)["type"] == "api_error"


async def test_a_full_gateway_refuses_a_message_unread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OutriderError(Reason.OVERLOADED, "full")

    monkeypatch.setattr(rig.gateway.generation.admission, "admit", full)
    response = await rig.http.post(URL, content=b"never read")
    assert error_of(response, 429) == {"type": "rate_limit_error", "message": "full"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keyed(prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    entries = [entry(ALICE, "alice"), entry(BOB, "bob", concurrent_sequences=1)]
    async with keyed_rig(prompts, tmp_path_factory.mktemp("keys"), entries) as rig:
        yield rig


async def test_a_key_comes_in_either_header(keyed: Rig) -> None:
    body = {"messages": ASK, "max_tokens": 50}
    for headers in ({"x-api-key": ALICE}, auth(ALICE), auth(ALICE) | {"x-api-key": "wrong"}):
        for path in (URL, "/v1/chat/completions"):
            response = await keyed.http.post(path, json=body, headers=headers)
            assert response.status_code == 200, response.text
            assert keyed.script.requests[-1].tenant == "alice"
    async with client_of(keyed, api_key=ALICE) as client:
        await client.messages.create(model="", messages=ASK, max_tokens=50)
    for headers in (
        {},
        {"x-api-key": ""},
        {"x-api-key": EXPIRED},
        auth("wrong") | {"x-api-key": ALICE},
    ):
        for path in (URL, COUNT):
            refused = await keyed.http.post(path, json=body, headers=headers)
            assert error_of(refused, 401)["type"] == "authentication_error"
            assert ALICE not in refused.text
    async with client_of(keyed, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(model="", messages=ASK, max_tokens=50)
    assert caught.value.request_id
    assert caught.value.type == "authentication_error"


async def test_a_used_up_limit_has_anthropics_shape(keyed: Rig) -> None:
    body = {"messages": ASK, "max_tokens": 50}
    headers = {"x-api-key": BOB}
    with keyed.gateway.generation.key_slots.held(entry(BOB, "bob"), 1):
        refused = await keyed.http.post(URL, json=body, headers=headers)
    assert error_of(refused, 429)["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "1"
    assert (await keyed.http.post(URL, json=body, headers=headers)).status_code == 200


async def test_without_keys_either_header_names_the_same_tenant() -> None:
    assert tenant_of({"x-api-key": "k"}) == tenant_of({"authorization": "Bearer k"}) != ""
    both = {"x-api-key": "other", "authorization": "Bearer k"}
    assert tenant_of(both) == tenant_of({"x-api-key": "k"})
    assert tenant_of({"x-api-key": " "}) == ""
