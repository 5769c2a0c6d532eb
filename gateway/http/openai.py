"""POST /v1/completions and /v1/chat/completions: OpenAI's requests, and OpenAI's answers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.access.gate import Gate, identity_of
from gateway.access.limits import Grant
from gateway.generation.admission import Place
from gateway.generation.generate import Generation
from gateway.generation.patience import http_patience
from gateway.generation.request_span import (
    begin,
    describe,
    describe_http,
    describe_settings,
    responding,
)
from gateway.http.entrance import arrival_of
from gateway.http.json_body import JsonRoute
from gateway.http.openapi import STREAMED, json_responses
from gateway.http.parameters import most_answer_tokens, text_requests
from gateway.http.responses import ChatShape, CompletionShape, ResponseShape, attribution
from gateway.http.schema import ChatBody, CompletionBody, GenerationBody, StreamOptions
from gateway.http.streaming import ChunkWriter, EventStream, sse, until_gone
from gateway.text.choices import UsageTotals, WholeChoice, collect
from gateway.text.request import Caller, Prompt, TextRequest
from outrider.protocol.errors import invalid
from outrider.protocol.model_info import ModelInfo

_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


def routes(generation: Generation, max_sequences: int, gate: Gate) -> APIRouter:
    """The endpoints that generate text."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", responses=json_responses(*_ERRORS, also=STREAMED))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue each prompt. `max_tokens` is 16 by default."""
        grant = await gate.admit(request)
        model, info = generation.router.lookup(body.model)
        n = _choice_count(body, len(body.prompt), max_sequences)
        prompts = []
        with _place(generation, request, body, model, n * len(body.prompt)) as place:
            prediction = await _prediction(generation, body, info)
            for given in body.prompt:
                ids = given
                if isinstance(given, str):
                    ids = await generation.prompts.encode(given, "prompt", info.context_length)
                echo = generation.echo(given, info) if body.echo else None
                prompts.append(Prompt(ids, "prompt", echo, prediction))
            shape = CompletionShape(model, request.headers)
            return await _answer(generation, request, body, prompts, n, shape, grant, place)

    @router.post("/v1/chat/completions", responses=json_responses(*_ERRORS, also=STREAMED))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation. `max_completion_tokens` is what the context leaves by default."""
        grant = await gate.admit(request)
        model, info = generation.router.lookup(body.model)
        n = _choice_count(body, 1, max_sequences)
        with _place(generation, request, body, model, n) as place:
            tenant = identity_of(request).tenant
            prompt = await _chat_prompt(generation, body, info, tenant)
            shape = ChatShape(model, request.headers)
            return await _answer(generation, request, body, [prompt], n, shape, grant, place)

    return router


def _place(
    generation: Generation, request: Request, body: GenerationBody, model: str, count: int
) -> Place:
    """Room for a request's sequences. Raises OutriderError(OVERLOADED) if there is none."""
    patience = http_patience(body.timeout, request.headers, stream=body.stream)
    arrival_of(request).counted()
    return generation.admission.enter(model, identity_of(request).tenant, count, patience)


async def _chat_prompt(
    generation: Generation, body: ChatBody, info: ModelInfo, tenant: str
) -> Prompt:
    """The conversation as ids, and what the client expects as its answer."""
    messages = [message.for_template() for message in body.messages]
    most = info.context_length
    prompts = generation.prompts
    text = await prompts.rendered(messages, "messages", most, tenant, **body.rendering())
    ids = await prompts.encode(text, "messages", most, add_special_tokens=False)
    return Prompt(ids, "messages", prediction=await _prediction(generation, body, info))


async def _prediction(generation: Generation, body: GenerationBody, info: ModelInfo) -> list[int]:
    """The ids of the answer that the client expects, at most as many as the context holds."""
    if body.prediction is None:
        return []
    return await generation.prompts.encode_start(body.prediction.content, info.context_length)


def _choice_count(body: GenerationBody, prompt_count: int, max_sequences: int) -> int:
    """The body's n. Raises OutriderError(INVALID_VALUE) for too many sequences."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= max_sequences:
        raise invalid("n", f"must be in [1, {max_sequences}], not {n}")
    if prompt_count * n > max_sequences:
        name = "prompt" if prompt_count > max_sequences else "n"
        limit = f"at most {max_sequences} sequences go in one request"
        raise invalid(name, f"asks for {prompt_count} prompts times n={n}; {limit}")
    return n


async def _answer(
    generation: Generation,
    request: Request,
    body: CompletionBody | ChatBody,
    prompts: list[Prompt],
    n: int,
    shape: ResponseShape,
    grant: Grant,
    place: Place,
) -> Response:
    """Generate n choices for each prompt, and answer with one JSON object or with a stream."""
    _, info = generation.router.lookup(shape.model)
    lengths = [len(prompt.token_ids) for prompt in prompts for _ in range(n)]
    span = begin(request.headers, shape.model, shape.operation, n, stream=bool(body.stream))
    describe_http(span, request)
    caller = Caller(shape.id, span.traceparent, identity_of(request).tenant)

    def build(info: ModelInfo) -> list[TextRequest]:
        requests = text_requests(body, prompts, n, caller, info)
        describe_settings(span, requests[0])
        return requests

    events = grant.metered(
        generation.generate(shape.model, shape.operation, build, place),
        prompt=sum(lengths[::n]),
        answer=most_answer_tokens(body, prompts, n, info),
        sequences=len(lengths),
        gathered=not (body.stream or body.stop or body.speculation.tokens),
    )
    totals = UsageTotals(len(prompts), n)
    arrival_of(request).done()
    if not body.stream:
        with span, responding(span):
            choices = await until_gone(request, collect(events, totals))
            describe(span, shape.id, totals, shape.model)
            answer = _whole(body, shape, totals, choices)
            return JSONResponse(answer, headers={"X-Request-Id": shape.id, **grant.headers})
    try:
        with responding(span):
            # Await the first delta before the status line goes out, so that a refused request
            # gets the status of its error.
            first = await until_gone(request, anext(events))
    # Also when the client goes away: a span that is not ended is never sent.
    except BaseException as error:
        span.ended_by(error)
        span.end()
        raise
    options = body.stream_options or StreamOptions()
    writer = ChunkWriter(shape, totals, options, lengths, metrics=body.speculation.metrics)
    headers = {"X-Request-Id": shape.id, **grant.headers}
    return EventStream(sse(first, events, writer, span), events, headers)


def _whole(
    body: GenerationBody, shape: ResponseShape, totals: UsageTotals, choices: list[WholeChoice]
) -> dict[str, Any]:
    """The answer to a request that does not stream."""
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
