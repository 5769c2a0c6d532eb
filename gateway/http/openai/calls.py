"""Requests of OpenAI's API as `TextCall`, the form that the gateway's request flow takes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from fastapi import Request

from gateway import access_log
from gateway.access.gate import identity_of
from gateway.generation.admission import ClientTimeout
from gateway.generation.serve_text import Demand, TextAnswer, TextCall
from gateway.http.ingress.admission import admitted_request, client_seconds
from gateway.http.openai.schema import LEAST_TIMEOUT_S, MAX_SEQUENCES, ChatBody, CompletionBody
from gateway.http.openai.shapes import ChatShape, CompletionShape
from gateway.http.openai.to_requests import answer_limit, text_requests
from gateway.http.openai.writer import OpenAIWriter
from gateway.http.streaming import AnswerWriter
from gateway.text.request import Conversation, PromptInput, TextInputs, TextRequest
from outrider.errors import OutriderError, invalid
from outrider.process.observability.telemetry import Span
from outrider.protocol.model_info import ModelInfo

_Body = TypeVar("_Body", CompletionBody, ChatBody)


class HttpCall(TextCall, Generic[_Body]):
    """A request for text over HTTP."""

    has_slot = True

    def __init__(self, body: _Body, request: Request, *, metrics: bool = False) -> None:
        """With `metrics`, the answer reports speculation even if the body does not ask for it."""
        self.body: _Body = body
        self.request = request
        self.has_metrics = metrics or body.speculation.metrics
        self.identity = identity_of(request)
        self.access = access_log.current()
        self.headers = request.headers
        self.model = body.model
        self.streams = bool(body.stream)
        self.limit = answer_limit(body)
        self.prediction = "" if body.prediction is None else body.prediction.content

    @property
    @abstractmethod
    def prompt_count(self) -> int:
        """The number of prompts in the body."""

    @abstractmethod
    def writer(self, answer: TextAnswer) -> AnswerWriter:
        """Return the writer that writes the answer in the endpoint's shape."""

    def demand(self) -> Demand:
        """Return the body's `n` and timeout. Raises OutriderError(INVALID_VALUE)."""
        n = _choice_count(self.body.n, self.prompt_count)
        timeout = client_timeout(self.body.timeout, self.headers, stream=self.streams)
        return Demand(self.prompt_count, n, timeout)

    def release_slots(self) -> None:
        """Release the slots that the request took when its headers came."""
        admitted_request(self.request).release_slots()

    @contextmanager
    def responding(self, span: Span) -> Iterator[None]:
        """Write HTTP's attributes to a span.

        The status is 200, or the status of the block's error.
        """
        path = self.request.url.path
        span.set(
            http__request__method=self.request.method,
            http__route=getattr(self.request.scope.get("route"), "path", path),
            url__path=path,
            url__scheme=self.request.url.scheme,
        )
        status = 500
        try:
            yield
            status = 200
        except OutriderError as error:
            status = error.reason.kind.http
            raise
        finally:
            span.set(http__response__status_code=status)

    def build(self, inputs: TextInputs, info: ModelInfo) -> Sequence[TextRequest]:
        """Return the sequences for a replica's model.

        Raises OutriderError that names field and limit.
        """
        return text_requests(self.body, inputs, info)


class CompletionCall(HttpCall[CompletionBody]):
    """POST /v1/completions."""

    operation = "text_completion"

    def writer(self, answer: TextAnswer) -> AnswerWriter:
        """Return the writer for completions.

        With `echo` and `logprobs`, the writer lists the log probabilities of prompt and answer.
        """
        shape = CompletionShape(answer.model, self.request_id)
        lists_prompt = bool(self.body.echo) and self.body.logprobs is not None
        return OpenAIWriter(
            shape, answer, self.body, metrics=self.has_metrics, lists_prompt=lists_prompt
        )

    @property
    def prompt_count(self) -> int:
        """The number of prompts in the body."""
        return len(self.body.prompt)

    def prompts(self) -> list[PromptInput]:
        """Return the body's texts and lists of ids."""
        echoes = bool(self.body.echo)
        special = self.body.add_special_tokens is not False
        return [
            PromptInput(given, echoes=echoes, adds_special_tokens=special)
            for given in self.body.prompt
        ]


class ChatCall(HttpCall[ChatBody]):
    """POST /v1/chat/completions."""

    operation = "chat"
    prompt_count = 1

    def writer(self, answer: TextAnswer) -> AnswerWriter:
        """Return the writer of OpenAI's answer."""
        shape = ChatShape(answer.model, self.request_id)
        return OpenAIWriter(shape, answer, self.body, metrics=self.has_metrics)

    def prompts(self) -> list[PromptInput]:
        """Return the conversation as the only prompt.

        Raises OutriderError(INVALID_VALUE) if the options contradict each other.
        """
        messages = [message.for_template() for message in self.body.messages]
        return [PromptInput(Conversation(messages, self.body.rendering()), "messages")]


def _choice_count(given: int | None, prompt_count: int) -> int:
    """Return the body's `n`. Raises OutriderError(INVALID_VALUE) for too many sequences."""
    n = 1 if given is None else given
    if not 1 <= n <= MAX_SEQUENCES:
        raise invalid("n", f"must be in [1, {MAX_SEQUENCES}], not {n}")
    if prompt_count * n > MAX_SEQUENCES:
        limit = f"at most {MAX_SEQUENCES} sequences go in one request"
        raise invalid("n", f"asks for {prompt_count} prompts times n={n}; {limit}")
    return n


def client_timeout(
    timeout: float | None, headers: Mapping[str, str], *, stream: bool | None
) -> ClientTimeout:
    """Return the timeout of a request with this `timeout` in its body and these headers.

    OpenAI's clients send a header with the time that they wait for the first byte. Without
    `stream`, the first byte comes only when the whole answer is there. Raises
    OutriderError(INVALID_VALUE) for a timeout below LEAST_TIMEOUT_S.
    """
    if timeout is not None and not timeout >= LEAST_TIMEOUT_S:
        raise invalid("timeout", f"must be at least {LEAST_TIMEOUT_S} (seconds), not {timeout}")
    client_s = client_seconds(headers)
    if stream:
        return ClientTimeout(timeout, client_s)
    both = [seconds for seconds in (timeout, client_s) if seconds is not None]
    return ClientTimeout(min(both, default=None))
