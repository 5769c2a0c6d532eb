"""Writes the Responses API's answers: one response, or the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gateway.api_errors import error_body
from gateway.generation.serve_text import TextAnswer
from gateway.http.openai.error_fields import renamed
from gateway.http.responses.body import ResponsesBody
from gateway.http.responses.output import Json, OutputItems, Status
from gateway.http.streaming import event
from gateway.text.choices import WholeChoice
from gateway.text.deltas import TextDelta
from outrider.errors import OutriderError
from outrider.protocol.messages import FinishReason


class ResponseWriter:
    """An `AnswerWriter` for the Responses API."""

    def __init__(
        self,
        body: ResponsesBody,
        answer: TextAnswer,
        answer_id: str,
        keep: Callable[[Json, Sequence[Sequence[int]]], None],
        *,
        metrics: bool,
    ) -> None:
        """`keep` is called with the complete response before the client gets the response.

        The second argument of `keep` has the lengths of the deltas of each item's text.
        """
        self._body = body
        self._totals = answer.totals
        self._has_metrics = metrics
        self._keep = keep
        self._output = OutputItems(body.tools.namespaced)
        self._sequence_number = 0
        self._response: Json = {
            "id": answer_id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "model": answer.model,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **body.shown(),
        }
        self.is_complete = False

    def whole(self, choices: list[WholeChoice]) -> Json:
        """Return the answer to a request that does not stream."""
        for part in choices[0].parts:
            self._output.add(part)
        self._output.end_all(self._status())
        return self._finished()

    def events(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of the answer's next delta."""
        made: list[Json] = []
        if self._sequence_number == 0:
            made += [self._event(name) for name in ("created", "in_progress")]
        for part in delta.all_parts:
            made += self._output.add(part)
        if delta.finish is not None:
            status = self._status()
            made += self._output.end_all(status)
            self._finished()
            self.is_complete = True
            made.append(self._event(status))
        return self._written(made)

    def failure(self, error: OutriderError) -> bytes:
        """Return an error event with our code, and the response with OpenAI's nearest code."""
        error = renamed(error, self._body.names)
        limited = error.reason.kind.http == 429
        code = "rate_limit_exceeded" if limited else "server_error"
        self._response |= {
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "output": self._output.items,
        }
        told = error_body(error)
        shown: Json = told["error"]
        # OpenAI's clients read the flat fields. Clients of Open Responses read the object `error`.
        flat = {name: shown[name] for name in ("code", "message", "param")}
        return self._written([{"type": "error", **flat, **told}, self._event("failed")])

    def _status(self) -> Status:
        finish = self._totals.finishes[0]
        cut = finish is not None and finish.reason is FinishReason.LENGTH
        return "incomplete" if cut else "completed"

    def _finished(self) -> Json:
        """Complete the response with its output and usage, and give it to `keep`."""
        status = self._status()
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        self._response |= {
            "status": status,
            "completed_at": int(time.time()),
            "incomplete_details": details,
            "output": self._output.items,
            "usage": _usage(self._totals.usage()),
            **self._totals.speculation(),
        }
        if self._has_metrics:
            self._response["metrics"] = self._totals.metrics()
        self._keep(self._response, self._output.deltas)
        return self._response

    def _event(self, name: str) -> Json:
        return {"type": f"response.{name}", "response": dict(self._response)}

    def _written(self, events: Sequence[Json]) -> bytes:
        out = []
        for made in events:
            numbered = {**made, "sequence_number": self._sequence_number}
            out.append(event(numbered, made["type"]))
            self._sequence_number += 1
        return b"".join(out)


def _usage(chats: Json) -> Json:
    """Return a chat's usage under the Responses API's names.

    A thought's tokens have no separate count.
    """
    return {
        "input_tokens": chats["prompt_tokens"],
        "input_tokens_details": {**chats["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": chats["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **chats["completion_tokens_details"]},
        "total_tokens": chats["total_tokens"],
    }
