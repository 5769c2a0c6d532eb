"""A request's tools and its choice among them, independent of any API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import invalid

MAX_TOOLS = 128
MAX_NAME_CHARACTERS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


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
    _check(tools)
    known = {tool.name for tool in tools}
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


def _check(tools: Sequence[Tool]) -> None:
    """Raise OutriderError(INVALID_VALUE) for too many tools, and for bad or equal names."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"must hold at most {MAX_TOOLS} tools, not {len(tools)}")
    seen = set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}].function.name"
        if len(tool.name) > MAX_NAME_CHARACTERS or not _NAME.fullmatch(tool.name):
            allowed = f"1 to {MAX_NAME_CHARACTERS} letters, digits, _, - and dots"
            raise invalid(field, f"must have {allowed}, not {tool.name[:60]!r}")
        if tool.name in seen:
            raise invalid(field, f"is the name of two tools: {tool.name[:60]!r}")
        seen.add(tool.name)
