"""A request's span, in OpenTelemetry's semantic conventions for generative AI; and its line in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from gateway.choices import Tally
from gateway.generate import TextRequest
from gateway.metrics import PROVIDER
from outrider import telemetry
from outrider.messages import FinishReason
from outrider.telemetry import Span

log = logging.getLogger("gateway.requests")


def begin(headers: Mapping[str, str], job: TextRequest, choice_count: int, *, stream: bool) -> Span:
    """The span of a request for so many choices, each as `job` says; under the caller's span when `headers` name one."""
    span = telemetry.start_root(f"{job.operation} {job.model}", headers)
    sampling = job.sampling
    span.set(
        gen_ai__operation__name=job.operation,
        gen_ai__provider__name=PROVIDER,
        gen_ai__request__model=job.model,
        gen_ai__request__choice__count=choice_count,
        gen_ai__request__stream=stream,
        gen_ai__request__temperature=sampling.temperature,
        gen_ai__request__top_p=sampling.top_p,
        gen_ai__request__top_k=sampling.top_k,
        gen_ai__request__frequency_penalty=sampling.frequency_penalty,
        gen_ai__request__presence_penalty=sampling.presence_penalty,
        outrider__speculation=job.speculation.enabled,
    )
    if job.max_tokens is not None:
        span.set(gen_ai__request__max_tokens=job.max_tokens)
    if sampling.seed is not None:
        # A seed may be larger than what an attribute of 64 bits holds.
        span.set(gen_ai__request__seed=str(sampling.seed))
    if job.stop:
        span.set(gen_ai__request__stop_sequences=list(job.stop))
    return span


def describe(span: Span, request_id: str, tally: Tally) -> None:
    """Put what came out on a request's span and into the log."""
    usage = tally.usage()
    reasons = ["stop" if ending.reason is FinishReason.STOP else "length" for ending in tally.endings if ending is not None]
    prompt, completion, details = usage["prompt_tokens"], usage["completion_tokens"], usage["completion_tokens_details"]
    span.set(
        gen_ai__response__id=request_id,
        gen_ai__response__finish_reasons=reasons,
        gen_ai__usage__input_tokens=prompt,
        gen_ai__usage__output_tokens=completion,
        outrider__accepted_tokens=details["accepted_prediction_tokens"],
        outrider__rejected_tokens=details["rejected_prediction_tokens"],
    )
    log.info("%s: %d tokens in, %d out (%s)", request_id, prompt, completion, ", ".join(reasons))
