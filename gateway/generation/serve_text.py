"""Serves a request for text, in the same way over HTTP and gRPC."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from gateway.access.gate import Identity
from gateway.access_log import Access
from gateway.generation.admission import ClientTimeout
from gateway.generation.generate import Generation
from gateway.generation.request_span import begin, describe, describe_settings
from gateway.text.choices import Event, UsageTotals
from gateway.text.request import (
    AnswerLimit,
    Caller,
    Conversation,
    Prompt,
    PromptInput,
    TextInputs,
    TextRequest,
)
from gateway.upstream.prefixes import prefixes
from outrider.errors import OutriderError, Reason
from outrider.process.observability.telemetry import Span
from outrider.protocol.model_info import ModelInfo
from outrider.protocol.unsupported import check_supported

# The number of characters of a prompt's end that are kept, to find the mark of a thought there. The
# mark and the blanks after it are shorter.
_END_CHARACTERS = 128


class Demand(NamedTuple):
    """The number of sequences that a request asks for, and the time that its caller waits."""

    prompt_count: int
    n: int
    """The number of choices for each prompt."""
    timeout: ClientTimeout


class TextCall(ABC):
    """One request for text, as an API's message states it.

    `serve_text` calls the methods in the order in which they are declared here. `demand`, `prompts`
    and `build` each check a part of the message, so a refused request costs no later work.
    """

    identity: Identity
    access: Access
    headers: Mapping[str, str]
    """The caller's headers, with names in lower case; they may name the caller's trace."""
    model: str | None
    """The model that the caller names; None or "" for any."""
    operation: str
    """OpenTelemetry's name of the operation."""
    streams: bool
    limit: AnswerLimit
    has_slot: bool
    """True if the request already holds a slot of `preparing`, which it took to parse the body."""
    prediction: str = ""
    """The answer that the caller expects."""

    @property
    def request_id(self) -> str:
        """The id of the answer."""
        return self.access.request_id

    @abstractmethod
    def demand(self) -> Demand:
        """Return how many sequences the request needs, and how long its caller waits.

        Raises OutriderError(INVALID_VALUE).
        """

    @abstractmethod
    def release_slots(self) -> None:
        """Release the slots that the request may have held since its arrival."""

    @abstractmethod
    def responding(self, span: Span) -> AbstractContextManager[None]:
        """Write the protocol's attributes to a span, and the status with which the block ends."""

    @abstractmethod
    def prompts(self) -> list[PromptInput]:
        """Return the prompts to encode.

        Raises OutriderError(INVALID_VALUE) that names the field.
        """

    @abstractmethod
    def build(self, inputs: TextInputs, info: ModelInfo) -> Sequence[TextRequest]:
        """Build the sequences for a replica's model. Raises OutriderError with field and limit."""


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """An answer in progress. Before `events` yields an event, `totals` and `span` include it."""

    model: str
    prompts: list[Prompt]
    events: AsyncGenerator[Event, None]
    totals: UsageTotals
    span: Span

    @property
    def prompt_lengths(self) -> list[int]:
        """Each choice's number of prompt tokens."""
        n = len(self.totals.finishes) // len(self.prompts)
        return [len(prompt.token_ids) for prompt in self.prompts for _ in range(n)]


@asynccontextmanager
async def serve_text(generation: Generation, call: TextCall) -> AsyncIterator[TextAnswer]:
    """Serve a request during the block, which reads the answer's events.

    The block's end cancels sequences that still run, ends the request's span and releases its
    slots. Raises OutriderError for a request that is refused. If the generation fails, reading the
    events raises the error.
    """
    tenant = call.identity.tenant
    model, info = generation.router.lookup(call.model)
    prompt_count, n, timeout = call.demand()
    # AdmissionMiddleware may have counted a request over HTTP as one sequence. From here on,
    # `admitted` counts each of the request's sequences instead.
    call.release_slots()
    admitted = generation.admission.admit(model, tenant, prompt_count * n, timeout)
    span = begin(call.headers, model, call.operation, n, stream=call.streams)
    access = call.access
    access.model = model
    access.traceparent = span.traceparent
    slots = generation.key_slots.held(call.identity.key, prompt_count * n)
    with admitted, span, call.responding(span), slots:
        async with nullcontext() if call.has_slot else generation.preparing.held(tenant):
            prompts = await _encoded(generation, call, info)
        access.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        caller = Caller(call.request_id, span.traceparent, tenant)
        has_choice = len(generation.router.replicas) > 1
        beginnings = prefixes(tenant, prompts[0].token_ids) if has_choice else []
        inputs = TextInputs(prompts, n, call.limit, caller, generation.prompts.answers)

        def build(info: ModelInfo) -> Sequence[TextRequest]:
            """Return the sequences for a replica's model. Raises OutriderError."""
            requests = call.build(inputs, info)
            for request in requests:
                check_supported(request.tokens, info.unsupported, request.grammar_field)
            describe_settings(span, requests[0])
            return requests

        generated = generation.generate(model, call.operation, build, admitted, beginnings)
        totals = UsageTotals(prompt_count, n)
        async with aclosing(_described(generated, totals, span, access)) as events:
            yield TextAnswer(model, prompts, events, totals, span)


async def _described(
    events: AsyncGenerator[Event, None], totals: UsageTotals, span: Span, access: Access
) -> AsyncGenerator[Event, None]:
    """Yield the events; write usage and outcome to the span and the access line."""
    try:
        async with aclosing(events):
            async for index, delta in events:
                access.completion_tokens += len(delta.token_ids)
                if delta.finish is not None:
                    totals.finishes[index] = delta.finish
                    if totals.complete:
                        describe(span, access, totals)
                yield index, delta
    except OutriderError as error:
        access.error = error.reason.name.lower()
        raise
    except (GeneratorExit, asyncio.CancelledError):
        if not totals.complete:
            access.error = Reason.CLIENT_GONE.name.lower()
        raise


async def _encoded(generation: Generation, call: TextCall, info: ModelInfo) -> list[Prompt]:
    """Return the request's prompts as ids. Raises OutriderError that names the field."""
    prompts = generation.prompts
    most = info.context_length
    prediction = await prompts.encode_start(call.prediction, most) if call.prediction else []
    encoded = []
    for given in call.prompts():
        # Let other tasks run: tokenising a prompt takes the event loop up to 2 ms, and a request
        # may have 64 prompts.
        await asyncio.sleep(0)
        content, name = given.content, given.field_name
        echo = None
        end = ""
        calls = 0
        if isinstance(content, Conversation):
            tenant = call.identity.tenant
            text = await prompts.render(content.messages, name, most, tenant, **content.rendering)
            ids = await prompts.encode(text, name, most, add_special_tokens=False)
            end = text[-_END_CHARACTERS:]
            calls = sum(len(message.get("tool_calls") or ()) for message in content.messages)
        else:
            ids = content if isinstance(content, list) else []
            if isinstance(content, str):
                special = given.adds_special_tokens
                ids = await prompts.encode(content, name, most, add_special_tokens=special)
            echo = generation.echo(content, info) if given.echoes else None
        encoded.append(Prompt(ids, name, echo, prediction, end, calls))
    return encoded
