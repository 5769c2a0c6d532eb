"""OpenAI's `tools` and `tool_choice` in a chat's body."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from gateway.http.ingress.fields import Body, Listed, Text
from gateway.http.openai.conversation import JsonObject
from gateway.tools.definitions import NAME_PATTERN, Tool, ToolChoice
from outrider.errors import invalid

_FORMS = (
    '"none", "auto", "required", {"type": "function", "function": {"name": …}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
)


class FunctionBody(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: Text | None = None
    parameters: JsonObject | None = Field(
        default=None, description="A JSON schema of the arguments, which are an object."
    )
    strict: bool | None = Field(
        default=None,
        description="If true, the arguments follow the schema even if the model chose to call.",
    )


class ToolBody(Body):
    """A tool. Of OpenAI's kinds only functions are supported."""

    type: Literal["function"]
    function: FunctionBody
    cache_control: Any = Field(default=None, description="Ignored; prompts are always cached.")

    @property
    def tool(self) -> Tool:
        """The tool, independent of the API."""
        function = self.function
        return Tool(function.name, function.parameters, bool(function.strict))

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        named = self.function.model_dump(include={"name", "description", "parameters"})
        shown = {name: value for name, value in named.items() if value is not None}
        return {"type": "function", "function": shown}


class _Name(Body):
    name: Text


class _Named(Body):
    type: Literal["function"]
    function: _Name


class _AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[Listed[_Named], Field(min_length=1)]


class _Allowed(Body):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


_OBJECT: TypeAdapter[_Named | _Allowed] = TypeAdapter(
    Annotated[_Named | _Allowed, Field(discriminator="type")]
)


def _tool_choice(value: object) -> ToolChoice | None:
    """Convert OpenAI's forms of `tool_choice`. Raises OutriderError(INVALID_VALUE)."""
    if value is None:
        return None
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    try:
        chosen = _OBJECT.validate_python(value)
    except ValidationError as cause:
        raise invalid("tool_choice", f"must be {_FORMS}") from cause
    if isinstance(chosen, _Named):
        return ToolChoice("required", frozenset({chosen.function.name}), is_single=True)
    allowed = chosen.allowed_tools
    return ToolChoice(allowed.mode, frozenset(named.function.name for named in allowed.tools))


ToolChoiceField = Annotated[
    Any,
    BeforeValidator(
        _tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | _Named | _Allowed | None,
    ),
]
