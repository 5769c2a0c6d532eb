"""Writes the answers of OpenAI's completions and chats."""

from __future__ import annotations

from typing import Any

from gateway.api_errors import error_body
from gateway.generation.serve_text import TextAnswer
from gateway.http.openai.schema import GenerationBody, StreamOptions
from gateway.http.openai.shapes import ChunkMaker, ResponseShape, attribution
from gateway.http.streaming import event
from gateway.text.choices import WholeChoice
from gateway.text.deltas import TextDelta
from outrider.errors import OutriderError

_DONE = b"data: [DONE]\n\n"


class OpenAIWriter:
    """An `AnswerWriter` for an endpoint's shape."""

    def __init__(
        self,
        shape: ResponseShape,
        answer: TextAnswer,
        body: GenerationBody,
        *,
        metrics: bool,
        lists_prompt: bool = False,
    ) -> None:
        """With `lists_prompt`, the prompt's log probabilities are listed with the answer's."""
        self._shape = shape
        self._answer = answer
        self._has_metrics = metrics
        self._lists_prompt = lists_prompt
        self._has_prompt_logprobs = body.prompt_logprobs is not None
        self._maker = ChunkMaker(
            shape,
            answer.totals,
            body.stream_options or StreamOptions(),
            answer.prompt_lengths,
            metrics=metrics,
        )

    @property
    def is_complete(self) -> bool:
        """True once the last event of the stream has been returned."""
        return self._maker.complete

    def whole(self, choices: list[WholeChoice]) -> dict[str, Any]:
        """Return the answer to a request that does not stream."""
        totals = self._answer.totals
        shown = [choice.shown for choice in choices]
        if self._lists_prompt:
            shown = [choice.prompt + choice.shown for choice in choices]
        answer = self._shape.whole(choices, totals, shown)
        if self._has_prompt_logprobs:
            self._shape.add_prompt_logprobs(answer, [choice.prompt for choice in choices])
        for written, choice in zip(answer["choices"], choices, strict=True):
            written |= attribution(choice.attributed)
        answer |= totals.speculation()
        if self._has_metrics:
            answer["metrics"] = totals.metrics()
        return answer

    def events(self, index: int, delta: TextDelta) -> bytes:
        """Return the chunks of a choice's next delta, and [DONE] after the last chunk."""
        out = b"".join(map(event, self._maker.chunks(index, delta)))
        return out + _DONE if self.is_complete else out

    def failure(self, error: OutriderError) -> bytes:
        """Return the error in OpenAI's shape and, as in vLLM, [DONE]."""
        return event(error_body(error)) + _DONE
