"""Makes the output items of the Responses API's answers, and the events in which they grow."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.tools.reader import CallBegin, Content, Part, Reasoning

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of item.

    It has the prefix of the item's id, the name of the events of its text, and the type of its
    part ("" for an item without parts).
    """

    prefix: str
    events: str
    part: str = ""

    @property
    def text_name(self) -> str:
        """The name of the field in which the text's last event has the whole text."""
        return "text" if self.part else "arguments"


_MESSAGE = _Kind("msg", "response.output_text", "output_text")
_THOUGHT = _Kind("rs", "response.reasoning_text", "reasoning_text")
_CALL = _Kind("fc", "response.function_call_arguments")
_KINDS = {"message": _MESSAGE, "reasoning": _THOUGHT, "function_call": _CALL}


_NOTHING_YET: Json = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
"""The fields that are null until a response is complete."""


class OutputItems:
    """Turns the parts of an answer into items. Its methods return the events, in order.

    `namespaced` maps the name by which the model knows a function to the function's namespace and
    its name there.
    """

    def __init__(self, namespaced: Mapping[str, tuple[str, str]]) -> None:
        self.items: list[Json] = []
        """The items that are complete."""
        self.deltas: list[list[int]] = []
        """The lengths of the deltas of each complete item's text, in characters."""
        self._namespaced = namespaced
        self._kind: _Kind | None = None
        self._item: Json = {}
        self._texts: list[str] = []

    def add(self, part: Part) -> list[Json]:
        """Return the events of the answer's next part."""
        if isinstance(part, CallBegin):
            return [*self.end("completed"), *self._begin(_CALL, self._call(part))]
        if not part.text:
            return []
        made: list[Json] = []
        if isinstance(part, Content | Reasoning):
            kind = _MESSAGE if isinstance(part, Content) else _THOUGHT
            if kind is not self._kind:
                made = [*self.end("completed"), *self._begin(kind, _empty(kind))]
        return [*made, self._delta(part.text)]

    def again(self, item: Json, deltas: Sequence[int]) -> list[Json]:
        """Return all events of a complete item again, with text deltas of these lengths."""
        kind = _KINDS[item["type"]]
        text = item["content"][0]["text"] if kind.part else item["arguments"]
        empty: Json = {"content": []} if kind.part else {"arguments": ""}
        made = self._begin(kind, item | empty | {"status": "in_progress"})
        at = 0
        for length in deltas:
            made.append(self._delta(text[at : at + length]))
            at += length
        return [*made, *self.end(item["status"])]

    def end(self, status: Status) -> list[Json]:
        """Return the events that end the item in progress, if any, with this status."""
        if self._kind is None:
            return []
        kind, text = self._kind, "".join(self._texts)
        done = self._event("done", **{kind.text_name: text})
        made = [done]
        if kind.part:
            part = _part(kind, text)
            made.append(self._part_event("done", part))
            self._item = self._item | {"content": [part]}
        else:
            done["name"] = self._item["name"]
            self._item = self._item | {"arguments": text}
        self._item = self._item | {"status": status}
        made.append(self._item_event("done"))
        self.items.append(self._item)
        self.deltas.append([len(text) for text in self._texts])
        self._kind = None
        return made

    def end_all(self, status: Status) -> list[Json]:
        """Return the events that end the output.

        A complete answer holds at least a message, perhaps an empty one, or a call.
        """
        made = self.end(status)
        if status == "completed" and all(item["type"] == "reasoning" for item in self.items):
            made += self._begin(_MESSAGE, _empty(_MESSAGE))
            made += self.end(status)
        return made

    def _begin(self, kind: _Kind, item: Json) -> list[Json]:
        self._kind = kind
        self._texts = []
        self._item = {"id": f"{kind.prefix}_{secrets.token_hex(24)}", **item}
        made = [self._item_event("added")]
        if kind.part:
            made.append(self._part_event("added", _part(kind, "")))
        return made

    def _call(self, begin: CallBegin) -> Json:
        namespace, name = self._namespaced.get(begin.name, (None, begin.name))
        call = {
            "type": "function_call",
            "status": "in_progress",
            "call_id": begin.call_id,
            "name": name,
            "arguments": "",
        }
        return call if namespace is None else call | {"namespace": namespace}

    def _delta(self, text: str) -> Json:
        self._texts.append(text)
        return self._event("delta", delta=text)

    def _event(self, name: str, **content: Any) -> Json:
        """Return an event of the item's text."""
        assert self._kind is not None
        logprobs: Json = {"logprobs": []} if self._kind is _MESSAGE else {}
        return {"type": f"{self._kind.events}.{name}", **self._place(), **content, **logprobs}

    def _part_event(self, name: str, part: Json) -> Json:
        return {"type": f"response.content_part.{name}", **self._place(), "part": part}

    def _item_event(self, name: str) -> Json:
        place = {"output_index": len(self.items)}
        return {"type": f"response.output_item.{name}", **place, "item": self._item}

    def _place(self) -> Json:
        assert self._kind is not None
        place = {"item_id": self._item["id"], "output_index": len(self.items)}
        return place | {"content_index": 0} if self._kind.part else place


def replayed(response: Json, deltas: Sequence[Sequence[int]]) -> Iterator[Json]:
    """Yield the events of a kept response's stream, without their numbers.

    `deltas` has the lengths of the deltas of each item of the output.
    """
    begun = response | {"status": "in_progress", "output": [], **_NOTHING_YET}
    for name in ("speculation", "metrics"):
        begun.pop(name, None)
    for name in ("created", "in_progress"):
        yield {"type": f"response.{name}", "response": begun}
    output = OutputItems({})
    for item, lengths in zip(response["output"], deltas, strict=True):
        yield from output.again(item, lengths)
    yield {"type": f"response.{response['status']}", "response": response}


def _empty(kind: _Kind) -> Json:
    if kind is _MESSAGE:
        return {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
    return {"type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def _part(kind: _Kind, text: str) -> Json:
    if kind is _MESSAGE:
        return {"type": kind.part, "text": text, "annotations": [], "logprobs": []}
    return {"type": kind.part, "text": text}
