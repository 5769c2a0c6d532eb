"""Bodies of the OpenAI requests: which parameters exist and of which type. Ranges are checked where the limits are known."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from gateway.conversation import MAX_MESSAGES, Content, Message, TemplateOptions, joined
from gateway.fields import (
    Body,
    Choice,
    Entries,
    Filled,
    Listed,
    Text,
    TokenId,
    check_unicode,
    limited,
)
from gateway.request import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from gateway.unsupported import drop_neutral, tell_neutral
from outrider.errors import invalid
from outrider.limits import (
    MAX_CHOICES,
    MAX_DRAFT_TOKENS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_LISTED_TOKENS,
    MAX_NAME_LENGTH,
    MAX_RELAXED_TOPK,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
)

SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
MAX_PROMPTS = 1024
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Ids = Annotated[list[TokenId], Field(min_length=1)]
_PromptForms = (
    Filled
    | _Ids
    | Annotated[list[Filled], Field(min_length=1)]
    | Annotated[list[_Ids], Field(min_length=1)]
)


class SpeculationBody(Body):
    """Whether and how to speculate; `metrics` asks for vLLM's `metrics.speculative_decoding` in the answer, `tokens` for each
    token's text and author in each choice.

    `acceptance` other than exact is lossy: faster, and no longer distributed as the target alone.
    """

    enabled: bool = True
    drafter: Text = Field(default="", json_schema_extra={"maxLength": MAX_NAME_LENGTH})
    draft_tokens: int | None = limited(minimum=0, maximum=MAX_DRAFT_TOKENS)
    acceptance: Literal["exact", "typical", "relaxed"] = "exact"
    typical_epsilon: float = Field(
        default=0.09, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1}
    )
    relaxed_topk: int = Field(
        default=10, json_schema_extra={"minimum": 1, "maximum": MAX_RELAXED_TOPK}
    )
    relaxed_delta: float = Field(default=0.6, json_schema_extra={"minimum": 0, "maximum": 1})
    metrics: bool = False
    tokens: bool = False


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool | None = Field(
        default=None,
        description="vLLM's extension; with include_usage, each chunk has the usage of its choice so far.",
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


class Prediction(Body):
    """What the client expects the answer to be, such as the file it wants edited."""

    type: Literal["content"]
    content: Annotated[Text, BeforeValidator(joined(""), json_schema_input_type=Content)]


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
    choice: Listed[Choice] | None = None
    grammar: Text | None = None
    structural_tag: dict[str, Any] | Text | None = None


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    temperature: float | None = limited(minimum=0, maximum=2)
    top_p: float | None = limited(exclusiveMinimum=0, maximum=1)
    top_k: int | None = limited("vLLM's extension; 0 or -1 keeps all tokens.", minimum=-1)
    seed: int | None = limited(minimum=SEED_MIN, exclusiveMaximum=SEED_MAX + 1)
    n: int | None = limited(
        "At most --max-sequences, with several prompts all together.", minimum=1
    )
    stop: Annotated[
        Listed[Text],
        BeforeValidator(
            _stops,
            json_schema_input_type=_Stop
            | Annotated[list[_Stop], Field(max_length=MAX_STOP_STRINGS)]
            | None,
        ),
    ] = Field(default=[])
    max_tokens: int | None = limited("0 is for echo or prompt_logprobs.", minimum=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(
        default=None, description="With stream: true only."
    )
    speculation: SpeculationBody = SpeculationBody()
    ignore_eos: bool | None = Field(
        default=None, description="vLLM's extension; go on after an end-of-sequence token."
    )
    stop_token_ids: Listed[TokenId] | None = limited(
        "vLLM's extension; ids that end the text.", maxItems=MAX_STOP_TOKENS
    )
    presence_penalty: float | None = limited(minimum=-2, maximum=2)
    frequency_penalty: float | None = limited(minimum=-2, maximum=2)
    logit_bias: Entries[float] | None = limited(
        "By token id, in [-100, 100].", maxProperties=MAX_LISTED_TOKENS
    )
    min_p: float | None = limited(
        "vLLM's extension; drop tokens this much less likely than the likeliest.",
        minimum=0,
        maximum=1,
    )
    typical_p: float | None = limited(
        "Locally typical sampling, up to this mass.", exclusiveMinimum=0, maximum=1
    )
    repetition_penalty: float | None = limited(
        "vLLM's extension; over prompt and output.", minimum=0.01, maximum=10
    )
    min_tokens: int | None = limited(
        "vLLM's extension; no end of text before so many tokens.", minimum=0
    )
    banned_token_ids: Listed[TokenId] | None = limited(
        "Ids that are never sampled.", maxItems=MAX_LISTED_TOKENS
    )
    response_format: ResponseFormat | None = None
    regex: Text | None = limited("What the answer must match.", **_GRAMMAR)
    grammar: Text | None = limited("What the answer must be, in GBNF.", **_GRAMMAR)
    choice: Listed[Choice] | None = limited(
        "Texts of which the answer must be one.", minItems=1, maxItems=MAX_CHOICES
    )
    structural_tag: dict[str, Any] | None = Field(
        default=None, description="XGrammar's structural tag."
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="vLLM's extension."
    )
    guided_json: JsonValue | None = Field(
        default=None, description="vLLM's older name of structured_outputs.json."
    )
    guided_regex: Text | None = limited(
        "vLLM's older name of structured_outputs.regex.",
        minLength=1,
        maxLength=MAX_GRAMMAR_CHARACTERS,
    )
    guided_choice: Listed[Choice] | None = limited(
        "vLLM's older name of structured_outputs.choice.", minItems=1, maxItems=MAX_CHOICES
    )
    guided_grammar: Text | None = limited(
        "vLLM's older name of structured_outputs.grammar.",
        minLength=1,
        maxLength=MAX_GRAMMAR_CHARACTERS,
    )
    prediction: Prediction | None = None
    reasoning_effort: Literal["none"] | None = None
    prompt_logprobs: int | None = limited(
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
        return drop_neutral(values)


Prompt = str | list[int]


def _prompts(value: object) -> list[Prompt]:
    """OpenAI's four forms of a prompt as a list of prompts: a text, texts, token ids, lists of token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"must hold at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    if isinstance(prompts, list) and prompts and all(isinstance(prompt, str) for prompt in prompts):
        return [check_unicode(prompt) for prompt in prompts]
    if isinstance(prompts, list) and prompts and all(map(_is_ids, prompts)):
        return prompts
    raise invalid(
        "prompt",
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids, none empty",
    )


def _is_ids(value: object) -> bool:
    # A list may hold a hundred thousand: this takes a tenth of the time of looking at them one by one.
    return isinstance(value, list) and set(map(type, value)) == {int}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra=tell_neutral)

    prompt: Annotated[Any, BeforeValidator(_prompts, json_schema_input_type=_PromptForms)]
    echo: bool | None = None
    logprobs: int | None = limited(
        "How many of the likeliest tokens to tell with each token.",
        minimum=0,
        maximum=MAX_TOP_LOGPROBS,
    )


class ChatBody(GenerationBody, TemplateOptions):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=tell_neutral)

    messages: Listed[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = limited("In place of max_tokens.", minimum=0)
    logprobs: bool | None = None
    top_logprobs: int | None = limited(
        "With logprobs: true only.", minimum=0, maximum=MAX_TOP_LOGPROBS
    )
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
    add_special_tokens: bool | None = Field(
        default=None, description="Default: true for a prompt, false for messages."
    )
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize, in vLLM's shape."""

    model: str | None = None
    tokens: Listed[TokenId]
