"""OpenAI's answers as plain dictionaries: whole ones, and the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from gateway.choices import UsageTotals
from gateway.deltas import AttributedToken, LogprobToken
from outrider import __version__
from outrider.messages import FinishReason

Json = dict[str, Any]
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_FINGERPRINT = f"outrider-{__version__}"


def _named(token: LogprobToken) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}


def _top_logprobs(token: LogprobToken) -> dict[str, float | None] | None:
    """By text, the likeliest first; as in OpenAI's own answers the token itself is always among them."""
    if token.logprob is None:
        return None
    found: dict[str, float | None] = {}
    for likely in (*token.top, token):
        found.setdefault(
            likely.text, likely.logprob
        )  # of several tokens with one text, such as parts of characters, the likeliest
    return found


def _prompt_logprobs(prompt: Sequence[LogprobToken]) -> list[Json | None]:
    """vLLM's list: for each token of the prompt, itself and the likeliest ones by id; None for the first."""
    return [
        None
        if token.logprob is None
        else {str(t.token_id): _ranked(t) for t in (token, *token.top)}
        for token in prompt
    ]


def _ranked(token: LogprobToken) -> Json:
    return {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.text}


def attribution(tokens: Sequence[AttributedToken]) -> Json:
    """What a choice says of who wrote it; nothing when nobody asked."""
    if not tokens:
        return {}
    listed = [
        {"text": t.text, "source": t.source.name.lower(), "drafter": t.drafter_id or None}
        for t in tokens
    ]
    return {"speculation": {"tokens": listed}}


class ResponseShape(ABC):
    """How one endpoint writes its answers. Subclasses say what a choice looks like."""

    operation: str
    """OpenTelemetry's name of the endpoint's operation."""
    id_prefix: str
    whole_object: str
    chunk_object: str
    opening: ClassVar[Json | None] = None
    """What a choice's first chunk holds before any text."""
    closing: ClassVar[Json]
    """What the chunk with the finish reason holds."""

    def __init__(self, model: str) -> None:
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self.model = model
        self._created = int(time.time())

    def _answer(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": _FINGERPRINT,
            "choices": choices,
        }

    def whole(
        self, texts: list[str], totals: UsageTotals, shown: Sequence[Sequence[LogprobToken]]
    ) -> Json:
        """The answer to a request that does not stream: a text, how it finished and the tokens shown, for each choice."""
        choices = []
        for index, (text, finish, tokens) in enumerate(
            zip(texts, totals.finishes, shown, strict=True)
        ):
            reason = None if finish is None else _FINISH[finish.reason]
            choices.append(
                {
                    "index": index,
                    **self._whole_choice(text),
                    "logprobs": self.logprobs(tokens),
                    "finish_reason": reason,
                }
            )
        return self._answer(self.whole_object, choices) | {"usage": totals.usage()}

    def chunk(
        self,
        index: int,
        content: Json,
        reason: FinishReason | None = None,
        logprobs: Json | None = None,
    ) -> Json:
        """A chunk with one choice."""
        finish = _FINISH[reason] if reason is not None else None
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        return self._answer(self.chunk_object, [choice])

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk when usage was asked for."""
        return self._answer(self.chunk_object, []) | {"usage": usage}

    def _whole_choice(self, text: str) -> Json:
        """What a choice of a whole answer holds."""
        return self.delta(text)

    @abstractmethod
    def tell_prompts(self, answer: Json, prompts: Sequence[Sequence[LogprobToken]]) -> None:
        """Put vLLM's `prompt_logprobs` into a whole answer; `prompts` has one for each choice."""

    @abstractmethod
    def logprobs(self, shown: Sequence[LogprobToken]) -> Json | None:
        """Tokens with their log probabilities, None when there are none."""

    @abstractmethod
    def delta(self, text: str) -> Json:
        """What a chunk with text holds."""


class CompletionShape(ResponseShape):
    """POST /v1/completions."""

    operation = "text_completion"
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"
    closing: ClassVar[Json] = {"text": ""}

    def tell_prompts(self, answer: Json, prompts: Sequence[Sequence[LogprobToken]]) -> None:
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            choice["prompt_logprobs"] = _prompt_logprobs(prompt)

    def logprobs(self, shown: Sequence[LogprobToken]) -> Json | None:
        if not shown:
            return None
        return {
            "tokens": [token.text for token in shown],
            "token_logprobs": [token.logprob for token in shown],
            "top_logprobs": [_top_logprobs(token) for token in shown],
            "text_offset": [token.offset for token in shown],
        }

    def delta(self, text: str) -> Json:
        return {"text": text}


class ChatShape(ResponseShape):
    """POST /v1/chat/completions."""

    operation = "chat"
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    opening: ClassVar[Json | None] = {
        "delta": {"role": "assistant", "content": "", "refusal": None}
    }
    closing: ClassVar[Json] = {"delta": {}}

    def tell_prompts(self, answer: Json, prompts: Sequence[Sequence[LogprobToken]]) -> None:
        # All choices answer the same conversation.
        answer["prompt_logprobs"] = _prompt_logprobs(prompts[0])

    def logprobs(self, shown: Sequence[LogprobToken]) -> Json | None:
        if not shown:
            return None
        content = [
            {**_named(token), "top_logprobs": [_named(likely) for likely in token.top]}
            for token in shown
        ]
        return {"content": content, "refusal": None}

    def _whole_choice(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text}}
