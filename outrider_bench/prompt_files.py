"""Reads a user's prompts from a file, in the formats that the usual data sets have on disk.

The keys of the first row determine the format. Nothing is downloaded, and nothing is tokenised
here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider_bench.prompts import GRAMMARS, KINDS
from outrider_bench.yaml_file import first_problem


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(strict=True, frozen=True)

    role: str
    content: str


class Prompt(BaseModel):
    """A prompt: an unchanged `text`, or a `chat` that the target's template renders."""

    model_config = ConfigDict(frozen=True)

    kind: str
    text: str = ""
    chat: tuple[Message, ...] = ()
    structured_outputs: Mapping[str, Any] | None = None
    """The grammar of the answer: the value of a request's field `structured_outputs`."""


class _Said(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    speaker: str = Field(alias="from")
    value: str


class _Row(BaseModel):
    """A row of any format. Data sets have further fields, which are not read."""

    model_config = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True)

    category: str = ""
    """The category becomes the prompt's kind."""

    turns: list[str] = Field(default=[], min_length=1)
    """Spec-Bench and MT-Bench. Only the first turn is asked, since later turns need its answer."""

    question: str = Field("", min_length=1)
    """GSM8K."""

    conversations: list[_Said] = []
    """ShareGPT. The first question is asked; some conversations of the data set have none."""

    messages: list[Message] = Field(default=[], min_length=1)

    prompt: str = Field("", min_length=1)
    """HumanEval, and any other text to be continued."""

    structured_outputs: dict[str, Any] | None = None
    """The grammar of the answer, as a request to Outrider states it."""

    def asked(self) -> str | list[Message] | None:
        """Return the text or chat to ask; None if the row asks nothing."""
        said = [each.value for each in self.conversations if each.speaker in ("human", "user")]
        questions = [*self.turns[:1], *([self.question] if self.question else []), *said[:1]]
        if questions:
            return [Message(role="user", content=questions[0])]
        return self.messages or self.prompt or None


# The kinds of bundled prompts that are asked if no kinds are named.
_USUAL = ("code", "rewriting", "json", "chat")
_FORMATS = ("turns", "question", "conversations", "messages", "prompt")
"""The fields that tell the format. If the first row has several, the first in this order counts."""


def of(file: Path | None, kinds: Sequence[str]) -> dict[str, list[Prompt]]:
    """Return the prompts of these kinds from the file or, without a file, of the bundled prompts.

    If `kinds` is empty, it returns all kinds of the file, or the usual bundled kinds. Raises
    ValueError that names the file's line, or the unknown kind.
    """
    if file is None:
        texts = {
            kind: [
                Prompt(kind=kind, text=text, structured_outputs=GRAMMARS.get(kind))
                for _, text in prompts
            ]
            for kind, prompts in KINDS.items()
        }
        wanted = kinds or _USUAL
    else:
        texts = read(file)
        wanted = kinds or tuple(texts)
    for kind in wanted:
        if kind not in texts:
            raise ValueError(f"kinds must be of {', '.join(texts)}, not {kind!r}")
    return {kind: texts[kind] for kind in wanted}


@cache
def read(path: Path) -> dict[str, list[Prompt]]:
    """Return the prompts of a file, keyed by kind, each list in the order of the file.

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
    field = _format(*rows[0], path) if rows else ""
    for place, row in rows:
        try:
            found = _Row.model_validate(row)
        except ValidationError as error:
            raise ValueError(f"{path}: {place}: {first_problem(error)}") from error
        if field not in found.model_fields_set:
            raise ValueError(f"{path}: {place}: {field}: is missing, but the first row has it")
        kind, asked = found.category or path.stem, found.asked()
        grammar = found.structured_outputs
        if isinstance(asked, str):
            yield Prompt(kind=kind, text=asked, structured_outputs=grammar)
        elif asked is not None:
            yield Prompt(kind=kind, chat=tuple(asked), structured_outputs=grammar)


def _rows(path: Path, content: str) -> Iterator[tuple[str, Any]]:
    """Yield the place, such as `line 3`, and the value of each row of JSON lines or an array."""
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


def _format(place: str, row: Any, path: Path) -> str:
    keys = sorted(row) if isinstance(row, dict) else ["no object"]
    field = next((each for each in _FORMATS if each in keys), None)
    if field is None:
        needed = f"must have one of the fields {', '.join(_FORMATS)}"
        raise ValueError(f"{path}: {place}: {needed}, and has {', '.join(keys)}")
    return field
