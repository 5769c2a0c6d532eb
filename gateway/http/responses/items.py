"""The items of a Responses API conversation, and their translation to chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from gateway.api_errors import text_only, validation_error
from gateway.http.ingress.fields import Body, Text
from gateway.http.openai.conversation import whole_arguments
from outrider.errors import OutriderError, invalid
from outrider.protocol.limits import MAX_MESSAGES

Json = dict[str, Any]
_Kind = TypeVar("_Kind", bound=Body)
Ignored = Annotated[Any, Field(description="Ignored.", exclude=True)]


def parsed(value: object, kinds: Mapping[str, type[_Kind]], path: str) -> _Kind:
    """Parse the object at a path of the body as its `type` says. Errors name the path."""
    if not isinstance(value, dict):
        raise invalid(path, "must be an object")
    kind = value.get("type")
    if kind is None:
        # Messages and references may come without a type.
        kind = "message" if "role" in value else "item_reference"
    if not isinstance(kind, str) or kind not in kinds:
        raise invalid(
            f"{path}.type", f"must be {' or '.join(kinds)}, not {str(kind)[:60]!r}{text_only(kind)}"
        )
    try:
        return kinds[kind].model_validate(value)
    except ValidationError as cause:
        first = cause.errors(include_url=False)[0]
        raise validation_error([{**first, "loc": (path, *first["loc"])}]) from cause
    except OutriderError as error:
        raise error if error.field is None else error.within(path) from error


class TextPart(Body):
    """A text of a message or of a tool's output."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Ignored = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class RefusalPart(Body):
    """The part of an assistant's message that says why it refused."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """The refusal, which the chat template gets as the message's text."""
        return self.refusal


class ThoughtPart(Body):
    """A part of a thought."""

    type: Literal["reasoning_text"]
    text: Text


_PARTS: dict[str, type[TextPart | RefusalPart]] = {
    "input_text": TextPart,
    "output_text": TextPart,
    "refusal": RefusalPart,
}


def _joined(name: str, kinds: Mapping[str, type[Any]], form: Any) -> Any:
    """Return the validator of a text field. It joins a list of parts to a text."""

    def join(value: object) -> object:
        """Return the text of a list of parts. Raises OutriderError that names the part."""
        if not isinstance(value, list):
            return value
        parts = [parsed(part, kinds, f"{name}[{index}]") for index, part in enumerate(value)]
        return "\n".join(part.text for part in parts)

    return BeforeValidator(join, json_schema_input_type=form)


_CONTENT = str | list[TextPart | RefusalPart]


class MessageItem(Body):
    """A turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Text, _joined("content", _PARTS, _CONTENT)]
    id: Text | None = None
    status: Ignored = None
    phase: Ignored = None


class FunctionCall(Body):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    status: Ignored = None
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: Annotated[Text, AfterValidator(whole_arguments)]
    id: Text | None = None
    async_: Ignored = Field(default=None, alias="async")
    caller: Ignored = None
    created_by: Ignored = None


class FunctionCallOutput(Body):
    """A tool's answer to a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Annotated[Text, _joined("output", _PARTS, _CONTENT)]
    id: Text | None = None
    status: Ignored = None
    name: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None
    created_by: Ignored = None


class ReasoningItem(Body):
    """The thought of an earlier answer. Only `content` is read: other fields may be encrypted."""

    type: Literal["reasoning"]
    content: Annotated[
        Text | None,
        _joined("content", {"reasoning_text": ThoughtPart}, list[ThoughtPart] | None),
    ] = None
    id: Text | None = None
    summary: Ignored = None
    encrypted_content: Ignored = None
    status: Ignored = None


class ItemReference(Body):
    """A reference to an item of a kept answer; `id` is the item's id."""

    type: Literal["item_reference"] | None = None
    id: Text


Item = MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem
InputItem = Item | ItemReference
_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}
_INPUT_ITEMS: dict[str, type[InputItem]] = {**_ITEMS, "item_reference": ItemReference}


def input_items(value: object) -> list[InputItem]:
    """Return the items of `input`; a text is one item.

    Raises OutriderError that names the place of a wrong item.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid("input", "must be a string or a list of items")
    if len(value) > MAX_MESSAGES:
        raise invalid("input", f"must hold at most {MAX_MESSAGES} items, not {len(value)}")
    return [parsed(item, _INPUT_ITEMS, f"input[{index}]") for index, item in enumerate(value)]


def kept_item(value: Json, path: str) -> Item:
    """Return an item from its kept JSON, for a request that names it at this path."""
    return parsed(value, _ITEMS, path)


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model knows a function of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"


def messages_of(items: Iterable[Item]) -> list[Json]:
    """Return the items as a chat's messages.

    An answer's thought, text and calls are one message, as in chats.
    """
    messages: list[Json] = []
    for item in items:
        if isinstance(item, FunctionCallOutput):
            answer = {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            messages.append(answer)
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": item.content})
        else:
            _add_to_answer(messages, item)
    return messages


def _add_to_answer(messages: list[Json], item: MessageItem | FunctionCall | ReasoningItem) -> None:
    """Add an item of an assistant's answer to the last message, or begin another message."""
    if isinstance(item, ReasoningItem):
        if item.content:
            # A thought comes first in an answer.
            messages.append({"role": "assistant", "content": None})
            messages[-1]["reasoning_content"] = item.content
        return
    last = messages[-1] if messages else {}
    begins = last.get("role") != "assistant"
    if isinstance(item, MessageItem):
        if begins or last["content"] is not None or "tool_calls" in last:
            messages.append({"role": "assistant"})
        messages[-1]["content"] = item.content
        return
    if begins:
        messages.append({"role": "assistant", "content": None})
    function = {"name": flat_name(item.namespace, item.name), "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)
