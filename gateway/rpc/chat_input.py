"""A conversation in the protos' messages, checked like a conversation over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.api_errors import validation_error
from gateway.http.ingress.fields import Body
from gateway.http.ingress.json_size import check_size
from gateway.http.openai.conversation import Message, template_variables
from gateway.http.openai.tools import ToolBody
from gateway.text.answers import AnswerOptions, asks_for_thought
from gateway.text.request import Conversation
from gateway.tools.definitions import MAX_TOOLS, Mode, ToolChoice
from outrider.errors import invalid
from outrider.v1 import generation_pb2

_MODES: dict[int, Mode] = {
    generation_pb2.TOOL_MODE_UNSPECIFIED: "auto",
    generation_pb2.TOOL_MODE_AUTO: "auto",
    generation_pb2.TOOL_MODE_REQUIRED: "required",
    generation_pb2.TOOL_MODE_NONE: "none",
}
_Checked = TypeVar("_Checked", bound=Body)


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation for the chat template, and its demands on the answer."""

    conversation: Conversation
    options: AnswerOptions


def chat_input(chat: generation_pb2.Chat) -> ChatInput:
    """Return the conversation of a request.

    Raises OutriderError(INVALID_VALUE) that names the field.
    """
    if not chat.messages:
        raise invalid("chat.messages", "must hold at least 1 message")
    if len(chat.tools) > MAX_TOOLS:
        problem = f"must hold at most {MAX_TOOLS} tools, not {len(chat.tools)}"
        raise invalid("chat.tools", problem)
    mode = _MODES.get(chat.tool_mode)
    if mode is None:
        raise invalid("chat.tool_mode", f"must be a value of ToolMode, not {chat.tool_mode}")
    messages = _checked(Message, "messages", [_message(given) for given in chat.messages])
    tools = _checked(ToolBody, "tools", [_tool(i, tool) for i, tool in enumerate(chat.tools)])
    variables = _variables(chat.template_variables) if chat.template_variables else {}
    shown = [tool.for_template() for tool in tools]
    rendering: dict[str, Any] = {"tools": shown, "variables": variables}
    names = frozenset(chat.tool_names) if chat.tool_names else None
    choice = ToolChoice(mode, names)
    return ChatInput(
        Conversation([message.for_template() for message in messages], rendering),
        AnswerOptions(
            [tool.tool for tool in tools],
            choice,
            is_parallel=not chat.single_call,
            thinks=asks_for_thought(variables),
            binds_thought=chat.grammar_binds_thought,
            tools_field="chat.tools",
            choice_field="chat.tool_mode" if names is None else "chat.tool_names",
        ),
    )


def _checked(kind: type[_Checked], field: str, given: Sequence[Any]) -> list[_Checked]:
    checked = []
    for index, values in enumerate(given):
        try:
            checked.append(kind.model_validate(values))
        except ValidationError as cause:
            # The protos have no field `function`, so the error's path must not name it.
            found = [
                {**detail, "loc": ("chat", field, index, *_without_function(detail["loc"]))}
                for detail in cause.errors()[:1]
            ]
            raise validation_error(found) from cause
    return checked


def _without_function(location: Sequence[str | int]) -> list[str | int]:
    return [part for part in location if part != "function"]


def _message(given: generation_pb2.ChatMessage) -> dict[str, Any]:
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in given.tool_calls
    ]
    optional = {
        "tool_calls": calls,
        "tool_call_id": given.tool_call_id,
        "reasoning_content": given.reasoning,
    }
    known = {name: value for name, value in optional.items() if value}
    return {"role": given.role, "content": given.content, **known}


def _tool(index: int, given: generation_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": given.name, "strict": given.strict}
    if given.description:
        function["description"] = given.description
    if given.parameters:
        function["parameters"] = _object(given.parameters, f"chat.tools[{index}].parameters")
    return {"type": "function", "function": function}


def _variables(text: str) -> Mapping[str, Any]:
    field = "chat.template_variables"
    try:
        return template_variables(_object(text, field))
    except ValueError as cause:
        raise invalid(field, str(cause)) from cause


def _object(text: str, field: str) -> dict[str, Any]:
    """Parse a JSON object. Raises OutriderError(INVALID_VALUE)."""
    check_size(text.encode())
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise invalid(field, f"is not JSON: {cause}") from cause
    if not isinstance(parsed, dict):
        raise invalid(field, "must be a JSON object")
    return parsed
