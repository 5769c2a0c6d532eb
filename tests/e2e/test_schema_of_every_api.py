"""No schema makes a process open a file or an address, in any API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from outrider.process.network import rpc_errors
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.shared.secret_traps import SECRET, Traps, set_traps
from tests.stack import GatewayProcess, Stack

ASK = [{"role": "user", "content": "Say something as JSON."}]


@pytest.fixture(scope="module")
def traps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traps]:
    with set_traps(tmp_path_factory.mktemp("secret")) as found:
        yield found


@pytest.fixture(scope="module")
def gateway(stack: Stack) -> Iterator[GatewayProcess]:
    found = GatewayProcess(stack.address)
    try:
        found.wait_ready()
        yield found
    finally:
        found.close()


def schemas(uri: str) -> list[dict[str, Any]]:
    """Return schemas with a reference that a validator may follow.

    A grammar's backend must not follow it.
    """
    to = {"$ref": uri}
    properties = {"properties": {"a": to}, "required": ["a"]}
    draft_3 = "http://json-schema.org/draft-03/schema#"
    return [
        {"$schema": draft_3, "type": "object", "disallow": [to]},
        {"$schema": draft_3, "type": "object", "extends": to},
        {"type": "object", **properties},
        {"type": "object", "$dynamicRef": uri},
        {"type": "object", "properties": {"a": {"$schema": draft_3, "disallow": [to]}}},
        {"$schema": uri, "type": "object"},
    ]


def requests(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and body of an HTTP request for each place that can hold a schema."""
    function = {"name": "f", "parameters": schema}
    chat = {"messages": ASK, "max_tokens": 4}
    tools = [{"type": "function", "function": function}]
    strict = [{"type": "function", "function": {**function, "strict": True}}]
    named = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    yield "/v1/completions", {"prompt": "a", "structured_outputs": {"json": schema}}
    yield "/v1/chat/completions", {**chat, "structured_outputs": {"json": json.dumps(schema)}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    yield "/v1/chat/completions", {**chat, "response_format": form}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    yield "/v1/chat/completions", {**chat, "response_format": tag}
    yield "/v1/chat/completions", {**chat, "tools": tools, "tool_choice": "required"}
    yield "/v1/chat/completions", {**chat, "tools": strict}
    forced = {"type": "function", "function": {"name": "f"}}
    yield "/v1/chat/completions", {**chat, "tools": tools, "tool_choice": forced}
    yield "/v1/responses", {"input": "a", "max_output_tokens": 4, "text": {"format": named}}
    flat = {"type": "function", "strict": True, **function}
    called = {"tools": [flat], "tool_choice": "required"}
    yield "/v1/responses", {"input": "a", "max_output_tokens": 4, **called}
    formed = {"format": {"type": "json_schema", "schema": schema}}
    yield "/v1/messages", {**chat, "output_config": formed}
    given = {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}
    yield "/v1/messages", {**chat, **given}


@pytest.mark.slow
async def test_no_schema_makes_a_process_open_anything_by_any_api(
    gateway: GatewayProcess, traps: Traps
) -> None:
    refused = asked = 0
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        grpc.aio.insecure_channel(gateway.grpc_address) as channel,
    ):
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for schema in (schema for uri in traps.places for schema in schemas(uri)):
            for path, body in requests(schema):
                answer = await http.post(path, json={"model": model, **body})
                asked += 1
                refused += answer.status_code == 400
                assert SECRET not in answer.text
                assert traps.read == [], (path, body)
            grammar = common_pb2.Grammar(json_schema=json.dumps(schema))
            tool = generation_pb2.Tool(name="f", parameters=json.dumps(schema), strict=True)
            chat = generation_pb2.Chat(
                messages=[generation_pb2.ChatMessage(role="user", content="a")],
                tools=[tool],
                tool_mode=generation_pb2.TOOL_MODE_REQUIRED,
            )
            for request in (
                generation_pb2.GenerateTextRequest(prompt="a", grammar=grammar),
                generation_pb2.GenerateTextRequest(chat=chat),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    async for _ in stub.GenerateText(request, timeout=60):
                        pass
                assert rpc_errors.error_of(failed.value).reason.name == "INVALID_VALUE"
                assert SECRET not in str(failed.value)
                assert traps.read == []
    assert refused == asked
