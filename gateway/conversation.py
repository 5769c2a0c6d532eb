"""Conversations in request bodies: their messages, and how the model's chat template renders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from gateway.fields import Body, Listed, Text, check_unicode
from gateway.unsupported import UNSUPPORTED
from outrider.errors import invalid

MAX_MESSAGES = 2048
MAX_TEMPLATE_VARIABLES = 16
MAX_TEMPLATE_NAME_CHARACTERS = 64
MAX_TEMPLATE_CHARACTERS = 4096
# The gateway itself gives these to a template, and special tokens such as bos_token.
_TEMPLATE_OWN = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)
# An answer's message carries these beside its text, so that clients can send it back as it came.
_EMPTY_IN_MESSAGE = (
    "annotations",
    "audio",
    "function_call",
    "reasoning_content",
    "refusal",
    "tool_calls",
)


class TextPart(Body):
    """A piece of a message's content; of OpenAI's kinds, text alone."""

    type: Literal["text"]
    text: Text


_PARTS = TypeAdapter(Listed[TextPart])
Content = str | Annotated[list[TextPart], Field(min_length=1)]


def joined(separator: str) -> Callable[[object], object]:
    """OpenAI's content, a text or a list of parts, as one text."""

    def join(value: object) -> object:
        return (
            separator.join(part.text for part in _PARTS.validate_python(value))
            if isinstance(value, list) and value
            else value
        )

    return join


def _no_calls(value: object) -> object:
    """Calls in a message of the history, of which empty ones have been dropped before."""
    raise PydanticCustomError(
        UNSUPPORTED, "is not supported: the history may hold no calls of tools and functions"
    )


_NoCalls = Annotated[None, BeforeValidator(_no_calls, json_schema_input_type=None)]


class Message(Body):
    """One turn of a conversation. `developer` is OpenAI's newer name for `system`."""

    # Before the content, which is null beside a call: the first complaint is the one that is told.
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
        if (
            kept.get("role") == "assistant"
            and kept.get("content", ...) is None
            and not kept.keys() & {"tool_calls", "function_call"}
        ):
            kept["content"] = ""  # as clients send back an answer of no tokens
        return kept

    def for_template(self) -> dict[str, str]:
        """The message as a chat template knows it."""
        named = {"name": self.name} if self.name is not None else {}
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
            **named,
        }


def _template_variables(values: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what a chat template is not to be told, or not at such a length."""
    if len(values) > MAX_TEMPLATE_VARIABLES:
        raise ValueError(f"must hold at most {MAX_TEMPLATE_VARIABLES} names")
    for name in values:
        if not name.isidentifier() or len(name) > MAX_TEMPLATE_NAME_CHARACTERS:
            raise ValueError(
                f"must have identifiers of at most {MAX_TEMPLATE_NAME_CHARACTERS} characters as names"
            )
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
    """How the model's chat template renders messages, as in vLLM."""

    add_generation_prompt: bool | None = Field(
        default=None,
        description="vLLM's extension; end with the beginning of an answer. Default: true unless continue_final_message is.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="vLLM's extension; leave the last message open, so that the answer goes on with it.",
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_variables)] | None = (
        Field(
            default=None,
            description="vLLM's extension; variables for the chat template, such as enable_thinking.",
        )
    )

    def rendering(self) -> dict[str, Any]:
        """The options of `Prompts.render`; raises OutriderError(INVALID_VALUE) for two that contradict each other."""
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "add_generation_prompt", "must not be true together with continue_final_message"
            )
        opens = (
            not self.continue_final_message
            if self.add_generation_prompt is None
            else self.add_generation_prompt
        )
        return {
            "add_generation_prompt": opens,
            "continue_final_message": bool(self.continue_final_message),
            "variables": self.chat_template_kwargs or {},
        }
