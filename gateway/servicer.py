"""GenerationService over gRPC: the same core as HTTP, in the protos' shape."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from gateway.choices import UsageTotals
from gateway.conversation import MAX_MESSAGES
from gateway.deltas import TextDelta
from gateway.generate import Generation
from gateway.json_body import MAX_VALUES
from gateway.request import AnswerLimit, Caller, Prompt, TextRequest, check_stop
from gateway.request_span import begin, describe, describe_settings
from gateway.tenants import tenant_of
from outrider.checks import check_logprobs
from outrider.errors import OutriderError, invalid
from outrider.messages import TokenRequest
from outrider.model_info import ModelInfo
from outrider.process import rpc
from outrider.process.telemetry import Span
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire import requests as wire_requests
from outrider.wire import settings as wire_settings
from outrider.wire.settings import proto_enum

SERVICE = "outrider.v1.GenerationService"
_ROLES = ("system", "user", "assistant")


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves GenerateText."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @rpc.reports_errors
    async def GenerateText(
        self,
        request: generation_pb2.GenerateTextRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[generation_pb2.GenerateTextResponse, None]:
        """Stream the text of one request."""
        headers = {
            key: value
            for key, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        async with aclosing(self.answer(request, headers)) as responses:
            async for response in responses:
                yield response

    async def answer(
        self, request: generation_pb2.GenerateTextRequest, headers: Mapping[str, str]
    ) -> AsyncGenerator[generation_pb2.GenerateTextResponse, None]:
        """The same for any protocol; `traceparent` in the caller's headers is the span's parent. Raises OutriderError."""
        model, info = self._generation.router.lookup(request.model)
        ids, field_name = await self._prompt(request, info.context_length)
        prediction = await self._generation.prompts.encode_start(
            request.prediction, info.context_length
        )
        prompt = Prompt(ids, field_name, prediction=prediction)
        operation = "chat" if request.HasField("chat") else "text_completion"
        totals = UsageTotals(1, 1)
        with begin(headers, model, operation, 1, stream=True) as span, _responding(span):
            caller = Caller(f"text-{secrets.token_hex(16)}", span.traceparent, tenant_of(headers))

            def build(info: ModelInfo) -> list[TextRequest]:
                text_request = _text_request(request, prompt, caller, info)
                describe_settings(span, text_request)
                return [text_request]

            async with aclosing(self._generation.generate(model, operation, build)) as events:
                async for _, delta in events:
                    if delta.finish is not None:
                        totals.finishes[0] = delta.finish
                        describe(span, caller.request_id, totals, model)
                    yield _response(delta)

    async def _prompt(
        self, request: generation_pb2.GenerateTextRequest, context_length: int
    ) -> tuple[list[int], str]:
        """The prompt's ids, and the field it came in."""
        prompts = self._generation.prompts
        kind = request.WhichOneof("input")
        if kind == "prompt":
            return await prompts.encode(request.prompt, "prompt", context_length), "prompt"
        if kind == "tokens":
            if (count := len(request.tokens.token_ids)) > MAX_VALUES:
                raise invalid(
                    "tokens.token_ids", f"must hold at most {MAX_VALUES} ids, not {count}"
                )
            return list(request.tokens.token_ids), "tokens.token_ids"
        if kind is None:
            raise invalid("input", "must be one of prompt, chat and tokens")
        if not request.chat.messages:
            raise invalid("chat.messages", "must hold at least 1 message")
        if (count := len(request.chat.messages)) > MAX_MESSAGES:
            raise invalid(
                "chat.messages", f"must hold at most {MAX_MESSAGES} messages, not {count}"
            )
        for index, message in enumerate(request.chat.messages):
            if message.role not in _ROLES:
                raise invalid(
                    f"chat.messages[{index}].role",
                    f"must be one of {', '.join(_ROLES)}, not {message.role[:40]!r}",
                )
        messages = [
            {"role": message.role, "content": message.content} for message in request.chat.messages
        ]
        text = await prompts.rendered(messages, "chat.messages", context_length)
        return await prompts.encode(
            text, "chat.messages", context_length, add_special_tokens=False
        ), "chat.messages"


@contextmanager
def _responding(span: Span) -> Iterator[None]:
    """Put the attributes of OpenTelemetry's RPC conventions on a request's span."""
    span.set(rpc__system__name="grpc", rpc__method=f"{SERVICE}/GenerateText")
    status = "OK"
    try:
        yield
    except OutriderError as error:
        status = error.reason.kind.status
        raise
    except (GeneratorExit, asyncio.CancelledError):
        status = "CANCELLED"
        raise
    except Exception:
        status = "INTERNAL"
        raise
    finally:
        span.set(rpc__response__status_code=status)


def _text_request(
    request: generation_pb2.GenerateTextRequest, prompt: Prompt, caller: Caller, info: ModelInfo
) -> TextRequest:
    """The request, checked against a model; raises OutriderError that names the field and the limit."""
    top_logprobs = request.top_logprob_count if request.HasField("top_logprob_count") else None
    check_logprobs("top_logprob_count", top_logprobs)
    prompt_logprobs = (
        request.prompt_logprob_count if request.HasField("prompt_logprob_count") else None
    )
    check_logprobs("prompt_logprob_count", prompt_logprobs)
    sampling = wire_settings.sampling_from_proto(request.sampling, info.vocab_size)
    limit = AnswerLimit(
        request.max_tokens if request.HasField("max_tokens") else None,
        scores_prompt=prompt_logprobs is not None,
    )
    stop = check_stop(request.stop)
    tokens = TokenRequest(
        prompt=prompt.token_ids,
        max_tokens=limit.resolve(prompt, sampling.min_tokens, info),
        sampling=sampling,
        speculation=wire_settings.speculation_from_proto(request.speculation),
        tenant=caller.tenant,
        request_id=caller.request_id,
        traceparent=caller.traceparent,
        top_logprobs=top_logprobs,
        grammar=wire_settings.grammar_from_proto(
            request.grammar if request.HasField("grammar") else None
        ),
        prediction=prompt.prediction[: info.context_length],
        prompt_logprobs=prompt_logprobs,
    )
    return TextRequest(
        tokens, limit.asked, stop, grammar_field=f"grammar.{request.grammar.WhichOneof('kind')}"
    )


def _response(delta: TextDelta) -> generation_pb2.GenerateTextResponse:
    response = generation_pb2.GenerateTextResponse(
        text=delta.text,
        token_ids=delta.token_ids,
        sources=[proto_enum(source) for source in delta.sources],
        drafter_id=delta.drafter_id,
        logprobs=map(wire_requests.logprob_to_proto, delta.logprobs),
        prompt_logprobs=map(wire_requests.logprob_to_proto, delta.prompt_logprobs),
    )
    if (finish := delta.finish) is not None:
        response.finish_reason = proto_enum(finish.reason)
        response.usage.prompt_token_count = finish.prompt_token_count
        response.usage.completion_token_count = finish.completion_token_count
        response.usage.cached_token_count = finish.cached_token_count
        response.stats.CopyFrom(wire_requests.stats_to_proto(finish.stats))
    return response
