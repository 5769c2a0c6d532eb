"""The model sees Anthropic's client tools as functions; the gateway refuses other tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import anthropic
import pytest
import pytest_asyncio
from anthropic.tools import BetaAsyncLocalFilesystemMemoryTool
from anthropic.types import ToolUnionParam
from anthropic.types.beta import BetaMemoryTool20250818Command

from gateway.http.messages.tools import CLIENT_TOOLS
from tests.gateway.gateway_rig import Rig, rig_with_template

pytestmark = pytest.mark.asyncio(loop_scope="session")

Json = dict[str, Any]
ASK: list[Json] = [{"role": "user", "content": "Go."}]
TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{% endfor %}"
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def caller(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """Yield a gateway whose model calls tools as Hermes does."""
    folder = tmp_path_factory.mktemp("caller")
    async with rig_with_template(folder, TEMPLATE, tool_format="hermes") as made:
        yield made


def calls(rig: Rig, name: str, **given: Any) -> None:
    """Let the model's next answers call this tool."""
    call = json.dumps({"name": name, "arguments": given})
    rig.says(f"<tool_call>\n{call}\n</tool_call>")


async def post(rig: Rig, *tools: Json, **more: Any) -> Any:
    body = {"messages": ASK, "max_tokens": 500, "tools": tools, **more}
    return await rig.http.post("/v1/messages", json=body)


def of(kind: str, **more: Any) -> Json:
    return {"type": kind, "name": CLIENT_TOOLS[kind][0], **more}


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
async def test_a_tool_that_the_caller_runs_is_called_as_a_function(caller: Rig, kind: str) -> None:
    name = of(kind)["name"]
    calls(caller, name, command="view")
    answer = await post(caller, of(kind, defer_loading=False, allowed_callers=["direct"]))
    assert answer.status_code == 200, answer.text
    [block] = answer.json()["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", name, {"command": "view"})
    prompt = caller.prompts.decode(caller.script.requests[-1].prompt)
    [function] = json.loads(prompt.removesuffix("Go."))
    properties = function["function"]["parameters"]["properties"]
    assert "command" in properties
    forced = await post(caller, of(kind, strict=True), tool_choice={"type": "tool", "name": name})
    assert forced.status_code == 200, forced.text
    counted = await caller.http.post(
        "/v1/messages/count_tokens", json={"messages": ASK, "tools": [of(kind)]}
    )
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]


async def test_the_memory_tool_has_the_commands_of_anthropics_client() -> None:
    schema = CLIENT_TOOLS["memory_20250818"][2]
    commands = get_args(get_args(BetaMemoryTool20250818Command)[0])
    names = {get_args(command.model_fields["command"].annotation)[0] for command in commands}
    assert names == set(schema["properties"]["command"]["enum"])
    fields = {field for command in commands for field in command.model_fields}
    assert fields <= schema["properties"].keys()


async def test_anthropics_client_keeps_its_memory(caller: Rig, tmp_path: Path) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=caller.gateway.http_url, api_key="any", max_retries=0
    ) as client:
        runner = client.beta.messages.tool_runner(
            model="",
            max_tokens=500,
            messages=ASK,
            tools=[BetaAsyncLocalFilesystemMemoryTool(base_path=str(tmp_path))],
        )
        calls(caller, "memory", command="create", path="/memories/a.txt", file_text="blue")
        assert (await anext(runner)).stop_reason == "tool_use"
        caller.says("Done.")
        assert (await anext(runner)).content[0].text == "Done."
    assert await asyncio.to_thread((tmp_path / "memories/a.txt").read_text) == "blue"


async def test_every_other_tool_of_anthropics_is_refused_by_its_type(rig: Rig) -> None:
    named = [get_type_hints(tool)["type"] for tool in get_args(ToolUnionParam)]
    kinds = {kind for literal in named for kind in get_args(literal) if isinstance(kind, str)}
    others = kinds - CLIENT_TOOLS.keys()
    assert {"web_search_20250305", "code_execution_20250522", "computer_toolset_20260801"} <= others
    assert len(CLIENT_TOOLS.keys() & kinds) >= 5
    for kind in sorted(others):
        answer = await post(rig, {"type": kind, "name": "x"})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith(f"tools[0].type '{kind}' is not supported: ")
        assert ("screen" in message) is kind.startswith(("computer", "browser"))
    assert not rig.script.requests


@pytest.mark.parametrize(
    ("tool", "begins"),
    [
        (of("bash_20250124", name="sh"), "tools[0]: the tool of type bash_20250124 has the name"),
        ({"type": "bash_20250124"}, "tools[0].name is required"),
        (of("bash_20250124", x=1), "tools[0].x is not a parameter"),
        (of("bash_20250124", defer_loading=True), "tools[0].defer_loading true is not supported"),
        (
            {"name": "f", "input_schema": {}, "defer_loading": True},
            "tools[0].defer_loading true is not supported",
        ),
        (
            {"name": "f", "input_schema": {}, "allowed_callers": ["code_execution_20250825"]},
            'tools[0].allowed_callers must hold "direct"',
        ),
        ({"type": "x" * 1000, "name": "f"}, f"tools[0].type '{'x' * 60}' is not supported"),
        ({"type": {}, "name": "f"}, "tools[0].type: "),
    ],
)
async def test_a_tool_that_cannot_be_is_named(rig: Rig, tool: Json, begins: str) -> None:
    answer = await post(rig, tool)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(begins)
    assert len(message) < 400
