"""POST /v1/completions and /v1/chat/completions: OpenAI's requests, and OpenAI's answers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Generic, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.access.gate import Gate, identity_of
from gateway.access.limits import Limits
from gateway.generation.admission import ClientTimeout
from gateway.generation.generate import Generation
from gateway.generation.serve_text import Demand, TextAnswer, TextCall, serve_text
from gateway.http.entrance import arrival_of
from gateway.http.json_body import JsonRoute
from gateway.http.openapi import STREAMED, json_responses
from gateway.http.request_id import request_id
from gateway.http.responses import (
    ChatShape,
    ChunkMaker,
    CompletionShape,
    ResponseShape,
    attribution,
)
from gateway.http.schema import LEAST_TIMEOUT_S, ChatBody, CompletionBody, StreamOptions
from gateway.http.streaming import EventStream, sse, until_gone
from gateway.http.to_requests import answer_limit, gathers, text_requests
from gateway.text.choices import WholeChoice, collect
from gateway.text.request import Conversation, PromptInput, TextInputs, TextRequest
from outrider.errors import OutriderError, invalid
from outrider.process.telemetry import Span
from outrider.protocol.model_info import ModelInfo

MAX_SEQUENCES = 64
"""Most sequences of one request, prompts times n: the batch of a verifier with default settings."""
_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
# OpenAI's clients say here when they give up: in Python, and in all other languages.
_CLIENT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")


def routes(generation: Generation, gate: Gate) -> APIRouter:
    """The endpoints that generate text."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", responses=json_responses(*_ERRORS, also=STREAMED))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue each prompt. `max_tokens` is 16 by default."""
        call = _CompletionCall(body, request)
        return await _answer(generation, gate.limits, call)

    @router.post("/v1/chat/completions", responses=json_responses(*_ERRORS, also=STREAMED))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation. `max_completion_tokens` is what the context leaves by default."""
        return await _answer(generation, gate.limits, _ChatCall(body, request))

    return router


_Body = TypeVar("_Body", CompletionBody, ChatBody)


class _HttpCall(TextCall, Generic[_Body]):
    """A request for text over HTTP."""

    shape: type[ResponseShape]
    has_turn = True

    def __init__(self, body: _Body, request: Request) -> None:
        self.body: _Body = body
        self.request = request
        self.identity = identity_of(request)
        self.request_id = request_id(request.headers, self.shape.id_prefix)
        self.headers = request.headers
        self.model = body.model
        self.operation = self.shape.operation
        self.streams = bool(body.stream)
        self.gathers = gathers(body)
        self.limit = answer_limit(body)
        self.prediction = "" if body.prediction is None else body.prediction.content

    @property
    @abstractmethod
    def prompt_count(self) -> int:
        """How many prompts the body has."""

    def demand(self) -> Demand:
        """The body's n and its timeout. Raises OutriderError(INVALID_VALUE).

        The entrance has counted the request as one sequence. It ends that count here, since the
        sequences of the demand count instead.
        """
        n = _choice_count(self.body.n, self.prompt_count)
        timeout = client_timeout(self.body.timeout, self.headers, stream=self.streams)
        arrival_of(self.request).counted()
        return Demand(self.prompt_count, n, timeout)

    @contextmanager
    def responding(self, span: Span) -> Iterator[None]:
        """Put HTTP's attributes on a span. The status is 200, or that of the block's error."""
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
        """The sequences for a replica's model. Raises OutriderError that names field and limit."""
        return text_requests(self.body, inputs, info)


class _CompletionCall(_HttpCall[CompletionBody]):
    """POST /v1/completions."""

    shape = CompletionShape

    @property
    def prompt_count(self) -> int:
        """How many prompts the body has."""
        return len(self.body.prompt)

    def prompts(self) -> list[PromptInput]:
        """The body's texts and lists of ids."""
        echoes = bool(self.body.echo)
        return [PromptInput(given, echoes=echoes) for given in self.body.prompt]


class _ChatCall(_HttpCall[ChatBody]):
    """POST /v1/chat/completions."""

    shape = ChatShape
    prompt_count = 1

    def prompts(self) -> list[PromptInput]:
        """The conversation. Raises OutriderError(INVALID_VALUE) for options that contradict."""
        messages = [message.for_template() for message in self.body.messages]
        return [PromptInput(Conversation(messages, self.body.rendering()), "messages")]


def _choice_count(given: int | None, prompt_count: int) -> int:
    """The body's n. Raises OutriderError(INVALID_VALUE) for too many sequences."""
    n = 1 if given is None else given
    if not 1 <= n <= MAX_SEQUENCES:
        raise invalid("n", f"must be in [1, {MAX_SEQUENCES}], not {n}")
    if prompt_count * n > MAX_SEQUENCES:
        name = "prompt" if prompt_count > MAX_SEQUENCES else "n"
        limit = f"at most {MAX_SEQUENCES} sequences go in one request"
        raise invalid(name, f"asks for {prompt_count} prompts times n={n}; {limit}")
    return n


def client_timeout(
    timeout: float | None, headers: Mapping[str, str], *, stream: bool | None
) -> ClientTimeout:
    """The timeout of a request with this `timeout` in its body and these headers.

    OpenAI's clients wait for the first byte as long as their header says. Without `stream`, that is
    the whole answer. Raises OutriderError(INVALID_VALUE) for a timeout below LEAST_TIMEOUT_S.
    """
    if timeout is not None and not timeout >= LEAST_TIMEOUT_S:
        raise invalid("timeout", f"must be at least {LEAST_TIMEOUT_S} (seconds), not {timeout}")
    named = [_seconds(headers[name]) for name in _CLIENT_HEADERS if name in headers]
    client_s = min([seconds for seconds in named if seconds is not None], default=None)
    if stream:
        return ClientTimeout(timeout, client_s)
    both = [seconds for seconds in (timeout, client_s) if seconds is not None]
    return ClientTimeout(min(both, default=None))


def _seconds(text: str) -> float | None:
    """A header's positive number; None for anything else, since it is the client's own note."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None


async def _answer(
    generation: Generation, limits: Limits, call: _CompletionCall | _ChatCall
) -> Response:
    """Answer with one JSON object, or with a stream that closes the generation when it ends."""
    body = call.body
    async with AsyncExitStack() as stack:
        answer = await stack.enter_async_context(serve_text(generation, limits, call))
        arrival_of(call.request).done()
        shape = call.shape(answer.model, call.request_id)
        if not call.streams:
            collected = collect(answer.events, len(answer.totals.finishes))
            choices = await until_gone(call.request, collected)
            whole = _whole(body, shape, answer, choices)
            return JSONResponse(whole, headers=_headers(call, answer))
        # Await the first delta before the status line goes out, so that a refused request gets the
        # status of its error.
        first = await until_gone(call.request, anext(answer.events))
        maker = ChunkMaker(
            shape,
            answer.totals,
            body.stream_options or StreamOptions(),
            answer.prompt_lengths,
            metrics=body.speculation.metrics,
        )
        events = sse(first, answer.events, maker, answer.span)
        return EventStream(events, stack.pop_all(), _headers(call, answer))


def _headers(call: TextCall, answer: TextAnswer) -> dict[str, str]:
    """The answer's id, and what is left of the caller's limits."""
    return {"X-Request-Id": call.request_id, **answer.grant.headers}


def _whole(
    body: CompletionBody | ChatBody,
    shape: ResponseShape,
    answered: TextAnswer,
    choices: list[WholeChoice],
) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    totals = answered.totals
    shown = [choice.shown for choice in choices]
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        shown = [choice.prompt + choice.shown for choice in choices]
    answer = shape.whole([choice.text for choice in choices], totals, shown)
    if body.prompt_logprobs is not None:
        shape.add_prompt_logprobs(answer, [choice.prompt for choice in choices])
    for written, choice in zip(answer["choices"], choices, strict=True):
        written |= attribution(choice.attributed)
    answer |= totals.speculation()
    if body.speculation.metrics:
        answer["metrics"] = totals.metrics()
    return answer
