"""The request for one sequence, checked against a model's limits, for HTTP and gRPC alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.text.prompts import context_overflow
from gateway.tools.formats import AnswerFormat
from gateway.tools.reader import Reading
from outrider.errors import invalid
from outrider.protocol.messages import TokenRequest
from outrider.protocol.model_info import ModelInfo

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """The id of the answer, the trace to which the request belongs, and the tenant."""

    request_id: str
    traceparent: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the chat template, and the options of `Prompts.render`."""

    messages: Sequence[Mapping[str, Any]]
    rendering: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A prompt in the caller's form: a text, token ids or a conversation.

    `field_name` is the caller's name for the prompt. With `echoes`, the answer repeats the prompt's
    text. With `adds_special_tokens`, the tokenizer adds its special tokens to a text.
    """

    content: str | list[int] | Conversation
    field_name: str = "prompt"
    echoes: bool = False
    adds_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt. `field_name` is the caller's name for it, in errors.

    `echo` is the prompt's text if the answer repeats it; `prediction` has the tokens that the
    caller expects as the answer. For a conversation, `end` is the end of its text, and `call_count`
    is the number of its tool calls.
    """

    token_ids: list[int]
    field_name: str = "prompt"
    echo: str | None = None
    prediction: list[int] = field(default_factory=list)
    end: str = ""
    call_count: int = 0


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One sequence, checked against one model: the verifier's request, and the gateway's part.

    `asked_tokens` is the caller's limit of tokens; None if the caller sets no limit. The answer
    lists the prompt's tokens with their log probabilities if `shows_prompt`, and each token's
    source if `attributed`. `grammar_field` is the caller's name of the grammar, for errors.
    `reading` says what the answer may hold besides content; None if only content.
    """

    tokens: TokenRequest
    asked_tokens: int | None = None
    stop: tuple[str, ...] = ()
    echo: str | None = None
    shows_prompt: bool = False
    attributed: bool = False
    grammar_field: str = "grammar"
    reading: Reading | None = None


@dataclass(frozen=True, slots=True)
class AnswerLimit:
    """The limit of tokens to generate: the caller's value, its field, and the default.

    A default of None allows all tokens that the context leaves free. Only a caller that wants its
    prompt scored or echoed may ask for 0 tokens.
    """

    asked: int | None
    field_name: str = "max_tokens"
    default: int | None = None
    scores_prompt: bool = False

    def resolve(self, prompt: Prompt, min_tokens: int, info: ModelInfo) -> int:
        """Return the maximum number of tokens to generate after this prompt.

        Raises OutriderError, which names the caller's fields: INVALID_VALUE for ids that the model
        does not have, for too few tokens and for `min_tokens` above the result;
        CONTEXT_LENGTH_EXCEEDED if the prompt and the answer do not fit the context.
        """
        name = prompt.field_name
        length = len(prompt.token_ids)
        check_ids(name, prompt.token_ids, info)
        left = info.context_length - length
        may_be_empty = self.scores_prompt or prompt.echo is not None
        least = 0 if may_be_empty else 1
        needed = least if self.asked == 0 else 1
        if left < needed:
            message = f"{name} has {length} tokens, and the answer needs room too"
            raise context_overflow(info.context_length, message, name)
        most = self.asked
        if most is None:
            most = min(left, self.default or left)
        if most < least:
            raise invalid(self.field_name, f"must be at least {least}, not {most}")
        if most > left:
            message = f"{self.field_name} asks for {most} tokens after a prompt of {length}"
            raise context_overflow(info.context_length, message, self.field_name)
        if min_tokens > most:
            limit = f"{self.field_name}, which is {most}"
            raise invalid("min_tokens", f"must be at most {limit}, not {min_tokens}")
        return most


@dataclass(frozen=True, slots=True)
class TextInputs:
    """The parts of a request's sequences besides its settings: `n` sequences for each prompt.

    `answers` says how the model writes calls and thoughts.
    """

    prompts: Sequence[Prompt]
    n: int
    limit: AnswerLimit
    caller: Caller
    answers: AnswerFormat


def check_ids(name: str, token_ids: list[int], info: ModelInfo) -> None:
    """Raise OutriderError(INVALID_VALUE) for no tokens, or for a token outside the vocabulary."""
    if not token_ids:
        raise invalid(name, "must hold at least 1 token")
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < info.vocab_size:
            raise invalid(name, f"must hold token ids in [0, {info.vocab_size}), not {token_id}")


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Check the stop strings and return them.

    Raises OutriderError(INVALID_VALUE) if they are too many or too long.
    """
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid("stop", f"must hold at most {MAX_STOP_STRINGS} strings, not {len(stop)}")
    for index, text in enumerate(stop):
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            message = f"must have 1 to {MAX_STOP_CHARACTERS} characters, not {len(text)}"
            raise invalid(f"stop[{index}]", message)
    return tuple(stop)
