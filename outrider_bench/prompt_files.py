"""Reads own prompts from a file, in the formats that the field's data sets have on disk.

The keys of the first row tell the format. Nothing is downloaded, and nothing is tokenised here.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider_bench.yaml_file import first_problem


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(strict=True, frozen=True)

    role: str
    content: str


class Prompt(BaseModel):
    """A prompt: a `text` as it is, or the `chat` that the target's template renders."""

    model_config = ConfigDict(frozen=True)

    kind: str
    text: str = ""
    chat: tuple[Message, ...] = ()


class _Row(BaseModel):
    """A row of a format. Data sets have more fields than those that are read."""

    model_config = ConfigDict(strict=True, frozen=True)

    keys: ClassVar[frozenset[str]]
    """A row with these keys has this format, if it fits no earlier one of `_FORMATS`."""

    category: str = ""
    """Becomes the prompt's kind."""

    @abstractmethod
    def asked(self) -> str | list[Message] | None:
        """The text or chat; None if nobody asks anything in this row."""


class _Turns(_Row):
    """Spec-Bench and MT-Bench. Later turns need answers to the first, so they are not asked."""

    keys = frozenset({"turns"})
    turns: list[str] = Field(min_length=1)

    def asked(self) -> list[Message]:
        return [Message(role="user", content=self.turns[0])]


class _HumanEval(_Row):
    """The head of a function, to be continued."""

    keys = frozenset({"prompt", "entry_point"})
    prompt: str = Field(min_length=1)
    entry_point: str

    def asked(self) -> str:
        return self.prompt


class _Gsm8k(_Row):
    keys = frozenset({"question"})
    question: str = Field(min_length=1)

    def asked(self) -> list[Message]:
        return [Message(role="user", content=self.question)]


class _Said(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    speaker: str = Field(alias="from")
    value: str


class _ShareGpt(_Row):
    """The first question of a conversation. Some conversations of the data set have none."""

    keys = frozenset({"conversations"})
    conversations: list[_Said]

    def asked(self) -> list[Message] | None:
        said = [each.value for each in self.conversations if each.speaker in ("human", "user")]
        return [Message(role="user", content=said[0])] if said else None


class _Text(_Row):
    keys = frozenset({"prompt"})
    prompt: str = Field(min_length=1)

    def asked(self) -> str:
        return self.prompt


class _Chat(_Row):
    keys = frozenset({"messages"})
    messages: list[Message] = Field(min_length=1)

    def asked(self) -> list[Message]:
        return self.messages


_FORMATS: tuple[type[_Row], ...] = (_Turns, _HumanEval, _Gsm8k, _ShareGpt, _Text, _Chat)
_KNOWN = "turns, question, conversations, prompt or messages"


@cache
def read(path: Path) -> dict[str, list[Prompt]]:
    """The prompts of a file by kind, each in the order of the file.

    The kind is a row's `category`, else the file's name without its ending. Raises ValueError that
    names file, line and field.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: {reason}") from error
    found: dict[str, list[Prompt]] = {}
    for prompt in _prompts(path, content):
        found.setdefault(prompt.kind, []).append(prompt)
    if not found:
        raise ValueError(f"{path}: must have at least one prompt")
    return found


def _prompts(path: Path, content: str) -> Iterator[Prompt]:
    if content.lstrip()[:1] != "{" and path.suffix not in (".json", ".jsonl"):
        for line in content.splitlines():
            if line.strip():
                yield Prompt(kind=path.stem, text=line)
        return
    rows = list(_rows(path, content))
    schema = _format(rows[0], path) if rows else _Text
    for place, row in rows:
        try:
            found = schema.model_validate(row)
        except ValidationError as error:
            raise ValueError(f"{path}: {place}: {first_problem(error)}") from error
        kind, asked = found.category or path.stem, found.asked()
        if isinstance(asked, str):
            yield Prompt(kind=kind, text=asked)
        elif asked is not None:
            yield Prompt(kind=kind, chat=tuple(asked))


def _rows(path: Path, content: str) -> Iterator[tuple[str, Any]]:
    """The rows of an array, or of lines, with their places."""
    if content.lstrip()[:1] == "[":
        for number, row in enumerate(_json(path, "the array", content), 1):
            yield f"row {number}", row
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _json(path, f"line {number}", line)


def _json(path: Path, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {place}: is not JSON: {error}") from error


def _format(first: tuple[str, Any], path: Path) -> type[_Row]:
    place, row = first
    keys = set(row) if isinstance(row, dict) else set()
    schema = next((each for each in _FORMATS if each.keys <= keys), None)
    if schema is None:
        given = ", ".join(sorted(keys)) or "no object"
        raise ValueError(f"{path}: {place}: must have the field {_KNOWN}, and has {given}")
    return schema
