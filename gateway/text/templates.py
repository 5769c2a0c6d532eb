"""Renders a model's chat templates in worker processes, within limits of time and memory."""

from __future__ import annotations

import asyncio
import json
import queue
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from gateway.text.template_worker import HANDLER
from outrider.errors import OutriderError, Reason, invalid
from outrider.process.workers.pool import Worker, WorkerError, WorkerLost, WorkerSource
from outrider.process.workers.tenant_threads import TenantThreads

DEFAULT = "default"
"""The name of a model's template, if it has only one."""
TOOL_USE = "tool_use"
"""The name of the template for requests with tools, as in `transformers`."""
# The limits of one rendering. The bundled template takes 0.1 ms for a few messages, and 2 ms
# for 64 messages.
_SECONDS = 2.0
_MEMORY_BYTES = 256 * 2**20
# A tenant uses at most one worker at a time. Tenants whose conversations make the template hang
# share half of the workers.
_WORKER_COUNT = 4
_SPARE_WORKERS = 2


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template expects the calls of earlier answers.

    The arguments are an object or its JSON text. If a message with calls has no content, its
    content is an empty text or null: the first templates of DeepSeek show calls only beside null.
    """

    has_text_arguments: bool = False
    has_null_content: bool = False

    def shaped(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with their calls in this form."""
        return [self._shaped(message) for message in messages]

    def _shaped(self, message: Mapping[str, Any]) -> dict[str, Any]:
        given = message.get("tool_calls")
        if not given:
            return dict(message)
        calls = [
            {**call, "function": {**call["function"], "arguments": self._arguments(call)}}
            for call in given
        ]
        nothing = None if self.has_null_content else ""
        return {**message, "tool_calls": calls, "content": message.get("content") or nothing}

    def _arguments(self, call: Mapping[str, Any]) -> object:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) == self.has_text_arguments:
            return arguments
        if self.has_text_arguments:
            return json.dumps(arguments, ensure_ascii=False)
        return json.loads(arguments)


# The gateway uses the first form in which a template shows a call.
_FORMS = (
    CallForm(),
    CallForm(has_text_arguments=True),
    CallForm(has_null_content=True),
    CallForm(has_text_arguments=True, has_null_content=True),
)
_NEEDLE = "outrider_probe"
# Mistral's templates take only ids of nine characters, which are letters or digits.
_PROBE_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look_up", "arguments": {_NEEDLE: "value"}},
}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a value.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "Its key."}},
            "required": ["key"],
        },
    },
}
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "name": "look_up", "tool_call_id": "call00001", "content": "1"},
]


class ChatTemplate:
    """Renders a model's templates for any number of callers; tenants take turns."""

    def __init__(
        self, model: str, sources: Mapping[str, str], special_tokens: Mapping[str, str]
    ) -> None:
        """Compile the templates, keyed by name, and find out in which form they expect calls.

        Raises OutriderError if a template does not parse or exceeds a limit.
        """
        self._model = model
        self._sources = sources
        arguments: dict[str, object] = {"sources": dict(sources)}
        source_of_workers = WorkerSource(HANDLER, arguments, memory_bytes=_MEMORY_BYTES)
        self._workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(_WORKER_COUNT):
            self._workers.put(Worker(source_of_workers))
        self._threads = TenantThreads(_WORKER_COUNT, "chat-template", each=1, spare=_SPARE_WORKERS)
        weakref.finalize(self, self._threads.close)
        for name in sources:
            answer = self._call(name, None, "tokenizer")
            if "error" in answer:
                problem = f"its chat template does not parse: {answer['error']}"
                raise invalid("tokenizer", f"{model}: {problem}")
        self._forms = {name: self._find_form(name, special_tokens) for name in sources}

    def render_blocking(self, variables: Mapping[str, Any], field: str) -> str:
        """Return the text for these variables, which JSON can hold.

        Raises OutriderError(INVALID_VALUE) that names `field`: with the template's message if it
        refuses the variables, and with the limit if it takes too long or too much memory. Raises
        NOT_READY if two workers were killed.
        """
        name = TOOL_USE if variables["tools"] and TOOL_USE in self._sources else DEFAULT
        if name not in self._sources:
            names = ", ".join(self._sources)
            raise invalid(field, f"needs the chat template {name}; the model only has {names}")
        shaped = self._forms[name].shaped(variables["messages"])
        answer = self._call(name, {**variables, "messages": shaped}, field)
        if "error" in answer:
            raise invalid(field, f"were refused by the model's chat template: {answer['error']}")
        return str(answer["text"])

    async def render(self, variables: Mapping[str, Any], field: str, tenant: str) -> str:
        """Do `render_blocking` off the event loop, when it is the tenant's turn."""
        work = self._threads.submit(tenant, partial(self.render_blocking, variables, field))
        return await asyncio.wrap_future(work)

    def _find_form(self, name: str, special_tokens: Mapping[str, str]) -> CallForm:
        """Return the first form of a call in which the template renders the arguments as JSON.

        If there is no such form, return the first form.
        """
        variables = {
            **special_tokens,
            "tools": [_PROBE_TOOL],
            "documents": None,
            "add_generation_prompt": False,
        }
        forms = _FORMS if "tool_calls" in self._sources[name] else ()
        # Some templates refuse the result of a tool, and others a call without a result.
        for form, length in product(forms, (3, 2)):
            messages = form.shaped(_PROBE[:length])
            try:
                answer = self._call(name, {**variables, "messages": messages}, "tokenizer")
            except OutriderError:
                # A template may hang only on calls. With such a template, each request with calls
                # is refused.
                break
            shown = str(answer.get("text", ""))
            if _NEEDLE in shown and f"'{_NEEDLE}':" not in shown:
                return form
        return _FORMS[0]

    def _call(self, name: str, variables: Mapping[str, Any] | None, field: str) -> dict[str, Any]:
        request = json.dumps([name, variables]).encode()
        own = self._workers.get()
        try:
            answer: dict[str, Any] = json.loads(own.call(request, _SECONDS))
        except WorkerLost as cause:
            message = f"{field}: not rendered, because the chat template of {self._model} {cause}"
            raise OutriderError(Reason.NOT_READY, message, field) from cause
        except WorkerError as cause:
            problem = f"cannot be rendered: the chat template of {self._model} {cause}"
            raise invalid(field, problem) from cause
        finally:
            self._workers.put(own)
        return answer
