"""The tools of Anthropic's requests: functions, and Anthropic's tools that callers run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.http.ingress.fields import Body, Listed, Text
from gateway.http.openai.conversation import JsonObject
from gateway.http.openai.tools import FunctionBody, ToolBody
from gateway.tools.definitions import NAME_PATTERN
from gateway.unsupported import UNSUPPORTED

_SHOWN_CHARACTERS = 60


def ignored(about: str = "Ignored.") -> Any:
    """Return the field of a parameter that is accepted and ignored."""
    return Field(default=None, description=about)


def unsupported(problem: str) -> PydanticCustomError:
    """Return the error of a value that is valid at Anthropic, but not supported here."""
    return PydanticCustomError(UNSUPPORTED, "{problem}", {"problem": problem})


def _refuse_deferred(value: bool | None) -> bool | None:
    if value:
        raise unsupported("true is not supported: there is no tool search to load the tool later")
    return value


def _refuse_programs(value: list[str] | None) -> list[str] | None:
    if value is not None and "direct" not in value:
        raise unsupported('must hold "direct": no program calls tools here')
    return value


class _Tool(Body):
    """The fields that all tools have."""

    strict: bool | None = None
    defer_loading: Annotated[bool | None, AfterValidator(_refuse_deferred)] = None
    allowed_callers: Annotated[Listed[Text] | None, AfterValidator(_refuse_programs)] = None
    cache_control: Any = ignored()
    eager_input_streaming: Any = ignored("Ignored; a call's input is always streamed.")
    input_examples: Any = ignored()


def _refuse_type(value: object) -> object:
    if not isinstance(value, str) or value == "custom":
        return value
    shown = repr(value[:_SHOWN_CHARACTERS])
    if value.startswith(("computer", "browser")):
        raise unsupported(
            f"{shown} is not supported: it shows a screen, and models read text alone"
        )
    known = ", ".join(CLIENT_TOOLS)
    raise unsupported(
        f"{shown} is not supported: the caller must run the tool; the types are custom, {known}"
    )


class ToolDefinition(_Tool):
    """A function that the caller runs."""

    type: Annotated[
        Literal["custom"] | None,
        BeforeValidator(_refuse_type, json_schema_input_type=Literal["custom"] | None),
    ] = None
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: Text | None = None
    input_schema: JsonObject

    @property
    def of_chat(self) -> ToolBody:
        """The same tool in a chat's body."""
        function = FunctionBody(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return ToolBody(type="function", function=function)


_TEXT = {"type": "string"}
_LINE = {"type": "integer", "description": "The number of the line before, or 0."}
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "The first and the last line to view; -1 is the file's end.",
}


def _schema(required: list[str], **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _editor(insertion: str, *more: str) -> dict[str, Any]:
    """Return the input schema of an editor.

    The command `insert` takes its text from the property that `insertion` names.
    """
    commands = ["view", "create", "str_replace", "insert", *more]
    properties: dict[str, Mapping[str, Any]] = {
        "command": {"type": "string", "enum": commands},
        "path": _TEXT,
        "view_range": _RANGE,
        "file_text": {"type": "string", "description": "What create writes."},
        "old_str": {"type": "string", "description": "The only place that str_replace replaces."},
        "new_str": _TEXT,
        "insert_line": _LINE,
        insertion: _TEXT,
    }
    return _schema(["command", "path"], **properties)


_MEMORY = _editor("insert_text", "delete", "rename")
_MEMORY["required"] = ["command"]
_MEMORY["properties"] |= {"old_path": _TEXT, "new_path": _TEXT}
_BASH = _schema([], command=_TEXT, restart={"type": "boolean"})
_BASH_ABOUT = "Run a command in a bash session that goes on, or restart the session."
_EDIT_ABOUT = "View, create and edit text files."
_MEMORY_ABOUT = "Keep notes in files below /memories, to be read in later conversations."

ClientType = Literal[
    "bash_20241022",
    "bash_20250124",
    "text_editor_20241022",
    "text_editor_20250124",
    "text_editor_20250429",
    "text_editor_20250728",
    "memory_20250818",
]
_OLD_EDITOR = ("str_replace_editor", _EDIT_ABOUT, _editor("new_str", "undo_edit"))
_EDITOR = ("str_replace_based_edit_tool", _EDIT_ABOUT, _editor("insert_text"))
# The name, description and input schema of each tool. Anthropic's models know the tools from
# training.
CLIENT_TOOLS: dict[ClientType, tuple[str, str, dict[str, Any]]] = {
    "bash_20241022": ("bash", _BASH_ABOUT, _BASH),
    "bash_20250124": ("bash", _BASH_ABOUT, _BASH),
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": ("memory", _MEMORY_ABOUT, _MEMORY),
}


class ClientTool(_Tool):
    """A tool of Anthropic's that the caller runs. The model gets it as a function."""

    type: ClientType
    name: Text
    max_characters: Any = ignored("Ignored; the caller cuts what its tool shows.")

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        name = CLIENT_TOOLS[self.type][0]
        if self.name != name:
            raise ValueError(f"the tool of type {self.type} has the name {name}")
        return self

    @property
    def as_function(self) -> ToolDefinition:
        """The function that the model gets."""
        name, about, schema = CLIENT_TOOLS[self.type]
        return ToolDefinition(name=name, description=about, input_schema=schema, strict=self.strict)


def _as_function(value: object) -> object:
    """Return a tool that Anthropic defines, as a function; any other value unchanged."""
    if isinstance(value, dict) and value.get("type") in get_args(ClientType):
        return ClientTool.model_validate(value).as_function
    return value


AnyTool = Annotated[
    ToolDefinition,
    BeforeValidator(_as_function, json_schema_input_type=ToolDefinition | ClientTool),
]


class ToolChoiceBody(Body):
    """Whether the model must call a tool: any tool, or the tool with this name."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.name is not None) is not (self.type == "tool"):
            raise ValueError("the type tool, and no other, needs a name")
        return self

    @property
    def of_chat(self) -> object:
        """OpenAI's `tool_choice`."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type
