"""Writes the grammar of an answer that may call tools, as a structural tag.

The grammar forces the texts around a call. If the call is forced or the tool is strict, the
arguments must follow the tool's schema; otherwise they only have to be an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.tools.definitions import Tool, ToolUse
from gateway.tools.formats import CallMarks, ToolFormat
from gateway.tools.thoughts import Thought, ThoughtState
from outrider.errors import invalid
from outrider.grammar.kinds import Grammar, GrammarKind

Json = dict[str, Any]
# A schema with one of these keywords may allow properties that are not in its `properties`.
_OPEN = {"additionalProperties", "patternProperties", "propertyNames", "anyOf", "oneOf", "$ref"}
_ANY_OBJECT: Json = {"type": "object"}
# A schema's references lead to definitions under these keys of the whole schema.
_DEFINITIONS = ("$defs", "definitions")


def calls_grammar(
    form: ToolFormat,
    use: ToolUse,
    thought: Thought | None,
    state: ThoughtState,
    answer: Grammar | None = None,
    field: str = "tools",
) -> Grammar:
    """Return the grammar of an answer in this format.

    An answer without calls is free text, or a text of the grammar `answer`. Raises
    OutriderError(INVALID_VALUE) that names `field` if calls are not forced and `answer` is not a
    grammar of JSON.
    """
    json_kinds = (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA)
    if answer is not None and not use.is_forced and answer.kind not in json_kinds:
        raise invalid(field, "go only with a JSON schema or a JSON object as the answer's format")
    calls = _Calls(form, use)
    if use.is_forced:
        body = calls.alone()
    elif answer is not None and form.begins_as_text:
        body = {"type": "json_schemas", "schemas": [_schema(answer), *calls.as_json()]}
    elif answer is not None:
        content: Json = {"type": "json_schema", "json_schema": _schema(answer)}
        if thought is not None and thought.is_message:
            content = _sequence([_const(thought.after), content])
        body = _or([calls.alone(), content])
    else:
        body = calls.within_text()
    if thought is not None and state != "over":
        body = _after_thought(thought, state, body, calls, is_text=body["type"] == _TEXT)
    parts = {f"{form.style} {i}": _arguments(form, tool, use) for i, tool in enumerate(use.tools)}
    text = json.dumps({"type": "structural_tag", "format": body, "parts": parts})
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)


_TEXT = "triggered_tags"


class _Calls:
    """Writes the grammar of one answer's calls, without the arguments: these are named parts."""

    def __init__(self, form: ToolFormat, use: ToolUse) -> None:
        self._form, self._use = form, use

    def alone(self) -> Json:
        """The element for an answer of only calls, at least one."""
        if not self._form.sections:
            return self._listed()
        # Sections differ only in layout, so a forced call has the first section.
        return self._section(*self._form.sections[0])

    def within_text(self) -> Json:
        """The element for free text, in which the format's trigger begins a call."""
        tags = self.tags()
        triggers = [self._form.trigger]
        if self._form.begins_as_text:
            triggers = [tag["begin"] for tag in tags]
        return {
            "type": _TEXT,
            "triggers": triggers,
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": not self._use.is_parallel,
        }

    def tags(self) -> list[Json]:
        """Return a tag for each way in which a call, or a section of calls, may begin."""
        if self._form.sections:
            return [self._section(*section) for section in self._form.sections]
        return self._tags()

    def after_first(self, text: Json | None) -> list[Json]:
        """Return what may follow the first call or section.

        This is nothing if only one call is allowed, else `text` if given, else more calls if the
        format has no sections.
        """
        if not self._use.is_parallel:
            return []
        if text is not None:
            return [text]
        if self._form.sections:
            return []
        more = _sequence([_const(self._form.separator), _or(self._tags())])
        return [{"type": "star", "content": more}]

    def as_json(self) -> list[Json]:
        """Return a schema for one call of each tool; a call is a JSON object."""
        return [
            _call_schema(self._form.begin(marks, tool.name), _held(tool, self._use))
            for tool in self._use.tools
            for marks in self._form.calls
        ]

    def _section(self, begin: str, end: str) -> Json:
        return {"type": "tag", "begin": begin, "content": self._listed(), "end": end}

    def _listed(self) -> Json:
        return {
            "type": "tags_with_separator",
            "tags": self._tags(),
            "separator": self._form.separator,
            "at_least_one": True,
            "stop_after_first": not self._use.is_parallel,
        }

    def _tags(self) -> list[Json]:
        tools = enumerate(self._use.tools)
        return [self._tag(marks, i, tool) for i, tool in tools for marks in self._form.calls]

    def _tag(self, marks: CallMarks, index: int, tool: Tool) -> Json:
        begin, *rest = re.split(r"\{number\}", marks.begin.replace("{name}", tool.name))
        content: Json = {"type": "part", "name": f"{self._form.style} {index}"}
        if rest:
            parts: list[Json] = []
            for text in rest:
                # In a pattern, \d would match the digits of all scripts, as in Python.
                parts += [{"type": "regex", "pattern": "[0-9]+"}, _const(text)]
            content = _sequence([*parts, content])
        return {"type": "tag", "begin": begin, "content": content, "end": marks.end}


def _after_thought(
    thought: Thought, state: ThoughtState, body: Json, calls: _Calls, *, is_text: bool
) -> Json:
    """Return the element for a thought followed by the body. A call in the thought ends it."""
    # If thoughts are messages, `after` begins a message of content but not a message with a call,
    # so it is no layout.
    is_layout = thought.after and not thought.is_message
    after = [_const(thought.after)] if is_layout and not is_text else []
    ended = {"type": "tag", "begin": thought.end, "content": _sequence([*after, body]), "end": ""}
    direct = []
    for tag in calls.tags():
        rest = calls.after_first(body) if is_text else calls.after_first(None)
        content = _sequence([tag["content"], _const(tag["end"]), *rest])
        direct.append({**tag, "content": content, "end": ""})
    thinking: Json = {"type": "text_and_tag", "tags": [ended, *direct]}
    if is_text:
        # The answer may end within its thought.
        thinking = _or([thinking, {"type": "any_text"}])
    if state == "open":
        return thinking
    return _or([_sequence([_const(thought.begin), thinking]), body])


def _arguments(form: ToolFormat, tool: Tool, use: ToolUse) -> Json:
    return {"type": "json_schema", "json_schema": _held(tool, use), "style": form.style}


def _held(tool: Tool, use: ToolUse) -> Json:
    """Return the schema to which the grammar holds a tool's arguments."""
    if not tool.parameters or not (tool.strict or use.is_forced):
        return _ANY_OBJECT
    # The reader of calls expects an object, whatever the schema says.
    held = {**tool.parameters, "type": "object"}
    # `allOf` is an intersection: a closed part would exclude the properties of the other parts.
    return held if '"allOf"' in json.dumps(held) else _closed(held)


def _closed(schema: Any) -> Any:
    """Return the schema, closed to properties that it does not name (unless it may allow them).

    A model would otherwise invent arguments that the function does not take.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in ("properties", *_DEFINITIONS):
        if isinstance(inner := made.get(key), Mapping):
            made[key] = {name: _closed(each) for name, each in inner.items()}
    made |= {key: _closed(made[key]) for key in ("items", "additionalProperties") if key in made}
    if "properties" in made:
        if not made.keys() & _OPEN:
            made["additionalProperties"] = False
        return made
    for key in ("anyOf", "oneOf"):
        if isinstance(options := made.get(key), list):
            made[key] = [_closed(each) for each in options]
    return made


def _call_schema(begin: str, parameters: Json) -> Json:
    """Return the schema of a JSON call. The text `begin` is the call up to its parameters."""
    *fixed, last = json.loads(f"{begin}0}}").items()
    inner = {key: value for key, value in parameters.items() if key not in _DEFINITIONS}
    properties = {key: {"const": value} for key, value in fixed} | {last[0]: inner}
    own = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
    names = {"properties": properties, "required": list(properties)}
    return {"type": "object", **names, "additionalProperties": False, **own}


def _schema(answer: Grammar) -> Json:
    """Return the schema of an answer in JSON."""
    found: Json = _ANY_OBJECT
    if answer.kind is GrammarKind.JSON_SCHEMA:
        found = json.loads(answer.text)
    return found


def _const(text: str) -> Json:
    return {"type": "const_string", "value": text}


def _or(options: Sequence[Json]) -> Json:
    return {"type": "or", "elements": list(options)}


def _sequence(parts: Sequence[Json]) -> Json:
    return {"type": "sequence", "elements": list(parts)}
