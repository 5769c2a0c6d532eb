"""A model's chat template, rendered in worker processes within a time and a memory limit."""

from __future__ import annotations

import asyncio
import json
import queue
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from gateway.text.template_worker import HANDLER
from outrider.errors import OutriderError, Reason, invalid
from outrider.process.tenant_threads import TenantThreads
from outrider.process.workers import Worker, WorkerError, WorkerLost, WorkerSource

# The bundled template takes 0.1 ms, and 2 ms for 64 messages.
_SECONDS = 2.0
_MEMORY_BYTES = 256 * 2**20
# A tenant whose conversations make the template hang never has all workers, nor have all such
# tenants together.
_WORKER_COUNT = 4
_SPARE_WORKERS = 2


class ChatTemplate:
    """Renders one template for any number of callers; tenants take turns."""

    def __init__(self, model: str, source: str) -> None:
        """Compile the template; raises OutriderError if it does not parse or exceeds a limit."""
        self._model = model
        self.source = source
        source_of_workers = WorkerSource(HANDLER, {"source": source}, memory_bytes=_MEMORY_BYTES)
        self._workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(_WORKER_COUNT):
            self._workers.put(Worker(source_of_workers))
        self._threads = TenantThreads(_WORKER_COUNT, "chat-template", spare=_SPARE_WORKERS)
        weakref.finalize(self, self._threads.close)
        answer = self._call(None, "tokenizer")
        if "error" in answer:
            problem = f"its chat template does not parse: {answer['error']}"
            raise invalid("tokenizer", f"{model}: {problem}")

    def render_blocking(self, variables: Mapping[str, Any], field: str) -> str:
        """The text for these variables, which JSON can hold.

        Raises OutriderError(INVALID_VALUE) that names `field`: with the template's own message if
        it refuses the variables, and with the limit if it takes too long or too much memory.
        NOT_READY if two workers were killed.
        """
        answer = self._call(variables, field)
        if "error" in answer:
            raise invalid(field, f"were refused by the model's chat template: {answer['error']}")
        return str(answer["text"])

    async def render(self, variables: Mapping[str, Any], field: str, tenant: str) -> str:
        """`render_blocking` off the event loop, when it is the tenant's turn."""
        work = self._threads.submit(tenant, partial(self.render_blocking, variables, field))
        return await asyncio.wrap_future(work)

    def _call(self, variables: Mapping[str, Any] | None, field: str) -> dict[str, Any]:
        request = json.dumps(variables).encode()
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
