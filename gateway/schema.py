"""Bodies of the OpenAI requests: which parameters exist and of which type. Ranges are checked where the limits are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from gateway.generate import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from outrider.errors import OutriderError, Reason, invalid
from outrider.messages import (
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_GRAMMAR_CHARACTERS,
    MAX_LISTED_TOKENS,
    MAX_NAME_LENGTH,
    MAX_RELAXED_TOPK,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
)

# Parameters of OpenAI's and vLLM's that are not supported, each with the values that ask for nothing; those are let through.
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
UNSUPPORTED = "unsupported_parameter"
"""The type of pydantic's error for what other servers take in this place."""
MAX_TEMPLATE_VARIABLES = 16
MAX_TEMPLATE_NAME_CHARACTERS = 64
MAX_TEMPLATE_CHARACTERS = 4096
# What a template is told besides, apart from special tokens such as bos_token.
_TEMPLATE_OWN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
MAX_KEYS = 128
"""Most keys of an object with known keys; there are fewer of these."""
MAX_MESSAGES = 2048
MAX_PROMPTS = 1024
# What an answer's message carries beside its text, so that it can be sent back as it came.
_EMPTY_IN_MESSAGE = ("annotations", "audio", "function_call", "reasoning_content", "refusal", "tool_calls")


class Body(BaseModel):
    """A JSON object without unknown fields and without silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        """Too many unknown keys would take seconds to list; raises OutriderError(INVALID_VALUE)."""
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_KEYS:
            raise OutriderError(Reason.INVALID_VALUE, f"an object of the body has {len(values)} keys, more than {MAX_KEYS}")
        for key in values:
            try:
                _unicode(key)
            except ValueError as problem:
                raise OutriderError(Reason.INVALID_VALUE, f"the key {ascii(key)[:60]} {problem}") from problem
        return values


def _unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise ValueError("holds half of a surrogate pair, which is not Unicode text") from cause
    return text


Text = Annotated[str, AfterValidator(_unicode)]
# For the document alone: these limits are checked where a message can name them as the caller does.
TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
_Choice = Annotated[Text, WithJsonSchema({"type": "string", "minLength": 1})]
_Filled = Annotated[str, Field(min_length=1)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Ids = Annotated[list[TokenId], Field(min_length=1)]
_PromptForms = _Filled | _Ids | Annotated[list[_Filled], Field(min_length=1)] | Annotated[list[_Ids], Field(min_length=1)]
_Item = TypeVar("_Item")
# Only its first bad item is told: to describe thousands of them takes seconds.
Listed = Annotated[list[_Item], Field(fail_fast=True)]


def _at_most_entries(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_LISTED_TOKENS:
        raise ValueError(f"must hold at most {MAX_LISTED_TOKENS} entries")
    return value


Entries = Annotated[dict[str, _Item], BeforeValidator(_at_most_entries)]


def _limited(description: str | None = None, **limits: int | float) -> Any:
    """An optional parameter with the limits that the document tells; they are checked with the rest of the request."""
    return Field(default=None, description=description, json_schema_extra=dict(limits))


def _drop_neutral(values: Any) -> Any:
    """Take out what asks for nothing; raises OutriderError(UNSUPPORTED_PARAMETER) that names what asks for something."""
    if not isinstance(values, dict):
        return values
    unused = {name for name, choice in (("tools", "tool_choice"), ("functions", "function_call")) if values.get(choice) == "none"}
    kept = {}
    for name, value in values.items():
        if name not in _NEUTRAL:
            kept[name] = value
        elif value is not None and name not in unused and not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
            allowed = "".join(f" or send {json.dumps(neutral)}" for neutral in _NEUTRAL[name])
            hint = _HINTS.get(name, "")
            raise OutriderError(Reason.UNSUPPORTED_PARAMETER, f"{name} is not supported; leave it out{allowed}{hint}", name)
        elif name == "reasoning_effort":
            kept[name] = value  # which a chat's template is told
    return kept


def _same(value: object, neutral: object) -> bool:
    """Equality that tells 0 from False, as JSON does."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


class SpeculationBody(Body):
    """Whether and how to speculate; `metrics` asks for vLLM's `metrics.speculative_decoding` in the answer, `tokens` for each
    token's text and author in each choice.

    `acceptance` other than exact is lossy: faster, and no longer distributed as the target alone.
    """

    enabled: bool = True
    drafter: Text = Field(default="", json_schema_extra={"maxLength": MAX_NAME_LENGTH})
    depth: int | None = _limited(minimum=0, maximum=MAX_DEPTH)
    acceptance: Literal["exact", "typical", "relaxed"] = "exact"
    typical_epsilon: float = Field(default=0.09, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    relaxed_topk: int = Field(default=10, json_schema_extra={"minimum": 1, "maximum": MAX_RELAXED_TOPK})
    relaxed_delta: float = Field(default=0.6, json_schema_extra={"minimum": 0, "maximum": 1})
    metrics: bool = False
    tokens: bool = False


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool | None = Field(
        default=None, description="vLLM's extension; with include_usage, each chunk has the usage of its choice so far."
    )
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    """OpenAI's wrapping of a schema; name, description and strict change nothing, since the schema is always kept to."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structural_tag: dict[str, Any] | None = None


class TextPart(Body):
    """A piece of a message's content; of OpenAI's kinds, text alone."""

    type: Literal["text"]
    text: Text


_PARTS = TypeAdapter(Listed[TextPart])
_Content = str | Annotated[list[TextPart], Field(min_length=1)]


def _joined(separator: str) -> Callable[[object], object]:
    """OpenAI's content, a text or a list of parts, as one text."""

    def join(value: object) -> object:
        return separator.join(part.text for part in _PARTS.validate_python(value)) if isinstance(value, list) and value else value

    return join


class Prediction(Body):
    """What the client expects the answer to be, such as the file it wants edited."""

    type: Literal["content"]
    content: Annotated[Text, BeforeValidator(_joined(""), json_schema_input_type=_Content)]


def _stops(value: object) -> object:
    """OpenAI's three forms of `stop` as a list."""
    return [value] if isinstance(value, str) else ([] if value is None else value)


JsonValue = dict[str, Any] | bool | Text
_GRAMMAR: dict[str, int | float] = {"minLength": 1, "maxLength": MAX_GRAMMAR_CHARACTERS}


class StructuredOutputs(Body):
    """vLLM's ways to say what the answer must be; one of them. A schema or a structural tag may be written as JSON in a string."""

    json_: JsonValue | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Listed[_Choice] | None = None
    grammar: Text | None = None
    structural_tag: dict[str, Any] | Text | None = None


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    temperature: float | None = _limited(minimum=0, maximum=2)
    top_p: float | None = _limited(exclusiveMinimum=0, maximum=1)
    top_k: int | None = _limited("vLLM's extension; 0 or -1 keeps all tokens.", minimum=-1)
    seed: int | None = _limited(minimum=SEED_MIN, exclusiveMaximum=SEED_MAX + 1)
    n: int | None = _limited("At most --max-sequences, with several prompts all together.", minimum=1)
    stop: Annotated[
        Listed[Text],
        BeforeValidator(_stops, json_schema_input_type=_Stop | Annotated[list[_Stop], Field(max_length=MAX_STOP_STRINGS)] | None),
    ] = []
    max_tokens: int | None = _limited("0 is for echo or prompt_logprobs.", minimum=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(default=None, description="With stream: true only.")
    speculation: SpeculationBody = SpeculationBody()
    ignore_eos: bool | None = Field(default=None, description="vLLM's extension; go on after an end-of-sequence token.")
    stop_token_ids: Listed[TokenId] | None = _limited("vLLM's extension; ids that end the text.", maxItems=MAX_STOP_TOKENS)
    presence_penalty: float | None = _limited(minimum=-2, maximum=2)
    frequency_penalty: float | None = _limited(minimum=-2, maximum=2)
    logit_bias: Entries[float] | None = _limited("By token id, in [-100, 100].", maxProperties=MAX_LISTED_TOKENS)
    min_p: float | None = _limited("vLLM's extension; drop tokens this much less likely than the likeliest.", minimum=0, maximum=1)
    typical_p: float | None = _limited("Locally typical sampling, up to this mass.", exclusiveMinimum=0, maximum=1)
    repetition_penalty: float | None = _limited("vLLM's extension; over prompt and output.", minimum=0.01, maximum=10)
    min_tokens: int | None = _limited("vLLM's extension; no end of text before so many tokens.", minimum=0)
    banned_token_ids: Listed[TokenId] | None = _limited("Ids that are never sampled.", maxItems=MAX_LISTED_TOKENS)
    response_format: ResponseFormat | None = None
    regex: Text | None = _limited("What the answer must match.", **_GRAMMAR)
    grammar: Text | None = _limited("What the answer must be, in GBNF.", **_GRAMMAR)
    choice: Listed[_Choice] | None = _limited("Texts of which the answer must be one.", minItems=1, maxItems=MAX_CHOICES)
    structural_tag: dict[str, Any] | None = Field(default=None, description="XGrammar's structural tag.")
    structured_outputs: StructuredOutputs | None = Field(default=None, description="vLLM's extension.")
    guided_json: JsonValue | None = Field(default=None, description="vLLM's older name of structured_outputs.json.")
    guided_regex: Text | None = _limited(
        "vLLM's older name of structured_outputs.regex.", minLength=1, maxLength=MAX_GRAMMAR_CHARACTERS
    )
    guided_choice: Listed[_Choice] | None = _limited(
        "vLLM's older name of structured_outputs.choice.", minItems=1, maxItems=MAX_CHOICES
    )
    guided_grammar: Text | None = _limited(
        "vLLM's older name of structured_outputs.grammar.", minLength=1, maxLength=MAX_GRAMMAR_CHARACTERS
    )
    prediction: Prediction | None = None
    reasoning_effort: Literal["none"] | None = None
    prompt_logprobs: int | None = _limited(
        "vLLM's extension; the likeliest tokens at each of the prompt's. Not with stream: true.",
        minimum=0,
        maximum=MAX_TOP_LOGPROBS,
    )
    # Labels for OpenAI's own records and caches; they have no meaning for the answer.
    user: str | None = None
    metadata: Entries[str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        return _drop_neutral(values)


Prompt = str | list[int]


def _prompts(value: object) -> list[Prompt]:
    """OpenAI's four forms of a prompt as a list of prompts: a text, texts, token ids, lists of token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"must hold at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    if isinstance(prompts, list) and prompts and all(isinstance(prompt, str) for prompt in prompts):
        return [_unicode(prompt) for prompt in prompts]
    if isinstance(prompts, list) and prompts and all(map(_is_ids, prompts)):
        return prompts
    raise invalid("prompt", "must be a string, a list of strings, a list of token ids or a list of lists of token ids, none empty")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _tell_neutral(schema: dict[str, Any]) -> None:
    """Put parameters into the document that are taken with values that ask for nothing."""
    for name, values in _NEUTRAL.items():
        schema["properties"].setdefault(name, {"enum": [None, *values], "description": "Not supported."})


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra=_tell_neutral)

    prompt: Annotated[Any, BeforeValidator(_prompts, json_schema_input_type=_PromptForms)]
    echo: bool | None = None
    logprobs: int | None = _limited(
        "How many of the likeliest tokens to tell with each token.", minimum=0, maximum=MAX_TOP_LOGPROBS
    )


def _no_calls(value: object) -> object:
    """Calls in a message of the history, of which empty ones have been dropped before."""
    raise PydanticCustomError(UNSUPPORTED, "is not supported: the history may hold no calls of tools and functions")


_NoCalls = Annotated[None, BeforeValidator(_no_calls, json_schema_input_type=None)]


class Message(Body):
    """One turn of a conversation. `developer` is OpenAI's newer name for `system`."""

    # Before the content, which is null beside a call: the first complaint is the one that is told.
    role: Literal["system", "developer", "user", "assistant"]
    tool_calls: _NoCalls = None
    function_call: _NoCalls = None
    content: Annotated[Text, BeforeValidator(_joined("\n"), json_schema_input_type=_Content)]
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {key: value for key, value in values.items() if key not in _EMPTY_IN_MESSAGE or value not in (None, [])}
        if (
            kept.get("role") == "assistant"
            and kept.get("content", ...) is None
            and not kept.keys() & {"tool_calls", "function_call"}
        ):
            kept["content"] = ""  # as clients send back an answer of no tokens
        return kept

    def for_template(self) -> dict[str, str]:
        """The message as a chat template knows it."""
        named = {"name": self.name} if self.name is not None else {}
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content, **named}


def _template_variables(values: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what a chat template is not to be told, or not at such a length."""
    if len(values) > MAX_TEMPLATE_VARIABLES:
        raise ValueError(f"must hold at most {MAX_TEMPLATE_VARIABLES} names")
    for name in values:
        if not name.isidentifier() or len(name) > MAX_TEMPLATE_NAME_CHARACTERS:
            raise ValueError(f"must have identifiers of at most {MAX_TEMPLATE_NAME_CHARACTERS} characters as names")
        if name in _TEMPLATE_OWN or name.endswith("_token"):
            raise ValueError(f"must not set {name}, which the server sets itself")
    try:
        written = json.dumps(values, ensure_ascii=False)
    except RecursionError as cause:
        raise ValueError("is nested too deeply") from cause
    if len(written) > MAX_TEMPLATE_CHARACTERS:
        raise ValueError(f"must have at most {MAX_TEMPLATE_CHARACTERS} characters as JSON")
    _unicode(written)
    return values


class TemplateOptions(Body):
    """How the model's chat template renders messages, as in vLLM."""

    add_generation_prompt: bool | None = Field(
        default=None,
        description="vLLM's extension; end with the beginning of an answer. Default: true unless continue_final_message is.",
    )
    continue_final_message: bool | None = Field(
        default=None, description="vLLM's extension; leave the last message open, so that the answer goes on with it."
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_variables)] | None = Field(
        default=None, description="vLLM's extension; variables for the chat template, such as enable_thinking."
    )

    def rendering(self) -> dict[str, Any]:
        """The options of `Prompts.render`; raises OutriderError(INVALID_VALUE) for two that contradict each other."""
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("add_generation_prompt", "must not be true together with continue_final_message")
        opens = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "add_generation_prompt": opens,
            "continue_final_message": bool(self.continue_final_message),
            "variables": self.chat_template_kwargs or {},
        }


class ChatBody(GenerationBody, TemplateOptions):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=_tell_neutral)

    messages: Listed[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = _limited("In place of max_tokens.", minimum=0)
    logprobs: bool | None = None
    top_logprobs: int | None = _limited("With logprobs: true only.", minimum=0, maximum=MAX_TOP_LOGPROBS)
    parallel_tool_calls: bool | None = None

    def rendering(self) -> dict[str, Any]:
        """As vLLM does, reasoning_effort "none" asks the template for no thinking, unless chat_template_kwargs speaks of it."""
        options = super().rendering()
        if self.reasoning_effort is not None:
            options["variables"] = {"enable_thinking": False} | options["variables"]
        return options


class TokenizeBody(TemplateOptions):
    """POST /tokenize, in vLLM's shape: either a prompt or messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: Listed[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = Field(default=None, description="Default: true for a prompt, false for messages.")
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize, in vLLM's shape."""

    model: str | None = None
    tokens: Listed[TokenId]
