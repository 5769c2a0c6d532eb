"""POST /v1/completions and /v1/chat/completions: from OpenAI's request to sequences, and back to OpenAI's answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.choices import Event, Tally, collect, merge
from gateway.generate import Generation, TextRequest, check_stop
from gateway.schema import ChatBody, CompletionBody, GenerationBody
from gateway.shapes import ChatShape, CompletionShape, Shape
from gateway.streaming import ChunkWriter, EventStream, describe, sse, until_gone
from outrider import telemetry, wire_settings
from outrider.errors import invalid
from outrider.messages import MAX_STOP_TOKENS, ModelInfo, SamplingParams, SpeculationOptions
from outrider.telemetry import Span

_COMPLETION_MAX_TOKENS = 16
_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1


def routes(generation: Generation, max_sequences: int) -> APIRouter:
    """The endpoints that generate text."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue each prompt; `max_tokens` is 16 unless given."""
        name, info, _ = generation.router.pick(body.model)
        n = _choice_count(body, len(body.prompt), max_sequences)
        template = replace(_text_request(body, name, info), default_max_tokens=_COMPLETION_MAX_TOKENS)
        prompts = [p if isinstance(p, list) else await generation.prompts.encode(p) for p in body.prompt]
        return await _answer(generation, request, body, [replace(template, prompt=ids) for ids in prompts], n, CompletionShape)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation; it may take what the context leaves unless `max_completion_tokens` says less."""
        name, info, _ = generation.router.pick(body.model)
        n = _choice_count(body, 1, max_sequences)
        text = generation.prompts.render([message.for_template() for message in body.messages])
        prompt = await generation.prompts.encode(text, add_special_tokens=False)
        job = replace(_text_request(body, name, info), prompt=prompt, prompt_field="messages")
        if body.max_completion_tokens is not None:
            if body.max_tokens is not None:
                raise invalid("max_tokens", "is the old name of max_completion_tokens; send one of them")
            job = replace(job, max_tokens=body.max_completion_tokens, limit_field="max_completion_tokens")
        return await _answer(generation, request, body, [job], n, ChatShape)

    return router


def _choice_count(body: GenerationBody, prompt_count: int, max_sequences: int) -> int:
    """n, when the request's sequences are within bounds."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= max_sequences:
        raise invalid("n", f"must be in [1, {max_sequences}], not {n}")
    if prompt_count * n > max_sequences:
        name = "prompt" if prompt_count > max_sequences else "n"
        raise invalid(name, f"asks for {prompt_count} prompts times n={n}; at most {max_sequences} sequences go in one request")
    return n


def _text_request(body: GenerationBody, model: str, info: ModelInfo) -> TextRequest:
    """What all sequences of the request have in common, checked; the prompt is still empty."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only for stream: true")
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    top_k = 0 if body.top_k in (None, -1) else body.top_k
    sampling = SamplingParams(temperature, top_k, top_p, body.seed)
    wire_settings.check_sampling(sampling, info.vocab_size)
    speculation = SpeculationOptions(body.speculation.enabled, body.speculation.drafter, body.speculation.depth)
    wire_settings.check_speculation(speculation)
    if body.seed is not None and not _SEED_MIN <= body.seed <= _SEED_MAX:
        raise invalid("seed", f"must be in [{_SEED_MIN}, {_SEED_MAX}], not {body.seed}")
    return TextRequest(
        prompt=[],
        max_tokens=body.max_tokens,
        sampling=sampling,
        stop=check_stop(body.stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids or [], info.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        speculation=speculation,
        model=model,
        whole=not body.stream,
    )


def _stop_token_ids(ids: list[int], vocab_size: int) -> frozenset[int]:
    if len(ids) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"must hold at most {MAX_STOP_TOKENS} ids, not {len(ids)}")
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise invalid(f"stop_token_ids[{index}]", f"must be in [0, {vocab_size}), not {token_id}")
    return frozenset(ids)


async def _answer(
    generation: Generation,
    request: Request,
    body: GenerationBody,
    prompts: list[TextRequest],
    n: int,
    shape_of: Callable[..., Shape],
) -> Response:
    """Generate n choices for each prompt and answer as asked."""
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    shape = shape_of(prompts[0].model, include_usage=include_usage)
    span = telemetry.start_root(
        shape.operation, request.headers, gen_ai__operation__name=shape.operation, gen_ai__request__model=shape.model
    )
    jobs = [_choice(job, shape.id, choice, span) for job in prompts for choice in range(n)]
    events = merge([generation.stream(job) for job in jobs])
    tally = Tally(len(prompts), n)
    if not body.stream:
        with span:
            texts = await until_gone(request, collect(events, tally))
            describe(span, tally)
            return JSONResponse(_whole(body, shape, tally, texts), headers={"X-Request-Id": shape.id})
    try:
        # The first piece is awaited before the status line goes out, so that what is refused is refused with its own status.
        first = await until_gone(request, _first(events))
    except BaseException as error:
        span.fail(str(error))
        span.end()
        raise
    writer = ChunkWriter(shape, tally, include_usage=include_usage, include_metrics=body.speculation.metrics)
    return EventStream(sse(first, events, writer, tally, span), events, {"X-Request-Id": shape.id})


def _choice(job: TextRequest, request_id: str, choice: int, span: Span) -> TextRequest:
    """The sequence of one choice. With a seed s, choice i is what a request for one choice with seed s + i would give."""
    seed = job.sampling.seed
    sampling = job.sampling if seed is None else replace(job.sampling, seed=(seed + choice) % 2**64)
    return replace(job, sampling=sampling, request_id=request_id, traceparent=span.traceparent)


async def _first(events: AsyncGenerator[Event, None]) -> Event:
    return await anext(events)


def _whole(body: GenerationBody, shape: Shape, tally: Tally, texts: list[str]) -> dict[str, Any]:
    reasons = [ending.reason for ending in tally.endings if ending is not None]
    metrics = {"metrics": tally.metrics()} if body.speculation.metrics else {}
    return shape.whole(texts, reasons, tally.usage()) | metrics
