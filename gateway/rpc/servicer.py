"""GenerationService: the same generation as over HTTP, with the protos' messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import cached_property
from typing import Any, Literal

import grpc

from gateway import access_log
from gateway.access.gate import Gate, Identity
from gateway.access.interceptor import text_metadata
from gateway.generation.admission import ClientTimeout
from gateway.generation.generate import Generation
from gateway.generation.serve_text import Demand, TextCall, serve_text
from gateway.http.ingress.json_size import MAX_VALUES
from gateway.rpc.chat_input import ChatInput, chat_input
from gateway.text.answers import with_calls_and_thought
from gateway.text.deltas import TextDelta
from gateway.text.request import (
    AnswerLimit,
    PromptInput,
    TextInputs,
    TextRequest,
    check_stop,
)
from gateway.tools.reader import CallArguments, CallBegin, Reasoning
from outrider.errors import OutriderError, invalid
from outrider.process.observability.telemetry import Span
from outrider.protocol.checks import check_logprobs
from outrider.protocol.messages import TokenRequest
from outrider.protocol.model_info import ModelInfo
from outrider.protocol.wire import requests as wire_requests
from outrider.protocol.wire import settings as wire_settings
from outrider.protocol.wire.known_fields import check_known_fields
from outrider.protocol.wire.settings import proto_enum
from outrider.v1 import generation_pb2, generation_pb2_grpc

MAX_MESSAGE_BYTES = 2 * 1024 * 1024
"""The largest request, in bytes. It is half of the largest JSON body, since a byte of a message
takes longer to parse and check than a byte of JSON."""
SERVICE = "outrider.v1.GenerationService"


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves GenerateText over gRPC. `answer` serves it for other protocols too."""

    def __init__(self, generation: Generation, gate: Gate) -> None:
        self._generation = generation
        self._gate = gate

    async def GenerateText(
        self,
        request: generation_pb2.GenerateTextRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[generation_pb2.GenerateTextResponse, None]:
        """Stream the text of one request."""
        headers = text_metadata(context.invocation_metadata())
        answer = self.answer(request, headers, context.time_remaining())
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response

    async def answer(
        self,
        request: generation_pb2.GenerateTextRequest,
        headers: Mapping[str, str],
        left_s: float | None,
    ) -> AsyncGenerator[generation_pb2.GenerateTextResponse, None]:
        """Yield the responses to one request. Raises OutriderError.

        The caller's `headers`, with names in lower case, name its tenant and its trace. The call's
        deadline is `left_s` seconds from now; None for no deadline.
        """
        identity = self._gate.identify(headers)
        access_log.current().tenant = identity.tenant
        check_known_fields(request)
        call = _Call(request, headers, identity, ClientTimeout(left_s))
        async with serve_text(self._generation, call) as answer:
            async for _, delta in answer.events:
                yield _response(delta)


class _Call(TextCall):
    """A request for text in the protos' messages."""

    streams = True
    has_slot = False

    def __init__(
        self,
        request: generation_pb2.GenerateTextRequest,
        headers: Mapping[str, str],
        identity: Identity,
        timeout: ClientTimeout,
    ) -> None:
        self._request = request
        self.headers = headers
        self.identity = identity
        self.access = access_log.current()
        self._timeout = timeout
        self.model = request.model
        self.operation = "chat" if request.HasField("chat") else "text_completion"
        scores_prompt = request.HasField("prompt_logprob_count")
        self.limit = AnswerLimit(_given(request, "max_tokens"), scores_prompt=scores_prompt)
        self.prediction = request.prediction

    @cached_property
    def _chat(self) -> ChatInput:
        return chat_input(self._request.chat)

    def demand(self) -> Demand:
        """Return the demand for one sequence, until the call's deadline."""
        return Demand(1, 1, self._timeout)

    def release_slots(self) -> None:
        """Do nothing: the call holds no slot before it is parsed."""

    @contextmanager
    def responding(self, span: Span) -> Iterator[None]:
        """Write OpenTelemetry's RPC attributes to a span, and the status of the block's end."""
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
        except Exception:  # the span gets a status; the error goes on to the caller
            status = "INTERNAL"
            raise
        finally:
            span.set(rpc__response__status_code=status)

    def prompts(self) -> list[PromptInput]:
        """Return the input of the request.

        Raises OutriderError(INVALID_VALUE) that names the field.
        """
        request = self._request
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid("input", "must be one of prompt, chat and tokens")
        if kind == "prompt":
            return [PromptInput(request.prompt)]
        if kind == "chat":
            return [PromptInput(self._chat.conversation, "chat.messages")]
        count = len(request.tokens.token_ids)
        if count > MAX_VALUES:
            raise invalid("tokens.token_ids", f"must hold at most {MAX_VALUES} ids, not {count}")
        return [PromptInput(list(request.tokens.token_ids), "tokens.token_ids")]

    def build(self, inputs: TextInputs, info: ModelInfo) -> list[TextRequest]:
        """Return the request as one sequence, checked against a model.

        Raises OutriderError that names field and limit.
        """
        request = self._request
        [prompt] = inputs.prompts
        caller, limit = inputs.caller, inputs.limit
        top_logprobs = _given(request, "top_logprob_count")
        check_logprobs("top_logprob_count", top_logprobs)
        prompt_logprobs = _given(request, "prompt_logprob_count")
        check_logprobs("prompt_logprob_count", prompt_logprobs)
        sampling = wire_settings.sampling_from_proto(request.sampling, info.vocab_size)
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
        built = TextRequest(tokens, limit.asked, stop, grammar_field=grammar_field)
        if request.HasField("chat"):
            built = with_calls_and_thought(built, self._chat.options, prompt, inputs.answers)
        return [built]


_Counts = Literal["max_tokens", "top_logprob_count", "prompt_logprob_count"]


def _given(request: generation_pb2.GenerateTextRequest, name: _Counts) -> int | None:
    """Return the value of an optional field; None if the request does not set it."""
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
    for part in delta.parts:
        if isinstance(part, Reasoning):
            response.reasoning += part.text
        elif isinstance(part, CallBegin):
            response.tool_calls.add(index=part.index, id=part.call_id, name=part.name)
        elif isinstance(part, CallArguments):
            response.tool_calls.add(index=part.index, arguments=part.text)
    if finish is not None:
        response.finish_reason = proto_enum(finish.reason)
        response.grammar_incomplete = finish.grammar_incomplete
        response.usage.prompt_token_count = finish.prompt_token_count
        response.usage.completion_token_count = finish.completion_token_count
        response.usage.cached_token_count = finish.cached_token_count
        response.usage.resumed_count = finish.resumed_count
        response.stats.CopyFrom(wire_requests.stats_to_proto(finish.stats))
    return response
