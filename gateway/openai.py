"""POST /v1/completions and /v1/chat/completions: from OpenAI's request to sequences, and back to OpenAI's answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.choices import Event, Tally, collect, merge, repeated, scored_once
from gateway.document import STREAMED, answers
from gateway.generate import Generation, Piece, TextRequest
from gateway.json_body import JsonRoute
from gateway.parameters import text_request
from gateway.request_span import begin, describe, describe_http, responding
from gateway.schema import ChatBody, CompletionBody, GenerationBody, StreamOptions
from gateway.shapes import ChatShape, CompletionShape, Shape, authors
from gateway.streaming import ChunkWriter, EventStream, sse, until_gone
from gateway.tenants import tenant_of
from outrider.errors import invalid
from outrider.messages import ModelInfo

_COMPLETION_MAX_TOKENS = 16
_ERRORS = (400, 404, 408, 413, 429, 500, 503)


def routes(generation: Generation, max_sequences: int) -> APIRouter:
    """The endpoints that generate text."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", responses=answers(*_ERRORS, also=STREAMED))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue each prompt; `max_tokens` is 16 unless given."""
        name, info, _ = generation.router.pick(body.model)
        n = _choice_count(body, len(body.prompt), max_sequences)
        template = replace(text_request(body, name, info), default_max_tokens=_COMPLETION_MAX_TOKENS)
        template = replace(template, prediction=await _prediction(generation, body, info))
        encode = generation.prompts.encode
        prompts = [p if isinstance(p, list) else await encode(p, "prompt", info.context_length) for p in body.prompt]
        echoes = [generation.echo(p, info) if body.echo else None for p in body.prompt]
        jobs = [replace(template, prompt=ids, echo=echo) for ids, echo in zip(prompts, echoes, strict=True)]
        return await _answer(generation, request, body, jobs, n, CompletionShape)

    @router.post("/v1/chat/completions", responses=answers(*_ERRORS, also=STREAMED))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation; it may take what the context leaves unless `max_completion_tokens` says less."""
        name, info, _ = generation.router.pick(body.model)
        n = _choice_count(body, 1, max_sequences)
        messages = [message.for_template() for message in body.messages]
        text = await generation.prompts.rendered(messages, "messages", info.context_length, **body.rendering())
        prompt = await generation.prompts.encode(text, "messages", info.context_length, add_special_tokens=False)
        job = replace(text_request(body, name, info), prompt=prompt, prompt_field="messages", operation=ChatShape.operation)
        job = replace(job, prediction=await _prediction(generation, body, info))
        if body.max_completion_tokens is not None:
            if body.max_tokens is not None:
                raise invalid("max_tokens", "is the old name of max_completion_tokens; send one of them")
            job = replace(job, max_tokens=body.max_completion_tokens, limit_field="max_completion_tokens")
        return await _answer(generation, request, body, [job], n, ChatShape)

    return router


async def _prediction(generation: Generation, body: GenerationBody, info: ModelInfo) -> list[int]:
    """The tokens the client expects; more than the context holds are of no use."""
    if body.prediction is None:
        return []
    return await generation.prompts.encode_start(body.prediction.content, info.context_length)


def _choice_count(body: GenerationBody, prompt_count: int, max_sequences: int) -> int:
    """n, when the request's sequences are within bounds."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= max_sequences:
        raise invalid("n", f"must be in [1, {max_sequences}], not {n}")
    if prompt_count * n > max_sequences:
        name = "prompt" if prompt_count > max_sequences else "n"
        raise invalid(name, f"asks for {prompt_count} prompts times n={n}; at most {max_sequences} sequences go in one request")
    return n


async def _answer(
    generation: Generation,
    request: Request,
    body: GenerationBody,
    prompts: list[TextRequest],
    n: int,
    shape_of: Callable[..., Shape],
) -> Response:
    """Generate n choices for each prompt and answer as asked."""
    options = body.stream_options or StreamOptions()
    include_usage = options.include_usage
    shape = shape_of(prompts[0].model, include_usage=include_usage)
    span = begin(request.headers, prompts[0], n, stream=bool(body.stream))
    describe_http(span, request)
    tenant = tenant_of(request.headers)
    jobs = [replace(job, request_id=shape.id, traceparent=span.traceparent, tenant=tenant) for job in prompts]
    events = merge([stream for job in jobs for stream in _streams(generation, job, n)])
    tally = Tally(len(prompts), n)
    if not body.stream:
        with span, responding(span):
            texts = await until_gone(request, collect(events, tally))
            describe(span, shape.id, tally, shape.model)
            return JSONResponse(_whole(body, shape, tally, texts), headers={"X-Request-Id": shape.id})
    try:
        with responding(span):
            # The first piece is awaited before the status line goes out, so that what is refused is refused with its own status.
            first = await until_gone(request, _first(events))
    except BaseException as error:
        span.ended_by(error)
        span.end()
        raise
    usage_of = [len(job.prompt) for job in jobs for _ in range(n)] if include_usage and options.continuous_usage_stats else []
    writer = ChunkWriter(shape, tally, include_usage=include_usage, include_metrics=body.speculation.metrics, usage_of=usage_of)
    return EventStream(sse(first, events, writer, tally, span, shape), events, {"X-Request-Id": shape.id})


def _streams(generation: Generation, job: TextRequest, n: int) -> list[AsyncGenerator[Piece, None]]:
    """The choices of one prompt."""
    if job.max_tokens == 0:
        return repeated(generation.stream(_choice(job, 0)), n)
    choices = [_choice(job, choice) for choice in range(n)]
    if job.prompt_logprobs is None:
        return [generation.stream(choice) for choice in choices]
    first, *others = choices
    return scored_once([generation.stream(first), *(generation.stream(replace(c, prompt_logprobs=None)) for c in others)])


def _choice(job: TextRequest, choice: int) -> TextRequest:
    """The sequence of one choice. With a seed s, choice i is what a request for one choice with seed s + i would give."""
    seed = job.sampling.seed
    return job if seed is None else replace(job, sampling=replace(job.sampling, seed=(seed + choice) % 2**64))


async def _first(events: AsyncGenerator[Event, None]) -> Event:
    return await anext(events)


def _whole(body: GenerationBody, shape: Shape, tally: Tally, texts: list[str]) -> dict[str, Any]:
    reasons = [ending.reason for ending in tally.endings if ending is not None]
    metrics = {"metrics": tally.metrics()} if body.speculation.metrics else {}
    echoed = isinstance(body, CompletionBody) and body.echo and body.logprobs is not None
    shown = [[*prompt, *tokens] for prompt, tokens in zip(tally.prompts, tally.shown, strict=True)] if echoed else tally.shown
    answer = shape.whole(texts, reasons, tally.usage(), shown)
    if body.prompt_logprobs is not None:
        shape.tell_prompts(answer, tally.prompts)
    for choice, tokens in zip(answer["choices"], tally.authored, strict=True):
        choice |= authors(tokens)
    return answer | tally.speculation() | metrics
