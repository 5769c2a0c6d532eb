"""Request bodies' messages, and the options with which a chat template renders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from gateway.http.fields import Body, Listed, Text, check_unicode
from gateway.unsupported import UNSUPPORTED
from outrider.errors import invalid

MAX_TEMPLATE_VARIABLES = 16
MAX_TEMPLATE_NAME_CHARACTERS = 64
MAX_TEMPLATE_CHARACTERS = 4096
# The gateway sets these variables itself, as well as special tokens such as bos_token.
_TEMPLATE_OWN = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)
# An answer's message has these fields beside its text. Clients send them back in a history.
_EMPTY_IN_MESSAGE = (
    "annotations",
    "audio",
    "function_call",
    "reasoning_content",
    "refusal",
    "tool_calls",
)


class TextPart(Body):
    """A part of a message's content. Of OpenAI's kinds of parts only text is supported."""

    type: Literal["text"]
    text: Text


_PARTS = TypeAdapter(Listed[TextPart])
Content = str | Annotated[list[TextPart], Field(min_length=1)]


def joined(separator: str) -> Callable[[object], object]:
    """A validator that joins OpenAI's list of content parts into one text."""

    def join(value: object) -> object:
        """The text of a list of parts; any other value as it is. Raises ValidationError."""
        if not isinstance(value, list) or not value:
            return value
        return separator.join(part.text for part in _PARTS.validate_python(value))

    return join


def _no_calls(value: object) -> object:
    """Refuse calls in a message of the history. `Message` has dropped empty ones before."""
    raise PydanticCustomError(
        UNSUPPORTED, "is not supported: the history may hold no calls of tools and functions"
    )


_NoCalls = Annotated[None, BeforeValidator(_no_calls, json_schema_input_type=None)]


class Message(Body):
    """One turn of a conversation. `developer` is OpenAI's newer name for `system`."""

    # The calls come before the content: only the first complaint is reported, and beside a call
    # the content is null.
    role: Literal["system", "developer", "user", "assistant"]
    tool_calls: _NoCalls = None
    function_call: _NoCalls = None
    content: Annotated[Text, BeforeValidator(joined("\n"), json_schema_input_type=Content)]
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {
            key: value
            for key, value in values.items()
            if key not in _EMPTY_IN_MESSAGE or value not in (None, [])
        }
        calls = kept.keys() & {"tool_calls", "function_call"}
        if kept.get("role") == "assistant" and kept.get("content", ...) is None and not calls:
            # Clients send back an answer of no tokens with null as its content.
            kept["content"] = ""
        return kept

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it, with `developer` as `system`."""
        message = {"role": self.role.replace("developer", "system"), "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        return message


def _template_variables(values: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for too many, too long or reserved variables of a chat template."""
    if len(values) > MAX_TEMPLATE_VARIABLES:
        raise ValueError(f"must hold at most {MAX_TEMPLATE_VARIABLES} names")
    for name in values:
        if not name.isidentifier() or len(name) > MAX_TEMPLATE_NAME_CHARACTERS:
            longest = f"at most {MAX_TEMPLATE_NAME_CHARACTERS} characters"
            raise ValueError(f"must have identifiers of {longest} as names")
        if name in _TEMPLATE_OWN or name.endswith("_token"):
            raise ValueError(f"must not set {name}, which the server sets itself")
    try:
        written = json.dumps(values, ensure_ascii=False)
    except RecursionError as cause:
        raise ValueError("is nested too deeply") from cause
    if len(written) > MAX_TEMPLATE_CHARACTERS:
        raise ValueError(f"must have at most {MAX_TEMPLATE_CHARACTERS} characters as JSON")
    check_unicode(written)
    return values


class TemplateOptions(Body):
    """vLLM's options of rendering messages with the model's chat template."""

    add_generation_prompt: bool | None = Field(
        default=None,
        description="vLLM's extension. End the prompt with the beginning of an answer. "
        "Default: true unless continue_final_message is.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="vLLM's extension. Leave the last message open; the answer continues it.",
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_variables)] | None = (
        Field(
            default=None,
            description="vLLM's extension. Variables of the chat template, e.g. enable_thinking.",
        )
    )

    def rendering(self) -> dict[str, Any]:
        """The keyword arguments of `Prompts.render`.

        Raises OutriderError(INVALID_VALUE) if the options contradict each other.
        """
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            message = "must not be true together with continue_final_message"
            raise invalid("add_generation_prompt", message)
        opens = self.add_generation_prompt
        if opens is None:
            opens = not continues
        return {
            "add_generation_prompt": opens,
            "continue_final_message": continues,
            "variables": self.chat_template_kwargs or {},
        }
