"""The body of POST /v1/responses, and its translation to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from gateway.api_errors import validation_error
from gateway.http.ingress.fields import Body, Text, limited
from gateway.http.openai.conversation import JsonObject, template_variables
from gateway.http.openai.schema import (
    LEAST_TIMEOUT_S,
    SEED_MAX,
    SEED_MIN,
    ChatBody,
    SamplingBody,
    SpeculationBody,
    StructuredOutputs,
)
from gateway.http.responses.items import (
    Ignored,
    InputItem,
    Item,
    Json,
    input_items,
    messages_of,
)
from gateway.http.responses.tools import ToolChoiceField, Tools, ToolsField, chat_choice
from outrider.errors import invalid
from outrider.protocol.limits import MAX_MESSAGES, MAX_NAME_LENGTH

# The numerical parameters that an answer repeats, with their defaults.
_DEFAULTS: dict[str, float] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
}
# Maps a chat's parameter names to their names in the Responses API. A longer name comes before a
# name with which it begins.
_NAMES = {
    "response_format.json_schema": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "messages": "input",
}


class TextFormat(Body):
    """The format that the answer must have.

    The answer always follows a schema, whatever `strict` is.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[Text, Field(max_length=MAX_NAME_LENGTH)] | None = None
    description: Text | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def for_chat(self) -> Json:
        """Return a chat's `response_format`.

        Raises OutriderError(INVALID_VALUE) if a format of the type json_schema has no schema.
        """
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema_ is None:
            raise invalid("text.format.schema", "is required with type json_schema")
        return {"type": self.type, "json_schema": {"schema": self.schema_}}

    def shown(self) -> Json:
        """Return the format as an answer repeats it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return self.model_dump(by_alias=True) | {"strict": self.strict is not False}


class TextOptions(Body):
    """The format of the answer's text, and options that change nothing."""

    format: TextFormat | None = None
    verbosity: Ignored = None


class Reasoning(Body):
    """How much to think. The thought itself is in the answer, never a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None
    mode: Ignored = None


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_obfuscation: Ignored = None


def _include(values: list[str]) -> list[str]:
    if "message.output_text.logprobs" in values:
        raise ValueError("cannot have log probabilities; POST /v1/chat/completions gives them")
    return values


def _metadata(values: dict[str, str]) -> dict[str, str]:
    """Check OpenAI's limits of metadata, which the answer repeats."""
    if len(values) > 16:
        raise ValueError("must hold at most 16 entries")
    if any(len(key) > 64 or len(value) > 512 for key, value in values.items()):
        raise ValueError("must have keys of at most 64 and values of at most 512 characters")
    return values


class PromptBody(Body):
    """The parts of an answer's prompt."""

    model: str | None = None
    input: Annotated[
        Any, BeforeValidator(input_items, json_schema_input_type=str | list[InputItem] | None)
    ] = Field(default=[])
    instructions: Text | None = None
    previous_response_id: Text | None = Field(
        default=None, description="Continue the conversation of this answer, if it is still kept."
    )
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: ToolsField = Tools()
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(template_variables)] | None = (
        Field(default=None, description="As in /v1/chat/completions.")
    )
    # Accepted and ignored: the gateway never drops items of a conversation that is too long.
    truncation: Literal["auto", "disabled"] | None = None
    conversation: None = None

    @property
    def names(self) -> dict[str, str]:
        """Maps a chat's parameter names to their names in this body, as `renamed` needs them."""
        tools = {}
        for number, tool in enumerate(self.tools.flat):
            tools[f"tools[{number}].function"] = tools[f"tools[{number}]"] = tool.path
        return _NAMES | tools

    def chat(self, items: Sequence[Item], **more: Any) -> ChatBody:
        """Return the same request as a chat with the conversation's `items` and the fields `more`.

        Raises OutriderError that names a parameter as a chat does, see `names`.
        """
        messages = messages_of(items)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise invalid("input", f"must hold 1 to {MAX_MESSAGES} items, not {len(messages)}")
        given: Json = {
            "model": self.model,
            "messages": messages,
            "tools": [tool.for_chat() for tool in self.tools.flat],
            "tool_choice": chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.text is not None and self.text.format is not None:
            given["response_format"] = self.text.format.for_chat()
        if self.reasoning is not None:
            given["reasoning_effort"] = self.reasoning.effort
        try:
            return ChatBody.model_validate(given | more)
        except ValidationError as cause:
            raise validation_error(cause.errors(include_url=False)) from cause


class InputTokensBody(PromptBody):
    """POST /v1/responses/input_tokens."""

    personality: Ignored = None


class ResponsesBody(PromptBody, SamplingBody):
    """POST /v1/responses."""

    store: bool | None = Field(
        default=None,
        description="Whether the answer is kept, in memory, for a while. Default: true.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = limited(minimum=1)
    include: Annotated[list[str], AfterValidator(_include)] | None = None
    metadata: Annotated[dict[Text, Text], AfterValidator(_metadata)] | None = None
    seed: int | None = limited(
        "As in /v1/chat/completions.", minimum=SEED_MIN, exclusiveMaximum=SEED_MAX + 1
    )
    speculation: SpeculationBody = SpeculationBody()
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="As in /v1/chat/completions."
    )
    timeout: float | None = limited("As in /v1/chat/completions.", minimum=LEAST_TIMEOUT_S)
    background: Literal[False] | None = None
    prompt: None = None
    top_logprobs: Literal[0] | None = None
    # The next three parameters are ignored, but answers repeat them. `max_tool_calls` limits tools
    # that OpenAI runs; the other two are labels for OpenAI's records and caches.
    max_tool_calls: int | None = limited("Ignored.")
    prompt_cache_key: Text | None = limited("Ignored.")
    safety_identifier: Text | None = limited("Ignored.")
    client_metadata: Ignored = None
    moderation: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    service_tier: Ignored = None
    user: Ignored = None

    @property
    def keeps(self) -> bool:
        """True if the answer is kept."""
        return self.store is not False

    def asked(self, items: Sequence[Item]) -> ChatBody:
        """Return the same request as a chat, like `PromptBody.chat`, with all settings."""
        same = ["stream", "seed", "speculation", "structured_outputs", "timeout"]
        same += SamplingBody.model_fields
        settings = {name: getattr(self, name) for name in same}
        return self.chat(items, max_completion_tokens=self.max_output_tokens, **settings)

    def shown(self) -> Json:
        """Return the parameters that an answer repeats, with their defaults."""
        text = TextOptions() if self.text is None else self.text
        form = TextFormat(type="text") if text.format is None else text.format
        reasoning = Reasoning() if self.reasoning is None else self.reasoning
        shown = _DEFAULTS | self.model_dump(include=set(_DEFAULTS), exclude_none=True)
        return shown | {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.keeps,
            "text": {"format": form.shown()},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools.shown(),
            "top_logprobs": 0,
            "truncation": "disabled",
        }
