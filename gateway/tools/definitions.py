"""A request's tools and its choice among them, independent of any API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import invalid

MAX_TOOLS = 128
NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,128}$"
"""The names that a tool may have: OpenAI's, longer ones, and dots."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model must call, and which of the request's tools it may call.

    `auto` leaves it to the model, `required` demands a call, and `none` allows no call.
    """

    mode: Literal["auto", "required", "none"]
    names: frozenset[str] | None = None
    """The names of the tools that it may call; None for all."""
    is_single: bool = False
    """Whether the answer is one call."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model may call in one answer."""

    tools: Sequence[Tool]
    is_forced: bool
    """Whether the answer must hold a call."""
    is_parallel: bool = True
    """Whether the answer may hold several calls."""


def tool_use(tools: Sequence[Tool], choice: ToolChoice, *, is_parallel: bool) -> ToolUse | None:
    """The tools that the choice leaves; None if the model may call none.

    Raises OutriderError(INVALID_VALUE) that names `tools` or `tool_choice`.
    """
    known: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in known:
            raise invalid(f"tools[{index}].function.name", f"is the name of two: {tool.name!r}")
        known.add(tool.name)
    for name in sorted(choice.names or ()):
        if name not in known:
            raise invalid("tool_choice", f"names {name[:100]!r}, which is none of the tools")
    if choice.mode == "required" and not tools:
        raise invalid("tool_choice", "demands a call, so tools must hold at least 1 tool")
    names = known if choice.names is None else choice.names
    left = [tool for tool in tools if tool.name in names]
    if choice.mode == "none" or not left:
        return None
    return ToolUse(left, choice.mode == "required", is_parallel and not choice.is_single)
