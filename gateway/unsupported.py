"""Refuse OpenAI's and vLLM's unsupported parameters, except with values that change nothing."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from outrider.errors import OutriderError, Reason

UNSUPPORTED = "unsupported_parameter"
"""The type of pydantic's error for an unsupported parameter."""
ANY: tuple[object, ...] = (object(),)
# By parameter: the values that change nothing, beside null; ANY for all values.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": ANY,
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "priority": (0,),
    "request_id": ANY,
    "return_token_ids": (False,),
    "service_tier": ANY,
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False, True),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("low", "medium", "high"),
    "web_search_options": (),
}
_USE_FORMAT = "for JSON as an answer use response_format"
_HINTS = {
    "tools": f"; POST /v1/chat/completions takes tools; {_USE_FORMAT}",
    "tool_choice": f"; POST /v1/chat/completions takes tools; {_USE_FORMAT}",
    "functions": "; use tools",
    "function_call": "; use tool_choice",
}
# Own and older spellings of a grammar, and the parameter that takes the value instead.
_REPLACED = {
    "choice": "structured_outputs.choice",
    "grammar": "structured_outputs.grammar",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "regex": "structured_outputs.regex",
    "structural_tag": "structured_outputs.structural_tag",
}
_SWITCHES = {"tools": "tool_choice", "functions": "function_call"}


def drop_neutral(values: Any, fields: Container[str]) -> Any:
    """Remove unsupported parameters whose values change nothing.

    `fields` are the body's own. Raises OutriderError(UNSUPPORTED_PARAMETER) that names a parameter
    with any other value.
    """
    if not isinstance(values, dict):
        return values
    unused = {name for name, switch in _SWITCHES.items() if values.get(switch) == "none"}
    kept = {}
    for name, value in values.items():
        if name in fields:
            kept[name] = value
            continue
        if name not in _NEUTRAL:
            kept[name] = value
        if name not in unused:
            _check_neutral(name, value)
    return kept


def _check_neutral(name: str, value: object) -> None:
    """Raise OutriderError(UNSUPPORTED_PARAMETER) for an unsupported parameter with an effect."""
    if name in _REPLACED:
        message = f"{name} is not supported; use {_REPLACED[name]}"
        raise OutriderError(Reason.UNSUPPORTED_PARAMETER, message, name)
    if name not in _NEUTRAL or value is None:
        return
    neutral = _NEUTRAL[name]
    if neutral is ANY:
        return
    if not any(_same(value, accepted) for accepted in neutral):
        allowed = "".join(f" or send {json.dumps(accepted)}" for accepted in neutral)
        message = f"{name} is not supported; leave it out{allowed}{_HINTS.get(name, '')}"
        raise OutriderError(Reason.UNSUPPORTED_PARAMETER, message, name)


def _same(value: object, neutral: object) -> bool:
    """Equality as in JSON, where 0 is not false."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def document_neutral(schema: dict[str, Any]) -> None:
    """Add the unsupported parameters to a body's JSON schema, with the values that are accepted."""
    for name, values in _NEUTRAL.items():
        allowed: dict[str, Any] = {} if values is ANY else {"enum": [None, *values]}
        about = "Ignored." if values is ANY else "Not supported."
        schema["properties"].setdefault(name, {**allowed, "description": about})
