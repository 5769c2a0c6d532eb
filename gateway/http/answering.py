"""Answers a request for text in an API's shape, as one JSON object or as a stream of events."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from fastapi.responses import Response

from gateway.generation.generate import Generation
from gateway.generation.serve_text import serve_text
from gateway.http.disconnects import (
    cancel_and_wait,
    until_begun_or_disconnected,
    until_done_or_disconnected,
)
from gateway.http.endpoints import most_tokens, naming_limit
from gateway.http.ingress.admission import admitted_request
from gateway.http.long_json import written
from gateway.http.openai.calls import HttpCall
from gateway.http.openai.schema import ChatBody
from gateway.http.streaming import EventStream, ping_seconds, sse
from gateway.text.choices import collect


async def answer_text(generation: Generation, call: HttpCall[Any]) -> Response:
    """Answer with one JSON object, or with a stream that closes the generation when it ends."""
    async with AsyncExitStack() as stack:
        answer = await stack.enter_async_context(serve_text(generation, call))
        admitted_request(call.request).end()
        writer = call.writer(answer)
        if not call.streams:
            collected = collect(answer.events, len(answer.totals.finishes))
            choices = await until_done_or_disconnected(call.request, collected)
            content = await written(writer.whole(choices))
            return Response(content, media_type="application/json")
        # Await the first delta before the status line goes out, so that a refused request gets the
        # status of its error; but stop waiting before a proxy ends the request.
        first = asyncio.ensure_future(anext(answer.events))
        stack.push_async_callback(cancel_and_wait, first)
        most_s = ping_seconds(call.request.scope)
        await until_begun_or_disconnected(call.request, first, most_s)
        events = sse(first, answer.events, writer, answer.span)
        return EventStream(events, stack.pop_all())


async def count_prompt(generation: Generation, chat: ChatBody, tenant: str) -> int:
    """Return the number of tokens in a chat's prompt.

    Raises OutriderError that names a field of `chat`.
    """
    _, info = generation.router.lookup(chat.model)
    most = most_tokens(info)
    messages = [message.for_template() for message in chat.messages]
    prompts = generation.prompts
    with naming_limit("messages", most):
        text = await prompts.render(messages, "messages", most, tenant, **chat.rendering())
        return len(await prompts.encode(text, "messages", most, add_special_tokens=False))
