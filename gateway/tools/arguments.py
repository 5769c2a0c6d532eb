"""Reads a call's arguments from a growing text, and writes them as JSON.

A reader takes the text that belongs to the arguments and leaves the text after them. It passes JSON
on piece by piece, as the model writes it. In other styles it writes a piece for each complete
value.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from gateway.tools.formats import Style
from outrider.grammar.arguments import TAGS, Tags
from outrider.grammar.branches import ALL_TYPES, Types, json_type


class ArgumentReader(ABC):
    """Reads the arguments of one call."""

    is_complete = False
    """True if the arguments have ended."""

    @abstractmethod
    def read(self, text: str) -> tuple[str, str]:
        """Take text of the arguments.

        Returns the next piece of JSON, and the text that is not yet taken. The caller puts the
        latter before the next text.
        """


class _JsonReader(ArgumentReader):
    """Passes a JSON object on unchanged. A bracket within one of its strings does not count."""

    _MARK = re.compile(r'[\\"{}\[\]]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False

    def read(self, text: str) -> tuple[str, str]:
        at = 0
        while (mark := self._MARK.search(text, at)) is not None:
            at = mark.end()
            sign = mark[0]
            if sign == "\\":
                if at == len(text):
                    # The escaped character is not here yet.
                    return text[: at - 1], "\\"
                at += 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    self.is_complete = True
                    return text[:at], text[at:]
        return text, ""


# Words of Python that a model may write, with JSON's word and its type. `_WHOLE` finds a whole
# number that is written as a float, such as 1.0.
_PYTHON = {"True": ("true", "boolean"), "False": ("false", "boolean"), "None": ("null", "null")}
_WHOLE = re.compile(r"-?[0-9]+(?=\.0+$)")
_JSON_MARK = r'\\.|"'


class _TagReader(ArgumentReader):
    """Reads parameters in tags. The tool's schema says which parameters are strings.

    `end` is the text after the arguments. If a grammar `held` the arguments to the schema, a
    closing tag within a JSON string does not end the value.
    """

    def __init__(self, tags: Tags, end: str, schema: Mapping[str, Any], *, held: bool) -> None:
        self._tags = tags
        self._begin = _begin_of(tags)
        self._end = end.lstrip()
        self._types = Types(schema)
        self._held = held
        self._written = "{"
        # The parameter whose value is in progress.
        self._value: _Value | None = None

    def read(self, text: str) -> tuple[str, str]:
        pieces: list[str] = []
        while not self.is_complete:
            if self._value is None:
                text = text.lstrip()
                begin = self._begin.match(text)
                if begin is None:
                    if text.startswith(self._end):
                        self.is_complete = True
                        pieces.append("{}" if self._written == "{" else "}")
                    break
                self._value = self._opened(begin.groupdict())
                text = text[begin.end() :]
            rest = self._value.take(text)
            if rest is None:
                return "".join(pieces), ""
            text = rest
            before, self._written = self._written, ", "
            shown = f"{json.dumps(self._value.key, ensure_ascii=False)}: {self._value.shown()}"
            pieces.append(before + shown)
            self._value = None
        return "".join(pieces), text

    def _opened(self, named: Mapping[str, str]) -> _Value:
        types = self._types.of_property(named["key"]) or ALL_TYPES
        if "is_text" in named:
            is_text = named["is_text"] == "true"
            types = frozenset(["string"]) if is_text else types - {"string"}
        return _Value(named["key"], types, self._tags, held=self._held)


def _begin_of(tags: Tags) -> re.Pattern[str]:
    """Return a pattern of the text that begins a parameter."""
    found = re.escape(tags.begin)
    parts = {"key": f"(?P<key>[^{tags.key_end}]*)", "text": r"(?P<is_text>\w+)", "blanks": r"\s*"}
    for name, part in parts.items():
        found = found.replace(re.escape(f"{{{name}}}"), part)
    return re.compile(found)


class _Value:
    """The value of one parameter, which grows up to its closing tag."""

    def __init__(self, key: str, types: frozenset[str], tags: Tags, *, held: bool) -> None:
        """`types` are the types that the value may have. Without `string`, the value is JSON."""
        self.key = key
        self._types, self._tags, self._held = types, tags, held
        self._parts: list[str] = []
        self._tail = ""
        self._in_string = False
        self._mark = re.compile(f"{_JSON_MARK}|{re.escape(tags.end)}", re.DOTALL)
        self._is_json: bool | None = None
        if not held or types == {"string"} or types >= ALL_TYPES:
            self._is_json = False
        elif "string" not in types:
            self._is_json = True

    def take(self, text: str) -> str | None:
        """Add text. Return the text after the closing tag, or None if the tag has not come yet."""
        text = self._tail + text
        if self._is_json is None:
            # Where the value may be JSON or a text, only a line break of layout may precede JSON.
            start = text.removeprefix("\n") if self._tags.trims else text
            if not start:
                self._tail = text
                return None
            self._is_json = start[0] in "[{" and bool(self._types & {"array", "object"})
        # Text that may begin the tag, or an escape, is looked at again.
        certain = len(text) - len(self._tags.end) + 1
        at = 0
        while (mark := self._next(text, at)) is not None:
            begin, end = mark
            if text.startswith(self._tags.end, begin) and not self._in_string:
                self._parts.append(text[:begin])
                return text[end:]
            if begin >= certain:
                break
            if text[begin] == '"':
                self._in_string = not self._in_string
            at = end
        at = max(at, certain, 0)
        self._parts.append(text[:at])
        self._tail = text[at:]
        return None

    def _next(self, text: str, at: int) -> tuple[int, int] | None:
        """Return begin and end of the next mark: a quote or escape of JSON, or the closing tag."""
        if self._is_json:
            found = self._mark.search(text, at)
            return None if found is None else found.span()
        begin = text.find(self._tags.end, at)
        return None if begin < 0 else (begin, begin + len(self._tags.end))

    def shown(self) -> str:
        """Return the value as JSON."""
        text = "".join(self._parts)
        if self._tags.trims:
            text = text.removeprefix("\n").removesuffix("\n")
        solid = text.strip()
        # If the value may also be a text, blanks around JSON make it a text.
        if self._types != {"string"} and ("string" not in self._types or solid == text):
            kind = _json_kind(solid, finite="string" in self._types)
            if kind is not None and self._takes(kind):
                return solid
            if "string" not in self._types and (shown := self._repaired(solid)):
                return shown
        return json.dumps(text, ensure_ascii=False)

    def _takes(self, kind: str) -> bool:
        if kind == "string":
            # Quotes belong to the text if the value may be a plain text, and otherwise to JSON.
            return "string" not in self._types
        return kind in self._types or (kind == "integer" and "number" in self._types)

    def _repaired(self, text: str) -> str:
        """Return JSON for a value in Python's notation; "" for other texts."""
        shown, kind = _PYTHON.get(text, ("", ""))
        if shown and kind in self._types:
            return shown
        whole = _WHOLE.match(text)
        return whole[0] if whole and "integer" in self._types else ""


def _json_kind(text: str, *, finite: bool) -> str | None:
    """Return the type of the JSON value in the text; None if the text is no JSON value.

    With `finite`, 1e999 counts as no value, since most languages read it as infinite.
    """

    def refuse(constant: str) -> Any:
        # Python reads infinite numbers, which JSON lacks.
        raise ValueError(constant)

    def fraction(number: str) -> float:
        return refuse(number) if finite and math.isinf(float(number)) else 0.5

    try:
        # The values of the numbers do not matter, and a number may have more digits than Python
        # reads.
        value = json.loads(text, parse_int=lambda _: 0, parse_float=fraction, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
    return json_type(value)


class _GemmaReader(ArgumentReader):
    """Reads Gemma 4's object: keys without quotation marks, texts between `<|"|>`."""

    _QUOTE = '<|"|>'
    _MARK = re.compile(r'[{}\[\],:]|<\|"\|>')
    _KEY = re.compile(r"[A-Za-z_][\w.-]*")

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        # A string in progress, or a word that may be a key.
        self._parts: list[str] = []

    def read(self, text: str) -> tuple[str, str]:
        pieces: list[str] = []
        at = 0
        while not self.is_complete:
            if self._in_text:
                begin = text.find(self._QUOTE, at)
                end = begin + len(self._QUOTE)
            else:
                mark = self._MARK.search(text, at)
                begin, end = (-1, -1) if mark is None else mark.span()
            if begin < 0:
                break
            self._parts.append(text[at:begin])
            pieces.append(self._piece(text[begin:end]))
            at = end
        if self.is_complete:
            return "".join(pieces), text[at:]
        # The end of the text may be the beginning of a quotation mark.
        kept = max(at, len(text) - len(self._QUOTE) + 1)
        self._parts.append(text[at:kept])
        return "".join(pieces), text[kept:]

    def _piece(self, mark: str) -> str:
        """Return JSON for the text before a mark, and for the mark."""
        before = "".join(self._parts)
        self._parts = []
        if mark == self._QUOTE:
            self._in_text = not self._in_text
            return before if self._in_text else json.dumps(before, ensure_ascii=False)
        if mark == ":" and self._KEY.fullmatch(before):
            before = json.dumps(before)
        if mark in "{}[]":
            self._depth += 1 if mark in "{[" else -1
            self.is_complete = self._depth == 0
        return before + mark


def argument_reader(
    style: Style, end: str, schema: Mapping[str, Any], *, held: bool
) -> ArgumentReader:
    """Return a reader of one call's arguments. `end` follows them; `schema` is the tool's.

    `held` says that the grammar held the arguments to the schema.
    """
    if style == "json":
        return _JsonReader()
    if style == "gemma":
        return _GemmaReader()
    return _TagReader(TAGS[style], end, schema, held=held)
