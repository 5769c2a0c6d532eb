"""The Responses API's `tools` and `tool_choice`, and their translation to a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from gateway.http.ingress.fields import Body, Text
from gateway.http.responses.items import Ignored, Json, flat_name, parsed
from gateway.tools.definitions import MAX_TOOLS
from outrider.errors import OutriderError, Reason, invalid

# Tools that OpenAI runs itself, or that only its models can use.
_HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search"),
    *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell"),
    *("tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
    "web_search_preview_2025_03_11",
)


class FunctionTool(Body):
    """A function that the model may call. `parameters` is a JSON schema of its arguments."""

    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        default=None,
        description="If true, the arguments follow the schema even if the model chose to call.",
    )
    allowed_callers: Ignored = None
    async_: Ignored = Field(default=None, alias="async")
    defer_loading: Ignored = None
    output_schema: Ignored = None


def _functions(value: object) -> object:
    if not isinstance(value, list):
        return value
    return [
        parsed(tool, {"function": FunctionTool}, f"tools[{at}]") for at, tool in enumerate(value)
    ]


class NamespaceTool(Body):
    """A group of functions. The model knows each as `namespace__function`."""

    type: Literal["namespace"]
    name: Text
    description: Text | None = None
    tools: Annotated[list[FunctionTool], BeforeValidator(_functions)]


class OfflineSearch(Body, extra="allow"):
    """A search that must not use the web, as Codex sends it by default. The gateway ignores it."""

    type: Literal["web_search"]
    external_web_access: Literal[False]


class Flat(NamedTuple):
    """A function among the tools: its place in the body, and its namespace, if any."""

    path: str
    namespace: str | None
    function: FunctionTool

    @property
    def name(self) -> str:
        """The name under which the model knows the function."""
        return flat_name(self.namespace, self.function.name)

    def for_chat(self) -> Json:
        """Return the tool in a chat's body."""
        function = self.function.model_dump(
            include={"description", "parameters", "strict"}, exclude_none=True
        )
        return {"type": "function", "function": {"name": self.name, **function}}


class Tools(NamedTuple):
    """The tools of a body."""

    listed: Sequence[FunctionTool | NamespaceTool] = ()
    """The tools as the body lists them, without ignored tools."""
    flat: Sequence[Flat] = ()

    @property
    def namespaced(self) -> Mapping[str, tuple[str, str]]:
        """Map the flat name of a namespace's function to its namespace and its name there."""
        return {
            tool.name: (tool.namespace, tool.function.name) for tool in self.flat if tool.namespace
        }

    def shown(self) -> list[Json]:
        """Return the tools for the answer; OpenAI's clients expect some fields even if empty."""
        return [
            {"description": None, "parameters": None, "strict": None, **_dumped(tool)}
            if isinstance(tool, FunctionTool)
            else {"description": "", **_dumped(tool)}
            for tool in self.listed
        ]


def _dumped(tool: Body) -> Json:
    return tool.model_dump(exclude_none=True)


def _tools(value: object) -> Tools:
    """Return the functions of `tools`. Raises OutriderError that names the place."""
    if value is None:
        return Tools()
    if not isinstance(value, list):
        raise invalid("tools", "must be a list")
    listed: list[FunctionTool | NamespaceTool] = []
    flat: list[Flat] = []
    for index, given in enumerate(value):
        path = f"tools[{index}]"
        if isinstance(given, dict) and given.get("type") in _HOSTED:
            if given["type"] == "web_search" and given.get("external_web_access") is False:
                continue
            problem = f"{given['type']!r} is not supported: the gateway runs no tools itself"
            message = f"{path}.type {problem}, and models call only functions"
            raise OutriderError(Reason.UNSUPPORTED_PARAMETER, message, f"{path}.type")
        tool = parsed(given, _KINDS, path)
        listed.append(tool)
        if isinstance(tool, FunctionTool):
            flat.append(Flat(path, None, tool))
        else:
            inner = enumerate(tool.tools)
            flat += [Flat(f"{path}.tools[{at}]", tool.name, each) for at, each in inner]
    return Tools(listed, flat)


_KINDS: dict[str, type[FunctionTool | NamespaceTool]] = {
    "function": FunctionTool,
    "namespace": NamespaceTool,
}


ToolsField = Annotated[
    Any,
    BeforeValidator(
        _tools, json_schema_input_type=list[FunctionTool | NamespaceTool | OfflineSearch] | None
    ),
]


class _Named(Body):
    type: Literal["function"]
    name: Text


class _Allowed(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_Named], Field(min_length=1, max_length=MAX_TOOLS)]


_Choice = Literal["none", "auto", "required"] | _Named | _Allowed
_CHOICE: TypeAdapter[_Choice] = TypeAdapter(_Choice)


def _tool_choice(value: object) -> object:
    """Check a `tool_choice` and return it.

    Raises OutriderError(UNSUPPORTED_PARAMETER) if the choice is not known.
    """
    if value is None:
        return None
    try:
        _CHOICE.validate_python(value)
    except ValidationError as cause:
        message = (
            'tool_choice must be "none", "auto", "required", {"type": "function", "name": …} or '
            '{"type": "allowed_tools", "mode": …, "tools": […]}'
        )
        raise OutriderError(Reason.UNSUPPORTED_PARAMETER, message, "tool_choice") from cause
    return value


ToolChoiceField = Annotated[
    Any, BeforeValidator(_tool_choice, json_schema_input_type=_Choice | None)
]


def chat_choice(value: Any) -> Any:
    """Convert a checked `tool_choice` to a chat's."""
    if not isinstance(value, dict):
        return value
    if value["type"] == "function":
        return _chat_function(value)
    allowed = {"mode": value["mode"], "tools": [_chat_function(tool) for tool in value["tools"]]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _chat_function(named: Json) -> Json:
    return {"type": "function", "function": {"name": named["name"]}}
