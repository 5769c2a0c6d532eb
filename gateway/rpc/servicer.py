"""GenerationService: the same generation as over HTTP, with the protos' messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Literal

import grpc

from gateway.access.gate import Gate
from gateway.access.interceptor import text_metadata
from gateway.generation.generate import Generation
from gateway.generation.patience import Patience
from gateway.generation.request_span import begin, describe, describe_settings
from gateway.http.conversation import MAX_MESSAGES
from gateway.http.json_body import MAX_VALUES
from gateway.http.request_id import HEADER, request_id
from gateway.text.choices import UsageTotals
from gateway.text.deltas import TextDelta
from gateway.text.request import AnswerLimit, Caller, Prompt, TextRequest, check_stop
from outrider.process import rpc
from outrider.process.telemetry import Span
from outrider.protocol.checks import check_logprobs
from outrider.protocol.errors import OutriderError, invalid
from outrider.protocol.messages import TokenRequest
from outrider.protocol.model_info import ModelInfo
from outrider.protocol.wire import requests as wire_requests
from outrider.protocol.wire import settings as wire_settings
from outrider.protocol.wire.known_fields import check_known_fields
from outrider.protocol.wire.settings import proto_enum
from outrider.v1 import generation_pb2, generation_pb2_grpc

ID_PREFIX = "text"
SERVICE = "outrider.v1.GenerationService"
_ROLES = ("system", "user", "assistant")


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves GenerateText over gRPC. `answer` serves it for other protocols too."""

    def __init__(self, generation: Generation, gate: Gate) -> None:
        self._generation = generation
        self._gate = gate

    @rpc.reports_errors
    async def GenerateText(
        self,
        request: generation_pb2.GenerateTextRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[generation_pb2.GenerateTextResponse, None]:
        """Stream the text of one request."""
        headers = text_metadata(context.invocation_metadata())
        own_id = request_id(headers, ID_PREFIX)
        await context.send_initial_metadata(((HEADER, own_id),))
        answer = self.answer(request, headers, context.time_remaining(), own_id)
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response

    async def answer(
        self,
        request: generation_pb2.GenerateTextRequest,
        headers: Mapping[str, str],
        left_s: float | None,
        own_id: str,
    ) -> AsyncGenerator[generation_pb2.GenerateTextResponse, None]:
        """Yield the responses to one request. Raises OutriderError.

        The caller's `headers`, in lower case, name its tenant and its trace. The call ends in
        `left_s` seconds. `own_id` is the request's id.
        """
        identity = self._gate.identify(headers)
        check_known_fields(request)
        grant = await self._gate.limits.admit(identity.key)
        model, info = self._generation.router.lookup(request.model)
        place = self._generation.admission.enter(model, identity.tenant, 1, Patience(left_s))
        operation = "chat" if request.HasField("chat") else "text_completion"
        totals = UsageTotals(1, 1)
        with place, begin(headers, model, operation, 1, stream=True) as span, _responding(span):
            prompt = await self._prompt(request, info.context_length, identity.tenant)
            caller = Caller(own_id, span.traceparent, identity.tenant)

            def build(info: ModelInfo) -> list[TextRequest]:
                """The request for a replica's model. Raises OutriderError."""
                text_request = _text_request(request, prompt, caller, info)
                describe_settings(span, text_request)
                return [text_request]

            events = grant.metered(
                self._generation.generate(model, operation, build, place),
                prompt=len(prompt.token_ids),
                answer=AnswerLimit(_given(request, "max_tokens")).most(prompt, info),
                sequences=1,
                gathered=False,
            )
            async with aclosing(events):
                async for _, delta in events:
                    if delta.finish is not None:
                        totals.finishes[0] = delta.finish
                        describe(span, caller.request_id, totals, model)
                    yield _response(delta)

    async def _prompt(
        self, request: generation_pb2.GenerateTextRequest, context_length: int, tenant: str
    ) -> Prompt:
        """The request's prompt as ids. Raises OutriderError that names the field."""
        prompts = self._generation.prompts
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid("input", "must be one of prompt, chat and tokens")
        if kind == "tokens":
            name = "tokens.token_ids"
            count = len(request.tokens.token_ids)
            if count > MAX_VALUES:
                raise invalid(name, f"must hold at most {MAX_VALUES} ids, not {count}")
            ids = list(request.tokens.token_ids)
        elif kind == "prompt":
            name = "prompt"
            ids = await prompts.encode(request.prompt, name, context_length)
        else:
            name = "chat.messages"
            messages = _messages(request.chat)
            text = await prompts.rendered(messages, name, context_length, tenant)
            ids = await prompts.encode(text, name, context_length, add_special_tokens=False)
        prediction = await prompts.encode_start(request.prediction, context_length)
        return Prompt(ids, name, prediction=prediction)


def _messages(chat: generation_pb2.Chat) -> list[dict[str, str]]:
    """The messages for a chat template. Raises OutriderError(INVALID_VALUE)."""
    if not chat.messages:
        raise invalid("chat.messages", "must hold at least 1 message")
    count = len(chat.messages)
    if count > MAX_MESSAGES:
        raise invalid("chat.messages", f"must hold at most {MAX_MESSAGES} messages, not {count}")
    for index, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            roles = ", ".join(_ROLES)
            problem = f"must be one of {roles}, not {message.role[:40]!r}"
            raise invalid(f"chat.messages[{index}].role", problem)
    return [{"role": message.role, "content": message.content} for message in chat.messages]


@contextmanager
def _responding(span: Span) -> Iterator[None]:
    """Put OpenTelemetry's RPC attributes on a span, and the status with which the block ends."""
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
    # The span gets a status; the error goes on to the caller.
    except Exception:
        status = "INTERNAL"
        raise
    finally:
        span.set(rpc__response__status_code=status)


def _text_request(
    request: generation_pb2.GenerateTextRequest, prompt: Prompt, caller: Caller, info: ModelInfo
) -> TextRequest:
    """The request, checked against a model. Raises OutriderError that names field and limit."""
    top_logprobs = _given(request, "top_logprob_count")
    check_logprobs("top_logprob_count", top_logprobs)
    prompt_logprobs = _given(request, "prompt_logprob_count")
    check_logprobs("prompt_logprob_count", prompt_logprobs)
    sampling = wire_settings.sampling_from_proto(request.sampling, info.vocab_size)
    asked = _given(request, "max_tokens")
    limit = AnswerLimit(asked, scores_prompt=prompt_logprobs is not None)
    grammar = request.grammar if request.HasField("grammar") else None
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
        grammar=wire_settings.grammar_from_proto(grammar),
        prediction=prompt.prediction[: info.context_length],
        prompt_logprobs=prompt_logprobs,
    )
    grammar_field = f"grammar.{request.grammar.WhichOneof('kind')}"
    return TextRequest(tokens, asked, stop, grammar_field=grammar_field)


_Counts = Literal["max_tokens", "top_logprob_count", "prompt_logprob_count"]


def _given(request: generation_pb2.GenerateTextRequest, name: _Counts) -> int | None:
    """The value of an optional field; None if the request does not set it."""
    if not request.HasField(name):
        return None
    value: int = getattr(request, name)
    return value


def _response(delta: TextDelta) -> generation_pb2.GenerateTextResponse:
    response = generation_pb2.GenerateTextResponse(
        text=delta.text,
        token_ids=delta.token_ids,
        sources=[proto_enum(source) for source in delta.sources],
        drafter_id=delta.drafter_id,
        logprobs=map(wire_requests.logprob_to_proto, delta.logprobs),
        prompt_logprobs=map(wire_requests.logprob_to_proto, delta.prompt_logprobs),
    )
    finish = delta.finish
    if finish is not None:
        response.finish_reason = proto_enum(finish.reason)
        response.usage.prompt_token_count = finish.prompt_token_count
        response.usage.completion_token_count = finish.completion_token_count
        response.usage.cached_token_count = finish.cached_token_count
        response.usage.resumed_count = finish.resumed_count
        response.stats.CopyFrom(wire_requests.stats_to_proto(finish.stats))
    return response
