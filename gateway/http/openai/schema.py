"""The bodies of OpenAI's requests: their parameters and types. `to_requests` checks ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from gateway.http.ingress.fields import (
    Body,
    Choice,
    Entries,
    Filled,
    Listed,
    Text,
    TokenId,
    check_unicode,
    limited,
    with_declared,
)
from gateway.http.openai.conversation import Content, Message, TemplateOptions, joined
from gateway.http.openai.tools import ToolBody, ToolChoiceField
from gateway.text.request import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from gateway.tools.definitions import MAX_TOOLS
from gateway.unsupported import document_neutral, drop_neutral
from outrider.errors import invalid
from outrider.protocol.limits import (
    MAX_CHOICES,
    MAX_FAMILY_LENGTH,
    MAX_GRAMMAR_CHARACTERS,
    MAX_LISTED_TOKENS,
    MAX_MESSAGES,
    MAX_NAME_LENGTH,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
)
from outrider.protocol.messages import (
    SAMPLING_RANGES,
    SPECULATION_RANGES,
    AcceptanceLabel,
    SamplingParams,
    SpeculationOptions,
)

SEED_MIN = -(2**63)
SEED_MAX = 2**64 - 1
MAX_SEQUENCES = 64
"""The maximum number of sequences (prompts times n) of a request.

It equals the verifier's default for the sequences of a batch.
"""
LEAST_TIMEOUT_S = 1
"""The least `timeout` of a body, in seconds. A caller with less time can hang up instead."""
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Ids = Annotated[list[TokenId], Field(min_length=1)]
_PromptForms = (
    Filled
    | _Ids
    | Annotated[list[Filled], Field(min_length=1, max_length=MAX_SEQUENCES)]
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_SEQUENCES)]
)


def _speculation(name: str) -> Any:
    """Return a parameter with the default and the range of a field of SpeculationOptions."""
    default = getattr(SpeculationOptions(), name)
    return Field(default=default, json_schema_extra=dict(SPECULATION_RANGES[name].json_schema))


class SpeculationBody(Body):
    """Whether and how to speculate.

    `metrics` adds vLLM's `metrics.speculative_decoding` to the answer, and `tokens` adds each
    token's text and source to each choice. `acceptance` other than exact is lossy: it is faster,
    but changes the distribution of the output.
    """

    enabled: bool = True
    drafter_id: Text = Field(default="", json_schema_extra={"maxLength": MAX_NAME_LENGTH})
    drafter_family: Text = Field(default="", json_schema_extra={"maxLength": MAX_FAMILY_LENGTH})
    draft_tokens: int | None = _speculation("draft_tokens")
    acceptance: AcceptanceLabel = "exact"
    typical_epsilon: float = _speculation("typical_epsilon")
    relaxed_top_k: int = _speculation("relaxed_top_k")
    relaxed_delta: float = _speculation("relaxed_delta")
    always_draft: bool = False
    metrics: bool = False
    tokens: bool = False


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool | None = Field(
        default=None,
        description="vLLM's extension. With include_usage, each chunk has its choice's usage.",
    )
    include_obfuscation: bool | None = Field(
        default=None, description="Ignored; no padding is added."
    )


class JsonSchema(Body):
    """OpenAI's wrapper of a schema. The answer always follows the schema, whatever `strict` is."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format that the answer must have."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structural_tag: dict[str, Any] | None = None


class PredictionBody(Body):
    """The answer that the client expects, such as the file that it wants edited."""

    type: Literal["content"]
    content: Annotated[Text, BeforeValidator(joined(""), json_schema_input_type=Content)]


def _stops(value: object) -> object:
    """Return OpenAI's forms of `stop` (null, a string or a list) as a list."""
    if isinstance(value, str):
        return [value]
    return [] if value is None else value


JsonValue = dict[str, Any] | bool | Text
_GRAMMAR: dict[str, int | float] = {"minLength": 1, "maxLength": MAX_GRAMMAR_CHARACTERS}


class TakesNeutral(Body):
    """A body that accepts other servers' parameters if their values would change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        return drop_neutral(values, cls.model_fields)


class StructuredOutputs(TakesNeutral):
    """vLLM's grammars of the answer. A request may give only one of them.

    A schema or a structural tag may be an object or a string of JSON.
    """

    json_: JsonValue | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Text | None = limited("A regular expression of the answer.", **_GRAMMAR)
    choice: Listed[Choice] | None = limited(
        "The answer is one of these texts.", minItems=1, maxItems=MAX_CHOICES
    )
    grammar: Text | None = limited("A grammar of the answer, in GBNF.", **_GRAMMAR)
    structural_tag: dict[str, Any] | Text | None = None
    enable_in_reasoning: bool | None = Field(
        default=None,
        description="If true, the grammar or response_format holds from the first token, so the "
        "answer has no thought. Otherwise it holds after the thought.",
    )


@with_declared(SamplingParams, SAMPLING_RANGES)
class SamplingBody(Body):
    """The sampling settings that are numbers or flags, such as `temperature` and `top_p`."""


class GenerationBody(TakesNeutral, SamplingBody):
    """The parameters that completions and chat completions share."""

    model: str | None = None
    top_k: int | None = limited("vLLM's extension; 0 or -1 keeps all tokens.", minimum=-1)
    seed: int | None = limited(minimum=SEED_MIN, exclusiveMaximum=SEED_MAX + 1)
    n: int | None = limited("At most 64, for all prompts of the request together.", minimum=1)
    stop: Annotated[
        Listed[Text],
        BeforeValidator(
            _stops,
            json_schema_input_type=_Stop
            | Annotated[list[_Stop], Field(max_length=MAX_STOP_STRINGS)]
            | None,
        ),
    ] = Field(default=[])
    max_tokens: int | None = limited("0 is only for echo or prompt_logprobs.", minimum=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(
        default=None, description="With stream: true only."
    )
    speculation: SpeculationBody = SpeculationBody()
    timeout: float | None = limited(
        "How many seconds the caller waits for the whole answer. After that the answer ends with "
        "an error. A request that would take longer is refused at once.",
        minimum=LEAST_TIMEOUT_S,
    )
    ignore_eos: bool | None = Field(
        default=None, description="vLLM's extension. Continue after an end-of-sequence token."
    )
    stop_token_ids: Listed[TokenId] | None = limited(
        "vLLM's extension. Ids that end the text.", maxItems=MAX_STOP_TOKENS
    )
    logit_bias: Entries[float] | None = limited(
        "Maps token ids to biases in [-100, 100].", maxProperties=MAX_LISTED_TOKENS
    )
    min_tokens: int | None = limited(
        "vLLM's extension. The least number of tokens to generate.", minimum=0
    )
    banned_token_ids: Listed[TokenId] | None = limited(
        "Ids that are never sampled.", maxItems=MAX_LISTED_TOKENS
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="vLLM's extension."
    )
    prediction: PredictionBody | None = None
    prompt_logprobs: int | None = limited(
        "vLLM's extension. How many alternatives to list with each token of the prompt. "
        "Not with stream: true.",
        minimum=0,
        maximum=MAX_TOP_LOGPROBS,
    )
    # OpenAI's labels for its own records and caches. The labels do not change the answer.
    user: str | None = None
    metadata: Entries[str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None


def _prompts(value: object) -> list[str | list[int]]:
    """Return the prompts of OpenAI's four forms: a text, texts, token ids, lists of token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if isinstance(prompts, list) and len(prompts) > MAX_SEQUENCES:
        raise invalid("prompt", f"must hold at most {MAX_SEQUENCES} prompts, not {len(prompts)}")
    if isinstance(prompts, list) and prompts and all(isinstance(prompt, str) for prompt in prompts):
        return [check_unicode(prompt) for prompt in prompts]
    if isinstance(prompts, list) and prompts and all(map(_is_ids, prompts)):
        return prompts
    forms = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    raise invalid("prompt", f"must be {forms}, none empty")


def _is_ids(value: object) -> bool:
    # Ten times as fast as a loop, which matters for a hundred thousand ids.
    return isinstance(value, list) and set(map(type, value)) == {int}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra=document_neutral)

    prompt: Annotated[Any, BeforeValidator(_prompts, json_schema_input_type=_PromptForms)]
    echo: bool | None = None
    add_special_tokens: bool | None = Field(
        default=None,
        description="vLLM's extension. Whether the tokenizer adds special tokens to a text prompt, "
        "such as a BOS token. Default: true.",
    )
    logprobs: int | None = limited(
        "How many of the likeliest tokens to list with each token.",
        minimum=0,
        maximum=MAX_TOP_LOGPROBS,
    )


class ChatBody(GenerationBody, TemplateOptions):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=document_neutral)

    messages: Listed[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = limited("The newer name of max_tokens.", minimum=0)
    logprobs: bool | None = None
    top_logprobs: int | None = limited(
        "With logprobs: true only.", minimum=0, maximum=MAX_TOP_LOGPROBS
    )
    tools: Listed[ToolBody] | None = Field(
        default=None, max_length=MAX_TOOLS, description="Functions that the model may call."
    )
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether an answer may hold several calls. Default: true."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None, description="Passed to the chat template; none asks for no thought."
    )
    enable_thinking: bool | None = Field(
        default=None, description="SGLang's extension. Passed to the chat template."
    )
    separate_reasoning: bool | None = Field(
        default=None,
        description="SGLang's extension. false leaves the thought within the content.",
    )
    include_reasoning: bool | None = Field(
        default=None, description="vLLM's extension. false leaves the thought out."
    )

    def rendering(self) -> dict[str, Any]:
        """Return the keyword arguments of `Prompts.render`."""
        options = super().rendering()
        options["variables"] = self.template_variables
        options["tools"] = [tool.for_template() for tool in self.tools or ()]
        return options

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the template.

        reasoning_effort and enable_thinking become variables, unless chat_template_kwargs sets
        them. As in vLLM, the effort "none" asks for no thought.
        """
        thinks = self.enable_thinking
        if thinks is None and self.reasoning_effort == "none":
            thinks = False
        # Templates name the switch either enable_thinking or thinking.
        given = {
            "reasoning_effort": self.reasoning_effort,
            "enable_thinking": thinks,
            "thinking": thinks,
        }
        known = {name: value for name, value in given.items() if value is not None}
        return known | (self.chat_template_kwargs or {})


class TokenizeBody(TakesNeutral, TemplateOptions):
    """POST /tokenize, in vLLM's shape: either a prompt or messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: Listed[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = Field(
        default=None, description="Default: true for a prompt, false for messages."
    )
    return_token_strs: bool = False


class DetokenizeBody(TakesNeutral):
    """POST /detokenize, in vLLM's shape."""

    model: str | None = None
    tokens: Listed[TokenId]
