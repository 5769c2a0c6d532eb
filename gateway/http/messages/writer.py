"""Writes answers in the shape of Anthropic's Messages: one object, or a stream of events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.api_errors import messages_error
from gateway.generation.serve_text import TextAnswer
from gateway.http.messages.body import NAMES
from gateway.http.openai.conversation import read_arguments
from gateway.http.openai.error_fields import renamed
from gateway.http.streaming import event
from gateway.text.choices import WholeChoice
from gateway.text.deltas import FinishInfo, TextDelta
from gateway.tools.reader import CallArguments, CallBegin, Content, Part
from outrider.errors import OutriderError
from outrider.protocol.messages import FinishReason

Json = dict[str, Any]
_SIGNATURE = "unsigned"
"""The signature of every thought. Clients send back only thoughts that have a signature."""


class MessagesWriter:
    """An `AnswerWriter` for the one choice of a message."""

    def __init__(
        self, answer: TextAnswer, message_id: str, max_tokens: int, *, metrics: bool
    ) -> None:
        self._answer = answer
        self._id = message_id
        self._max_tokens = max_tokens
        self._has_metrics = metrics
        self._began = False
        # The type of the open block ("" if none is open), and the number of blocks that have ended.
        self._open = ""
        self._index = 0
        self.is_complete = False
        """True once the last event of the stream has been returned."""

    def whole(self, choices: list[WholeChoice]) -> Json:
        """Return the answer to a request that does not stream."""
        events = [made for part in choices[0].parts for made in self._part(part)]
        finish = self._answer.totals.finishes[0]
        assert finish is not None
        ended = self._stop(finish) | {"usage": _usage(finish)}
        return self._message(_joined([*events, *self._close()])) | ended | self._speculation()

    def events(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of the next delta."""
        made: list[Json] = []
        if not self._began:
            self._began = True
            made += [{"type": "message_start", "message": self._message([])}, {"type": "ping"}]
        for part in delta.all_parts:
            made += self._part(part)
        if delta.finish is not None:
            made += self._close()
            made.append(self._end(delta.finish))
            made.append({"type": "message_stop"})
            self.is_complete = True
        return b"".join([event(each, each["type"]) for each in made])

    def failure(self, error: OutriderError) -> bytes:
        """Return the error in Anthropic's shape."""
        return event(messages_error(renamed(error, NAMES), self._id), "error")

    def _message(self, content: list[Json]) -> Json:
        prompt = self._answer.prompt_lengths[0]
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _tokens(prompt, 0, 0),
        }

    def _part(self, part: Part) -> list[Json]:
        """Return the events of a part of the answer.

        The part continues the open block or begins the next block.
        """
        if isinstance(part, CallArguments):
            return [self._delta("input_json_delta", partial_json=part.text)]
        if isinstance(part, CallBegin):
            call = {"id": part.call_id, "name": part.name, "input": {}}
            return self._begin({"type": "tool_use", **call})
        if isinstance(part, Content):
            begun = [] if self._open == "text" else self._begin({"type": "text", "text": ""})
            return [*begun, self._delta("text_delta", text=part.text)]
        thought = {"type": "thinking", "thinking": "", "signature": ""}
        begun = [] if self._open == "thinking" else self._begin(thought)
        return [*begun, self._delta("thinking_delta", thinking=part.text)]

    def _begin(self, block: Json) -> list[Json]:
        ended = self._close()
        self._open = block["type"]
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*ended, start]

    def _delta(self, kind: str, **content: str) -> Json:
        delta = {"type": kind, **content}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Json]:
        """Return the events that end the open block, if there is one."""
        if not self._open:
            return []
        stop: Json = {"type": "content_block_stop", "index": self._index}
        signed = [self._delta("signature_delta", signature=_SIGNATURE)]
        ended = [*(signed if self._open == "thinking" else []), stop]
        self._open = ""
        self._index += 1
        return ended

    def _end(self, finish: FinishInfo) -> Json:
        made: Json = {"type": "message_delta", "delta": self._stop(finish)}
        return made | {"usage": _usage(finish)} | self._speculation()

    def _stop(self, finish: FinishInfo) -> Json:
        """Return the fields that say why the answer ended."""
        reason = "end_turn"
        if finish.stop:
            reason = "stop_sequence"
        elif finish.reason is FinishReason.LENGTH:
            reached = finish.completion_token_count >= self._max_tokens
            reason = "max_tokens" if reached else "model_context_window_exceeded"
        elif finish.call_count:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": finish.stop or None}

    def _speculation(self) -> Json:
        """Return the acceptance rules, as in a chat's answer, and the metrics if requested."""
        totals = self._answer.totals
        metrics = {"metrics": totals.metrics()} if self._has_metrics else {}
        return totals.speculation() | metrics


def _joined(events: Iterable[Json]) -> list[Json]:
    """Return the content blocks that the events of a stream write.

    The input of a call that `max_tokens` cut off has only the complete values. The input is empty
    if the verifier's text broke the grammar.
    """
    content: list[Json] = []
    arguments = ""
    for each in events:
        match each:
            case {"content_block": block}:
                content.append(dict(block))
                arguments = ""
            case {"delta": {"partial_json": piece}}:
                arguments += piece
            case {"delta": delta}:
                for name in delta.keys() - {"type"}:
                    content[-1][name] += delta[name]
            case {"type": "content_block_stop"} if content[-1]["type"] == "tool_use":
                found = read_arguments(arguments)
                content[-1]["input"] = {} if found is None else found.values
    return content


def _usage(finish: FinishInfo) -> Json:
    cached = finish.cached_token_count
    return _tokens(finish.prompt_token_count - cached, cached, finish.completion_token_count)


def _tokens(read: int, cached: int, written: int) -> Json:
    """Return Anthropic's usage object.

    The prompt has `read` + `cached` tokens.
    """
    return {
        "input_tokens": read,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
    }
