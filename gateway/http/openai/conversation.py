"""Request bodies' messages, and the options with which a chat template renders them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError, from_json

from gateway.http.ingress.fields import Body, Listed, Text, check_unicode
from gateway.http.ingress.json_size import check_size
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
# An answer's message has these fields besides its text. Clients send them back in a history, so
# they are dropped where they are empty.
_EMPTY_IN_MESSAGE = ("annotations", "audio", "function_call", "refusal", "tool_calls")


class TextPart(Body):
    """A part of a message's content. Of OpenAI's kinds of parts only text is supported."""

    type: Literal["text"]
    text: Text
    cache_control: Any = Field(default=None, description="Ignored; prompts are always cached.")


class RefusalPart(Body):
    """The part of an assistant's message that says why it refused."""

    type: Literal["refusal"]
    refusal: Text


ContentPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
_PARTS = TypeAdapter(Listed[ContentPart])
Content = str | Annotated[list[ContentPart], Field(min_length=1)]


def joined(separator: str) -> Callable[[object], object]:
    """Return a validator that joins OpenAI's list of content parts into one text."""

    def join(value: object) -> object:
        """Return the text of a list of parts; any other value unchanged. Raises ValidationError."""
        if not isinstance(value, list) or not value:
            return value
        parts = _PARTS.validate_python(value)
        texts = [part.text if isinstance(part, TextPart) else part.refusal for part in parts]
        return separator.join(texts)

    return join


MAX_DEPTH = 128
"""The maximum number of objects and lists around a value of a schema or a call's arguments."""


def checked_json(value: Any) -> Any:
    """Return the JSON value itself.

    Raises ValueError if it is nested more than MAX_DEPTH deep, or if it has a number that JSON
    cannot hold, or text that is not Unicode.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [
            part for each in inner for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            break
    else:
        raise ValueError(f"is nested more than {MAX_DEPTH} deep")
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as cause:
        raise ValueError("has a number that JSON cannot hold") from cause
    check_unicode(written)
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(checked_json)]


def _no_calls(value: object) -> object:
    """Refuse a call in OpenAI's oldest form. `Message` drops empty calls before this check."""
    raise PydanticCustomError(UNSUPPORTED, "is not supported: use tool_calls")


_NoCalls = Annotated[None, BeforeValidator(_no_calls, json_schema_input_type=None)]


class Arguments(NamedTuple):
    """The arguments of a call, as an object and as JSON."""

    values: dict[str, Any]
    text: str


# After an object's opening brace comes its first key, its end, or nothing yet.
_OBJECT = re.compile(r'\s*\{\s*("|\}|$)')


def read_arguments(text: str) -> Arguments | None:
    """Return the arguments of a call. `max_tokens` may have cut off their end.

    Cut arguments hold only the complete values, as in Anthropic's clients. The arguments are empty
    if the model wrote something that no prompt can hold, such as endless digits or brackets. Return
    None if the text does not even begin an object, or if more text follows the object.
    """
    text = text or "{}"
    if not _OBJECT.match(text):
        return None
    try:
        try:
            given = json.loads(text)
        except json.JSONDecodeError as problem:
            if problem.msg == "Extra data":
                return None
            given = from_json(text, allow_partial=True)
            text = json.dumps(given, ensure_ascii=False)
        return Arguments(checked_json(given), text)
    except (ValueError, RecursionError):
        return Arguments({}, "{}")


def whole_arguments(text: str) -> str:
    """Return a call's arguments as JSON, completed if they were cut off.

    Raises ValueError unless they are an object or the beginning of one, and OutriderError as
    `check_size` does.
    """
    check_size(text.encode())
    found = read_arguments(text)
    if found is None:
        raise ValueError("must be a JSON object, or the beginning of one that was cut off")
    return found.text


class CalledFunction(Body):
    """The function of a call, with its arguments as JSON."""

    name: Text
    arguments: Annotated[Text, AfterValidator(whole_arguments)] = "{}"

    def for_template(self) -> dict[str, Any]:
        """Return the call for chat templates; `CallForm` gives the arguments their final form."""
        return {"name": self.name, "arguments": self.arguments}


class ToolCall(Body):
    """A call that an earlier answer made."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, description="Ignored; streams number their calls.")

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it."""
        return {"id": self.id, "type": "function", "function": self.function.for_template()}


class Message(Body):
    """One turn of a conversation. `developer` is OpenAI's newer name for `system`."""

    # The calls are declared before the content, because only the first error is reported. In a
    # message with calls the content is mostly null, so an error in the calls says more.
    role: Literal["system", "developer", "user", "assistant", "tool"]
    function_call: _NoCalls = None
    tool_calls: Listed[ToolCall] | None = None
    content: Annotated[Text | None, BeforeValidator(joined("\n"), json_schema_input_type=Content)]
    name: Text | None = None
    tool_call_id: Text | None = Field(
        default=None, description="The id of the call that a tool's message answers."
    )
    reasoning_content: Text | None = Field(default=None, description="The answer's thought.")
    cache_control: Any = Field(default=None, description="Ignored; prompts are always cached.")

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
        if kept.get("role") == "assistant":
            # If an answer has no text, clients send it back with null content or without content.
            kept.setdefault("content", None)
            # `reasoning` is vLLM's name of reasoning_content.
            if "reasoning" in kept:
                kept.setdefault("reasoning_content", kept.pop("reasoning"))
        return kept

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"the role {self.role} needs content")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"the role {self.role} has no tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("the role tool needs tool_call_id")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it, with `developer` as `system`."""
        message: dict[str, Any] = {
            "role": self.role.replace("developer", "system"),
            "content": self.content or "",
        }
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


def template_variables(values: dict[str, Any]) -> dict[str, Any]:
    """Return a chat template's variables.

    Raises ValueError for too many variables, and for names or values that are not allowed.
    """
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
    """vLLM's options for rendering messages with the model's chat template."""

    add_generation_prompt: bool | None = Field(
        default=None,
        description="vLLM's extension. End the prompt with the beginning of an answer. "
        "Default: true unless continue_final_message is true.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="vLLM's extension. Leave the last message open; the answer continues it.",
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(template_variables)] | None = (
        Field(
            default=None,
            description="vLLM's extension. Variables of the chat template, e.g. enable_thinking.",
        )
    )

    def rendering(self) -> dict[str, Any]:
        """Return the keyword arguments of `Prompts.render`.

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
