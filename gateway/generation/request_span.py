"""Writes a request's span, as OpenTelemetry's conventions for generative AI define it."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.access_log import Access
from gateway.metrics import PROVIDER
from gateway.text.choices import UsageTotals
from gateway.text.request import TextRequest
from outrider.process.observability import telemetry
from outrider.process.observability.telemetry import Span
from outrider.protocol.messages import FinishReason, SamplingParams

_DEFAULTS = SamplingParams()


def begin(
    headers: Mapping[str, str], model: str, operation: str, choice_count: int, *, stream: bool
) -> Span:
    """Start the span of a request, as a child of the caller's span if `headers` name one."""
    span = telemetry.start_root(f"{operation} {model}", headers)
    span.set(
        gen_ai__operation__name=operation,
        gen_ai__provider__name=PROVIDER,
        gen_ai__request__model=model,
        gen_ai__request__stream=stream,
    )
    if choice_count > 1:
        span.set(gen_ai__request__choice__count=choice_count)
    return span


def describe_settings(span: Span, request: TextRequest) -> None:
    """Write to a request's span the settings that differ from their defaults."""
    sampling = request.tokens.sampling
    span.set(outrider__speculation=request.tokens.speculation.enabled)
    for name in ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"):
        value = getattr(sampling, name)
        if value != getattr(_DEFAULTS, name):
            span.set(**{f"gen_ai__request__{name}": value})
    if request.asked_tokens is not None:
        span.set(gen_ai__request__max_tokens=request.asked_tokens)
    if sampling.seed is not None:
        # A seed may exceed an attribute's signed 64 bits.
        span.set(gen_ai__request__seed=str(sampling.seed))
    if request.stop:
        span.set(gen_ai__request__stop_sequences=list(request.stop))


def describe(span: Span, access: Access, totals: UsageTotals) -> None:
    """Write finish reasons and usage to a request's span, and the usage to its access line."""
    usage = totals.usage()
    reasons = [
        "stop" if finish.reason is FinishReason.STOP else "length"
        for finish in totals.finishes
        if finish is not None
    ]
    access.prompt_tokens = usage["prompt_tokens"]
    access.completion_tokens = usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    span.set(
        gen_ai__response__id=access.request_id,
        gen_ai__response__model=access.model,
        gen_ai__response__finish_reasons=reasons,
        gen_ai__usage__input_tokens=access.prompt_tokens,
        gen_ai__usage__output_tokens=access.completion_tokens,
        outrider__accepted_tokens=details["accepted_prediction_tokens"],
        outrider__rejected_tokens=details["rejected_prediction_tokens"],
    )
    resumed = sum(finish.resumed_count for finish in totals.finishes if finish is not None)
    if resumed:
        span.set(outrider__resumed=resumed)
