"""Read a call's arguments from a growing text, and write them as JSON.

A reader takes the text that belongs to the arguments and leaves the rest. JSON passes as the model
writes it, piece by piece; other styles give a piece for each value.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.tools.formats import Style

_DSML = "｜DSML｜"
_SOLID = re.compile(r"\S")


class ArgumentReader(ABC):
    """Reads the arguments of one call."""

    is_complete = False
    """Whether the arguments have ended."""

    @abstractmethod
    def read(self, text: str) -> tuple[str, str]:
        """Take text of the arguments.

        Returns the next piece of JSON and the text that is not yet taken, which begins the next
        call's `text`.
        """


class _JsonReader(ArgumentReader):
    """A JSON object as it is. A mark within one of its strings ends nothing."""

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


@dataclass(frozen=True, slots=True)
class _Tags:
    """How an XML style writes a parameter.

    `begin` has the group `key`, and `is_text` where the style says "true" of a text.
    """

    begin: re.Pattern[str]
    end: str
    trims: bool = False
    """Whether a line break next to a tag belongs to the layout."""


_XML: dict[Style, _Tags] = {
    "qwen_xml": _Tags(re.compile(r"<parameter=(?P<key>[^>]*)>"), "</parameter>", trims=True),
    "minimax_xml": _Tags(re.compile(r'<parameter name="(?P<key>[^"]*)">'), "</parameter>"),
    "glm_xml": _Tags(
        re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"), "</arg_value>"
    ),
    "deepseek_xml": _Tags(
        re.compile(rf'<{_DSML}parameter name="(?P<key>[^"]*)" string="(?P<is_text>\w+)">'),
        f"</{_DSML}parameter>",
    ),
    "deepseek_v4_1_xml": _Tags(
        re.compile(rf'<{_DSML} parameter name="(?P<key>[^"]*)" string="(?P<is_text>\w+)">'),
        f"</{_DSML} parameter>",
    ),
}


class _XmlReader(ArgumentReader):
    """Parameters in tags. The tool's schema says which of them are texts.

    `end` is the text after the arguments.
    """

    def __init__(self, tags: _Tags, end: str, schema: Mapping[str, Any]) -> None:
        self._tags = tags
        self._end = end.lstrip()
        self._schema = schema
        self._written = "{"
        # The parameter whose value is under way, and how much of the value was searched.
        self._named: dict[str, str] | None = None
        self._searched = 0

    def read(self, text: str) -> tuple[str, str]:
        pieces: list[str] = []
        at = 0
        while not self.is_complete:
            if self._named is None:
                solid = _SOLID.search(text, at)
                at = len(text) if solid is None else solid.start()
                begin = self._tags.begin.match(text, at)
                if begin is None:
                    if text.startswith(self._end, at):
                        self.is_complete = True
                        pieces.append("{}" if self._written == "{" else "}")
                    break
                self._named = begin.groupdict()
                self._searched = 0
                at = begin.end()
            closed = text.find(self._tags.end, at + self._searched)
            if closed < 0:
                self._searched = max(0, len(text) - at - len(self._tags.end) + 1)
                break
            pieces.append(self._parameter(self._named, text[at:closed]))
            self._named = None
            at = closed + len(self._tags.end)
        return "".join(pieces), text[at:]

    def _parameter(self, named: Mapping[str, str], text: str) -> str:
        key = named["key"]
        shown = _json_text(self._value(key, named.get("is_text"), text))
        before, self._written = self._written, ", "
        return f"{before}{_json_text(key)}: {shown}"

    def _value(self, key: str, is_text: str | None, text: str) -> Any:
        if self._tags.trims:
            text = text.removeprefix("\n").removesuffix("\n")
        if is_text is not None:
            return text if is_text == "true" else _parsed(text, lambda _: True)
        properties = self._schema.get("properties")
        types = _types(properties.get(key) if isinstance(properties, Mapping) else None)
        if types == {"string"}:
            return text
        return _parsed(text, lambda value: not types or _type_of(value) in types)


def _parsed(text: str, accepts: Callable[[Any], bool]) -> Any:
    """The JSON value that the text writes, if it is accepted, else the text."""
    try:
        value = json.loads(text)
        # Python reads infinite numbers, which JSON has not.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value if accepts(value) else text


def _json_text(value: Any) -> str:
    """The value as JSON; with escapes only if it holds half of a surrogate pair."""
    shown = json.dumps(value, ensure_ascii=False)
    try:
        shown.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return shown


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names, `integer` among them; empty for any."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else set()
    found |= {name for name in _listed(named) if isinstance(name, str)}
    for option in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        found |= _types(option)
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if not found:
        found = {_type_of(value) for value in values}
    # A number may be written without a fraction.
    return found | ({"integer"} if "number" in found else set())


def _listed(value: object) -> list[Any]:
    """The value if it is a list: a schema that nobody has checked may hold anything."""
    return value if isinstance(value, list) else []


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "array" if isinstance(value, list) else "object"


class _GemmaReader(ArgumentReader):
    """Gemma 4's object: keys without quotation marks, texts between `<|"|>`."""

    _QUOTE = '<|"|>'
    _MARK = re.compile(r'[{}\[\]]|<\|"\|>')
    _PART = re.compile(r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<key>[A-Za-z_][\w.-]*)(?=:)', re.DOTALL)

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        # Up to where the end of a text was searched.
        self._searched = 0

    def read(self, text: str) -> tuple[str, str]:
        while (mark := self._MARK.search(text, self._at)) is not None:
            end = mark.end()
            if mark[0] == self._QUOTE:
                closed = text.find(self._QUOTE, max(end, self._searched))
                if closed < 0:
                    # The text goes on. Its opening mark is looked for again.
                    self._at = mark.start()
                    self._searched = len(text) - len(self._QUOTE) + 1
                    return "", text
                end = closed + len(self._QUOTE)
            else:
                self._depth += 1 if mark[0] in "{[" else -1
            self._at = end
            if self._depth == 0:
                self.is_complete = True
                return self._PART.sub(self._shown, text[:end]), text[end:]
        # The end may begin a quotation mark.
        self._at = max(self._at, len(text) - len(self._QUOTE) + 1)
        return "", text

    @staticmethod
    def _shown(part: re.Match[str]) -> str:
        text = part["key"] if part["text"] is None else part["text"]
        return json.dumps(text, ensure_ascii=False)


def argument_reader(style: Style, end: str, schema: Mapping[str, Any]) -> ArgumentReader:
    """A reader of one call's arguments. `end` follows them; `schema` is the tool's."""
    if style == "json":
        return _JsonReader()
    if style == "gemma":
        return _GemmaReader()
    return _XmlReader(_XML[style], end, schema)
