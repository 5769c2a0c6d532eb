"""Parameters of OpenAI's and vLLM's that are not supported, and are taken only with values that ask for nothing."""

from __future__ import annotations

import json
from typing import Any

from outrider.errors import OutriderError, Reason

UNSUPPORTED = "unsupported_parameter"
"""The type of pydantic's error for what is not supported."""
# Each with the values that are let through.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_NO_TOOLS = '; with tool_choice "none" tools are ignored; for JSON as an answer use response_format'
_HINTS = {
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "functions": '; with function_call "none" functions are ignored; for JSON as an answer use response_format',
}


def drop_neutral(values: Any) -> Any:
    """Take out what asks for nothing; raises OutriderError(UNSUPPORTED_PARAMETER) that names what asks for something."""
    if not isinstance(values, dict):
        return values
    unused = {
        name
        for name, choice in (("tools", "tool_choice"), ("functions", "function_call"))
        if values.get(choice) == "none"
    }
    kept = {}
    for name, value in values.items():
        if name not in _NEUTRAL:
            kept[name] = value
        elif (
            value is not None
            and name not in unused
            and not any(_same(value, neutral) for neutral in _NEUTRAL[name])
        ):
            allowed = "".join(f" or send {json.dumps(neutral)}" for neutral in _NEUTRAL[name])
            hint = _HINTS.get(name, "")
            raise OutriderError(
                Reason.UNSUPPORTED_PARAMETER,
                f"{name} is not supported; leave it out{allowed}{hint}",
                name,
            )
        elif name == "reasoning_effort":
            kept[name] = value  # which a chat's template is told
    return kept


def _same(value: object, neutral: object) -> bool:
    """Equality that tells 0 from False, as JSON does."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def tell_neutral(schema: dict[str, Any]) -> None:
    """Put parameters into the document that are taken with values that ask for nothing."""
    for name, values in _NEUTRAL.items():
        schema["properties"].setdefault(
            name, {"enum": [None, *values], "description": "Not supported."}
        )
