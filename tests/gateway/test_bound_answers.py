"""In every API, a grammar binds only the text after a thought; the gateway separates the two."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from outrider.grammar.kinds import FreeThought, Grammar, GrammarKind
from outrider.protocol.messages import FinishReason
from outrider.v1 import common_pb2, generation_pb2
from tests.gateway.gateway_rig import Rig, rig_with_template, text_by_part

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Like Qwen 3's template: the model may think, unless the prompt has an empty thought. With
# `always`, the prompt begins a thought; with `deaf`, the template has no switch for thoughts.
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if always %}<think>\n"
    "{% elif enable_thinking is false and not deaf %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{# <tool_call>\\n{ <|im_start|> #}"
)
CHAT = [{"role": "user", "content": "Why?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
ALWAYS = {"chat_template_kwargs": {"always": True}}
POSSIBLE = FreeThought("<think>", "</think>", "\n\n")
OPEN = FreeThought("", "</think>", "\n\n")
BINDS = {"structured_outputs": {"enable_in_reasoning": True}}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def thinker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with rig_with_template(tmp_path_factory.mktemp("model"), TEMPLATE) as rig:
        yield rig


async def asked(rig: Rig, path: str, **body: Any) -> dict[str, Any]:
    """Return the answer to a request."""
    response = await rig.http.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def sent(rig: Rig) -> Grammar:
    """Return the grammar of the last request that reached the verifier."""
    grammar = rig.script.requests[-1].grammar
    assert grammar is not None
    return grammar


async def choice_of(rig: Rig, **given: Any) -> dict[str, Any]:
    """Return the choice that answers a chat with a schema."""
    body = {"messages": CHAT, "response_format": BY_SCHEMA} | given
    found: dict[str, Any] = (await asked(rig, "/v1/chat/completions", **body))["choices"][0]
    return found


@pytest.mark.parametrize(
    ("given", "thought"),
    [
        ({}, POSSIBLE),
        ({"enable_thinking": True}, POSSIBLE),
        (ALWAYS, OPEN),
        ({"include_reasoning": False} | ALWAYS, OPEN),
        ({"separate_reasoning": False} | ALWAYS, OPEN),
        ({"enable_thinking": False}, None),
        ({"reasoning_effort": "none"}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
        # The template has no switch for thoughts, so the grammar forbids them.
        ({"enable_thinking": False, "chat_template_kwargs": {"deaf": True}}, None),
        # The prompt begins a thought, and no parameter can prevent that.
        ({"enable_thinking": False} | ALWAYS, OPEN),
        (BINDS, None),
        (BINDS | ALWAYS, None),
        ({"structured_outputs": {"enable_in_reasoning": False}}, POSSIBLE),
    ],
)
async def test_a_grammar_leaves_free_the_thought_that_may_come(
    thinker: Rig, given: Mapping[str, Any], thought: FreeThought | None
) -> None:
    thinker.says("x")
    await choice_of(thinker, **given)
    assert sent(thinker).thought == thought


@pytest.mark.parametrize(
    ("begun", "thought"),
    [
        ('{"a": ', None),
        ("<think>\nSo", OPEN),
        ('<think>\nSo\n</think>\n\n{"a"', None),
        ("", POSSIBLE),
    ],
)
async def test_an_answer_that_goes_on_thinks_only_within_its_thought(
    thinker: Rig, begun: str, thought: FreeThought | None
) -> None:
    thinker.says("x")
    messages = [*CHAT, {"role": "assistant", "content": begun}]
    await choice_of(thinker, messages=messages, continue_final_message=True)
    assert sent(thinker).thought == thought


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
async def test_every_kind_of_grammar_leaves_the_thought_free(
    thinker: Rig, given: dict[str, Any]
) -> None:
    thinker.says("x")
    await asked(thinker, "/v1/chat/completions", messages=CHAT, **given)
    assert sent(thinker).thought == POSSIBLE


async def test_a_prompt_without_a_template_has_no_thought(thinker: Rig) -> None:
    thinker.says("x")
    body = {"prompt": "<think>", "structured_outputs": {"regex": "a+"}}
    await asked(thinker, "/v1/completions", **body)
    assert sent(thinker).thought is None


RESPONSES = {"input": "Why?", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}}
MESSAGES = {
    "messages": CHAT,
    "max_tokens": 40,
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)]
)
async def test_the_other_apis_bind_the_same(thinker: Rig, path: str, body: dict[str, Any]) -> None:
    thinker.says('<think>\nso\n</think>\n\n{"a": "</think>"}')
    found = await asked(thinker, path, **body)
    assert sent(thinker).thought == POSSIBLE
    parts = found.get("output", found.get("content"))
    assert parts[0]["type"] in ("reasoning", "thinking")
    assert '"so"' in json.dumps(parts[0])
    text = parts[1]["content"][0]["text"] if path == "/v1/responses" else parts[1]["text"]
    assert text == '{"a": "</think>"}'
    await asked(thinker, path, **body, **BINDS)
    assert sent(thinker).thought is None
    bare = {name: body[name] for name in body.keys() - {"text", "output_config"}}
    await asked(thinker, path, **bare, structured_outputs={"regex": "a+"})
    assert sent(thinker) == Grammar(GrammarKind.REGEX, "a+", thought=POSSIBLE)


def chat_of(**more: Any) -> generation_pb2.GenerateTextRequest:
    grammar = common_pb2.Grammar(json_schema=json.dumps(SCHEMA))
    message = generation_pb2.ChatMessage(role="user", content="Why?")
    chat = generation_pb2.Chat(messages=[message], **more)
    return generation_pb2.GenerateTextRequest(chat=chat, grammar=grammar)


@pytest.mark.parametrize(
    ("more", "thought"),
    [
        ({}, POSSIBLE),
        ({"template_variables": '{"always": true}'}, OPEN),
        ({"template_variables": '{"enable_thinking": false, "deaf": true}'}, None),
        ({"grammar_binds_thought": True}, None),
    ],
)
async def test_chats_over_grpc_bind_the_same(
    thinker: Rig, more: dict[str, Any], thought: FreeThought | None
) -> None:
    thinker.says("so" if thought == OPEN else "<think>so")
    found = [piece async for piece in thinker.generation.GenerateText(chat_of(**more))]
    assert sent(thinker).thought == thought
    reasoning = "".join([piece.reasoning for piece in found])
    assert reasoning == ("" if thought is None else "so")


async def test_a_caller_over_grpc_names_the_thought_of_its_own_prompt(thinker: Rig) -> None:
    thinker.says("x")
    free = common_pb2.FreeThought(end="|")
    grammar = common_pb2.Grammar(regex="a+", thought=free)
    request = generation_pb2.GenerateTextRequest(prompt="p", grammar=grammar)
    assert [piece async for piece in thinker.generation.GenerateText(request)]
    assert sent(thinker).thought == FreeThought("", "|")


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize(
    ("given", "said", "thought", "content"),
    [
        (
            {},
            '<think>\nso\n</think>\n\n{"a": "</think>\n\n<think>"}',
            "so",
            '{"a": "</think>\n\n<think>"}',
        ),
        (ALWAYS, 'so <b>\n</think>\n\n{"a": "<tool_call>"}', "so <b>", '{"a": "<tool_call>"}'),
        ({}, '{"a": "<think>b</think>"}', None, '{"a": "<think>b</think>"}'),
        ({}, "<thin", None, "<thin"),
        # The answer keeps its own blanks: only the line breaks after a thought are dropped.
        (ALWAYS, "so</think>\n\n\n x \n", "so", "\n x \n"),
        ({}, "\n x \n", None, "\n x \n"),
        (ALWAYS, "so</think>\n", "so", None),
        (BINDS | ALWAYS, '{"a": "</think>"}', None, '{"a": "</think>"}'),
        (
            {"separate_reasoning": False} | ALWAYS,
            "so</think>\n\n{}",
            None,
            "so</think>\n\n{}",
        ),
        ({"include_reasoning": False} | ALWAYS, "so</think>\n\n{}", None, "{}"),
    ],
)
async def test_all_that_follows_the_thought_is_content(
    thinker: Rig,
    given: dict[str, Any],
    said: str,
    thought: str | None,
    content: str | None,
    chunk: int,
) -> None:
    thinker.says(said, chunk)
    message = (await choice_of(thinker, **given))["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, content)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_tokens_tell_the_thought_from_the_bound_answer(thinker: Rig, chunk: int) -> None:
    thinker.says('<think>so</think>\n\n{"a": "</think>"}', chunk)
    texts = text_by_part(await choice_of(thinker, speculation={"tokens": True}))
    assert texts.keys() == {"reasoning_content", "content"}
    assert texts["reasoning_content"].startswith("<think>so</think>")
    assert texts["content"].lstrip() == '{"a": "</think>"}'


@pytest.mark.parametrize("given", [{}, ALWAYS])
async def test_a_thought_that_is_cut_off_leaves_no_content(
    thinker: Rig, given: dict[str, Any]
) -> None:
    said = "I still think" if given else "<think>I still think"
    thinker.says(said, reason=FinishReason.LENGTH)
    choice = await choice_of(thinker, max_tokens=50, **given)
    assert choice["finish_reason"] == "length"
    assert choice["grammar_incomplete"]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "I still think"


TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


async def test_a_grammar_that_binds_the_thought_binds_it_beside_tools_too(thinker: Rig) -> None:
    thinker.says('{"a": "b"}')
    tools = {"tools": [TOOL]} | ALWAYS
    await choice_of(thinker, **tools)
    assert "</think>" in sent(thinker).text
    message = (await choice_of(thinker, **tools, **BINDS))["message"]
    assert "</think>" not in sent(thinker).text
    assert message["content"] == '{"a": "b"}'


async def test_a_forced_call_has_no_thought_where_the_chat_asks_for_none(thinker: Rig) -> None:
    thinker.says("x")
    deaf = {"chat_template_kwargs": {"deaf": True}}
    body = {"messages": CHAT, "tools": [TOOL], "tool_choice": "required"} | deaf
    for effort, has_thought in (("low", True), ("none", False)):
        await asked(thinker, "/v1/chat/completions", reasoning_effort=effort, **body)
        assert ("</think>" in sent(thinker).text) is has_thought
