"""A request's tools and its choice among them, independent of any API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MAX_TOOLS = 128
NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,128}$"
"""The names that a tool may have: as at OpenAI, but they may be longer and have dots."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


Mode = Literal["auto", "required", "none"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model must call a tool, and which of the request's tools it may call.

    With `auto` the model decides, `required` demands a call, and `none` allows no call.
    """

    mode: Mode
    names: frozenset[str] | None = None
    """The names of the tools that the model may call; None for all."""
    is_single: bool = False
    """True if the answer must be exactly one call."""


AUTO = ToolChoice("auto")
"""The model chooses among all tools."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model may call in one answer."""

    tools: Sequence[Tool]
    is_forced: bool
    """True if the answer must hold a call."""
    is_parallel: bool = True
    """True if the answer may hold several calls."""


def tool_use(tools: Sequence[Tool], choice: ToolChoice, *, is_parallel: bool) -> ToolUse | None:
    """Return the tools that the choice leaves; None if the model may call none."""
    left = [tool for tool in tools if choice.names is None or tool.name in choice.names]
    if choice.mode == "none" or not left:
        return None
    return ToolUse(left, choice.mode == "required", is_parallel and not choice.is_single)
