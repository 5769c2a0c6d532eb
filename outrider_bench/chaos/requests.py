"""The requests of a campaign, and the parts of a stream that a client received.

This module opens no sockets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_LENGTHS = (100, 16, 48, 24, 32)
"""For each prompt, the maximum number of tokens of its answer.

Long answers are still under way when a fault comes; short answers end soon.
"""
_PROMPTS = (
    "def read(path):\n    ",
    "import os\n\nclass Cache:\n    def get(self, key):\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [",
    "# The parser\n",
)
_PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1}
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "seeded": {"temperature": 1, "ignore_eos": True},
    "truncated": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "ignore_eos": True},
    "grammar": {
        "temperature": 1,
        "structured_outputs": {"regex": "[a-z]{3,9}( = [0-9]{1,4}, [a-z]{1,9}){9,30}"},
    },
    "greedy grammar": {"temperature": 0, "response_format": {"type": "json_object"}},
    "logprobs": {"temperature": 1, "logprobs": 3, "ignore_eos": True},
    "penalties": {"temperature": 1, "ignore_eos": True, **_PENALTIES},
    "greedy penalties": {"temperature": 0, "ignore_eos": True, **_PENALTIES},
    "n=2": {"temperature": 1, "n": 2, "ignore_eos": True},
    "stop": {"temperature": 1, "stop": ["return", "\n\n\n", "=="]},
}
COUNT = len(_KINDS) * len(_PROMPTS)
"""The number of different requests. At each token of their answers, the best candidate leads by
more than float32 rounding, so the texts do not depend on the batch."""


def kind_of(number: int) -> str:
    """Return the kind of the request with this number; the kinds repeat in turn."""
    return list(_KINDS)[number % len(_KINDS)]


def body(number: int) -> dict[str, Any]:
    """Return the JSON of a request for a streamed completion."""
    number %= COUNT
    kind = _KINDS[kind_of(number)]
    place = number // len(_KINDS)
    common = {
        "prompt": _PROMPTS[place],
        "seed": (number + 1) * 7919,
        "max_tokens": _LENGTHS[place] // kind.get("n", 1),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return common | kind


@dataclass(slots=True)
class Choice:
    """The parts of one choice that a client received."""

    text: str = ""
    reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """The parts of one stream that a client received."""

    choices: dict[str, Choice] = field(default_factory=dict)
    """The choices, keyed by index."""
    usage: list[int] = field(default_factory=list)
    """The numbers of prompt and completion tokens."""
    code: str = ""
    """The code of the error that ended the stream."""
    is_done: bool = False
    problems: list[str] = field(default_factory=list)
    """Faults of the stream.

    They are: a line that is not JSON, anything after an end, an end with a part missing, and an
    error that has no code or that follows another error.
    """

    def add(self, line: str) -> None:
        """Add a line of the stream of events."""
        if not line.startswith("data: "):
            return
        if self.is_done:
            self.problems.append("the stream goes on after its end")
        if line == "data: [DONE]":
            self._end()
            return
        try:
            event = json.loads(line.removeprefix("data: "))
        except ValueError:
            self.problems.append(f"a line is not JSON: {line[:80]!r}")
            return
        if "error" in event:
            self.fail(event)
            return
        for part in event["choices"]:
            self._add_part(part)
        if usage := event.get("usage"):
            self.usage = [usage["prompt_tokens"], usage["completion_tokens"]]

    def fail(self, event: dict[str, Any]) -> None:
        """Add an error that came in the stream or in place of it."""
        if self.code:
            self.problems.append("the stream has two errors")
        self.code = str(event["error"].get("code") or "")
        if not self.code:
            self.problems.append(f"the error has no code: {event['error']}")

    def _add_part(self, part: dict[str, Any]) -> None:
        choice = self.choices.setdefault(str(part["index"]), Choice())
        if choice.reason is not None or self.code:
            self.problems.append(f"choice {part['index']} goes on after its end")
        choice.text += part["text"]
        choice.reason = part["finish_reason"]
        logprobs = part.get("logprobs") or {"tokens": [], "token_logprobs": []}
        choice.tokens += logprobs["tokens"]
        choice.logprobs += logprobs["token_logprobs"]

    def _end(self) -> None:
        self.is_done = True
        has_all = bool(self.choices and self.usage)
        if not self.code and not (has_all and all(c.reason for c in self.choices.values())):
            self.problems.append("the stream ends without the end of a choice, or without usage")
