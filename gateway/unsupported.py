"""Refuses unsupported parameters of OpenAI, vLLM and SGLang whose values change something."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from outrider.errors import OutriderError, Reason

UNSUPPORTED = "unsupported_parameter"
"""The type of pydantic's error for an unsupported parameter."""
ANY: tuple[object, ...] = (object(),)
# Maps a parameter of OpenAI's, vLLM's or SGLang's requests to the values besides null that change
# nothing; ANY for all values.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    # Prefixes are shared only within a tenant, and never change an answer.
    "cache_salt": ANY,
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": ANY,
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "lora_path": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),
    "priority": (0,),
    "prompt_embeds": (),
    "repetition_detection": (),
    "request_id": ANY,
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "rid": ANY,
    "service_tier": ANY,
    "session_params": ({},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False, True),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("low", "medium", "high"),
    "vllm_xargs": ({},),
    "web_search_options": (),
    # Within structured_outputs.
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (False,),
    "whitespace_pattern": (),
}
_USE_FORMAT = "for JSON as an answer use response_format"
_HINTS = {
    "tools": f"; POST /v1/chat/completions takes tools; {_USE_FORMAT}",
    "tool_choice": f"; POST /v1/chat/completions takes tools; {_USE_FORMAT}",
    "functions": "; use tools",
    "function_call": "; use tool_choice",
    "chat_template": "; the server's own chat template is used",
    "documents": "; give them in a message",
    "truncate_prompt_tokens": "; a prompt that is too long is refused",
}
# Maps SGLang's or an older name of a grammar to the parameter that takes the value instead.
_REPLACED = {
    "choice": "structured_outputs.choice",
    "ebnf": "structured_outputs.grammar",
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

    `fields` are the body's known fields. Raises OutriderError(UNSUPPORTED_PARAMETER) that names an
    unsupported parameter with any other value.
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
    """Return whether two values are equal as in JSON, where 0 is not false."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def document_neutral(schema: dict[str, Any]) -> None:
    """Add the unsupported parameters to a body's JSON schema, with the values that are accepted."""
    for name, values in _NEUTRAL.items():
        allowed: dict[str, Any] = {} if values is ANY else {"enum": [None, *values]}
        about = "Ignored." if values is ANY else "Not supported."
        schema["properties"].setdefault(name, {**allowed, "description": about})
