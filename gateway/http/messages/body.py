"""The bodies of Anthropic's requests, and their translation to a chat's body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gateway.http.ingress.fields import Body, Listed, Text
from gateway.http.messages.tools import AnyTool, ToolChoiceBody, ignored, unsupported
from gateway.http.openai.conversation import CalledFunction, JsonObject, Message, ToolCall
from gateway.http.openai.schema import ChatBody, JsonSchema, ResponseFormat, StructuredOutputs
from gateway.text.request import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from gateway.tools.definitions import MAX_TOOLS
from outrider.errors import invalid
from outrider.protocol.limits import MAX_MESSAGES

NAMES = {"response_format": "output_config.format", "continue_final_message": "messages"}
"""Maps a chat's parameters to their names in Anthropic's API, where these differ."""
# Translating this many turns takes a few milliseconds.
_TURNS_AT_ONCE = 256
_Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class _Block(Body):
    """A part of a message's content."""

    cache_control: Any = ignored("Ignored; prompts are always cached.")


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: Text
    citations: Any = ignored()


class ThinkingBlock(_Block):
    """The thought of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: Any = ignored("Ignored; thoughts are not signed.")


class RedactedThinkingBlock(_Block):
    """A thought that only Anthropic can read. The prompt leaves it out."""

    type: Literal["redacted_thinking"]
    data: Any = ignored()


class ToolUseBlock(_Block):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject
    caller: Any = ignored()

    @property
    def call(self) -> ToolCall:
        """The call in OpenAI's shape, without a further check of its parts."""
        arguments = json.dumps(self.input, ensure_ascii=False)
        function = CalledFunction.model_construct(name=self.name, arguments=arguments)
        return ToolCall.model_construct(id=self.id, function=function)


def _as_blocks(value: object) -> object:
    """Return a string as one block of text; any other value unchanged."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[
    Listed[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


class ToolResultBlock(_Block):
    """A tool's answer to a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts = Field(default=[])
    is_error: bool | None = ignored("Ignored; chat templates show the content alone.")


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
_BLOCKS: dict[str, tuple[type[_Block], ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
}


class InputMessage(Body):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[
        Listed[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
    ]

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        for block in self.content:
            if not isinstance(block, _BLOCKS[self.role]):
                raise ValueError(f"the role {self.role} has no {block.type}")
        return self


class ThinkingBody(Body):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = ignored()
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="omitted leaves the thought out; summarized shows it in full."
    )


class OutputFormat(Body):
    """The format of the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How the answer is written."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Passed to the chat template, max as xhigh."
    )
    format: OutputFormat | None = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens: the parts of a prompt."""

    model: str | None = None
    messages: Listed[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts | None = None
    tools: Listed[AnyTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = Field(
        default=None, description="Passed to the chat template. Without it, the template decides."
    )
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        default=None, description="The older place of output_config.format."
    )
    cache_control: Any = ignored("Ignored; prompts are always cached.")
    context_management: Any = ignored()
    diagnostics: Any = ignored()
    metadata: Any = ignored()
    service_tier: Any = ignored()
    speed: Any = ignored()

    async def chat(self, **more: Any) -> ChatBody:
        """Return the same request as a chat's body, with the fields `more` of a chat added.

        Lets other requests run while it translates a long conversation. Raises
        OutriderError(INVALID_VALUE) that names a field of Anthropic's request.
        """
        messages = await self._messages()
        choice = self.tool_choice or ToolChoiceBody(type="auto")
        thinking = self.thinking
        config = self.output_config or OutputConfig()
        effort = config.effort
        return ChatBody(
            model=self.model,
            messages=messages,
            # As at Anthropic, an answer at the end of the conversation is continued.
            continue_final_message=messages[-1].role == "assistant",
            tools=[tool.of_chat for tool in self.tools or ()],
            tool_choice=choice.of_chat,
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            enable_thinking=None if thinking is None else thinking.type != "disabled",
            include_reasoning=None if thinking is None else thinking.display != "omitted",
            reasoning_effort="xhigh" if effort == "max" else effort,
            response_format=_response_format(self.output_format or config.format),
            **more,
        )

    async def _messages(self) -> list[Message]:
        """Return the conversation as a chat's messages; neighbours of the same role are joined."""
        messages = [Message(role="system", content=_text(self.system, "\n"))] if self.system else []
        by_role = groupby(self.messages, lambda message: message.role)
        for index, (role, turns) in enumerate(by_role):
            if index % _TURNS_AT_ONCE == 0:
                await asyncio.sleep(0)
            blocks = [block for turn in turns for block in turn.content]
            if role == "assistant":
                messages.append(_assistant(blocks))
            else:
                messages += _asked(role, blocks)
        if len(messages) > MAX_MESSAGES:
            raise invalid("messages", f"hold more than {MAX_MESSAGES} turns and results of tools")
        if messages[-1].tool_calls:
            raise invalid("messages", "must not end with a tool_use: its tool_result is missing")
        return messages


def _refuse_thread(value: object) -> None:
    if value is not None:
        raise unsupported("is not supported: send all messages each time")


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, description="The answer also ends where the context is full.")
    stop_sequences: Listed[_Stop] | None = Field(default=None, max_length=MAX_STOP_STRINGS)
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="As in /v1/chat/completions."
    )
    # The field is declared so that it is refused even where unknown parameters are ignored: a
    # request that continues a thread has only the newest messages.
    thread: Annotated[Any, AfterValidator(_refuse_thread)] = Field(
        default=None, description="Not supported: each request must have all messages."
    )

    async def answered(self) -> ChatBody:
        """Return the same request as a chat's body, with the settings of an answer."""
        return await self.chat(
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            structured_outputs=self.structured_outputs,
        )


def _text(blocks: Sequence[object], separator: str) -> str:
    return separator.join([block.text for block in blocks if isinstance(block, TextBlock)])


def _assistant(blocks: Sequence[Block]) -> Message:
    """Return the message of an earlier answer. Its texts are joined, as in a chat's answer."""
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return Message(
        role="assistant",
        content=_text(blocks, ""),
        tool_calls=[block.call for block in blocks if isinstance(block, ToolUseBlock)] or None,
        reasoning_content="".join(thoughts) if thoughts else None,
    )


def _asked(role: Literal["system", "user"], blocks: Sequence[Block]) -> Iterator[Message]:
    """Yield the messages of a user's or system's turn; each result of a tool is its own message."""
    if not blocks:
        yield Message(role=role, content="")
    for is_result, group in groupby(blocks, lambda block: isinstance(block, ToolResultBlock)):
        if not is_result:
            yield Message(role=role, content=_text(list(group), "\n"))
            continue
        for block in group:
            assert isinstance(block, ToolResultBlock)
            text = _text(block.content, "\n")
            yield Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _response_format(wanted: OutputFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=wanted.schema_))
