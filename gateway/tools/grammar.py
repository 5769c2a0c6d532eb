"""The grammar of an answer that may call tools, as XGrammar's structural tag.

It forces the texts around a call. It holds the arguments to the tool's schema if the call is forced
or the tool is strict, and else to a JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from gateway.tools.definitions import Tool, ToolUse
from gateway.tools.formats import CallMarks, Thought, ToolFormat
from outrider.errors import invalid
from outrider.grammar.kinds import Grammar, GrammarKind

Json = dict[str, Any]
ThoughtState = Literal["open", "possible", "over"]
"""Whether the answer begins within a thought, may begin with one, or has none."""
_ANY_OBJECT: Json = {"type": "object", "additionalProperties": True}
# A schema without any of these allows every object.
_CLOSED = {"type", "properties", "patternProperties", "additionalProperties", "enum", "const"}
# As for JSON without tools, see outrider.grammar.backends.
_MOST_BLANKS = 16
# Gemma 4 writes keys without quotation marks, and texts between tokens of its own.
_GEMMA = r"""root ::= object
object ::= "{" (pair ("," pair)*)? "}"
pair ::= [A-Za-z_] [A-Za-z0-9_.-]* ":" value
value ::= object | array | text | number | "true" | "false" | "null"
array ::= "[" (value ("," value)*)? "]"
text ::= "<|\"|>" ([^<] | "<"+ [^<|])* "<"* "<|\"|>"
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
"""


def calls_grammar(
    form: ToolFormat,
    use: ToolUse,
    thought: Thought | None,
    state: ThoughtState,
    answer: Grammar | None = None,
    field: str = "tools",
) -> Grammar:
    """The grammar of an answer by this format.

    An answer without calls is free text, or a text of `answer`. Raises OutriderError(INVALID_VALUE)
    that names `field` if `answer` is no JSON, or if a tool of Gemma 4's format is strict.
    """
    _check(form, use, answer, field)
    body = _calls(form, use) if use.is_forced or answer is not None else _free(form, use)
    if answer is not None and not use.is_forced:
        body = {"type": "or", "elements": [body, _json_schema(answer)]}
    if thought is not None and state != "over":
        body = {"type": "sequence", "elements": [_thought(thought, state), body]}
    text = json.dumps({"type": "structural_tag", "format": body})
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)


def _check(form: ToolFormat, use: ToolUse, answer: Grammar | None, field: str) -> None:
    if form.style == "gemma" and any(tool.strict for tool in use.tools):
        problem = f"the calls of {form.name} cannot be held to a schema; leave strict out"
        raise invalid(field, problem)
    json_kinds = (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA)
    if answer is not None and not use.is_forced and answer.kind not in json_kinds:
        raise invalid(field, "go only with a JSON schema or a JSON object as the answer's format")


def _thought(thought: Thought, state: ThoughtState) -> Json:
    begin = "" if state == "open" else thought.begin
    made: Json = {
        "type": "tag",
        "begin": begin,
        "content": {"type": "any_text"},
        "end": thought.end,
    }
    if thought.after:
        made = {"type": "sequence", "elements": [made, _const(thought.after)]}
    return made if state == "open" else {"type": "optional", "content": made}


def _json_schema(answer: Grammar) -> Json:
    if answer.kind is GrammarKind.JSON_OBJECT:
        return _json_format(_ANY_OBJECT, "json")
    return _json_format(json.loads(answer.text), "json")


def _free(form: ToolFormat, use: ToolUse) -> Json:
    """Free text, in which the format's trigger begins a call."""
    tags = _tags(form, use)
    if form.sections:
        tags = [_section(form, use, *section) for section in form.sections]
    return {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not use.is_parallel,
    }


def _calls(form: ToolFormat, use: ToolUse) -> Json:
    """Calls alone, at least one."""
    if not form.sections:
        return _listed(form, use)
    # Sections differ in layout alone, so a forced call has the first.
    return _section(form, use, *form.sections[0])


def _section(form: ToolFormat, use: ToolUse, begin: str, end: str) -> Json:
    return {"type": "tag", "begin": begin, "content": _listed(form, use), "end": end}


def _listed(form: ToolFormat, use: ToolUse) -> Json:
    return {
        "type": "tags_with_separator",
        "tags": _tags(form, use),
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not use.is_parallel,
    }


def _tags(form: ToolFormat, use: ToolUse) -> list[Json]:
    return [_tag(form, marks, tool, use) for tool in use.tools for marks in form.calls]


def _tag(form: ToolFormat, marks: CallMarks, tool: Tool, use: ToolUse) -> Json:
    begin, *rest = re.split(r"\{number\}", marks.begin.replace("{name}", tool.name))
    content = _arguments(form, tool, use)
    if rest:
        parts: list[Json] = []
        for text in rest:
            # In a pattern, \d would be the digits of all scripts, as in Python.
            parts += [{"type": "regex", "pattern": "[0-9]+"}, _const(text)]
        content = {"type": "sequence", "elements": [*parts, content]}
    return {"type": "tag", "begin": begin, "content": content, "end": marks.end}


def _arguments(form: ToolFormat, tool: Tool, use: ToolUse) -> Json:
    if form.style == "gemma":
        return {"type": "grammar", "grammar": _GEMMA}
    held = tool.strict or use.is_forced
    schema = _of_objects(tool.parameters) if held and tool.parameters else _ANY_OBJECT
    return _json_format(schema, form.style)


def _of_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, narrowed to objects: the reader of calls expects nothing else."""
    made = dict(schema)
    for name in ("anyOf", "oneOf"):
        options = made.get(name)
        if isinstance(options, list):
            made[name] = [each for each in options if _may_be_object(each)] or [_ANY_OBJECT]
    if isinstance(values := made.get("enum"), list):
        made["enum"] = [each for each in values if isinstance(each, Mapping)] or values
    if not made.keys() & {"anyOf", "oneOf", "allOf", "$ref"}:
        if not made.keys() & _CLOSED:
            # Without this, XGrammar allows only the properties that the schema names.
            made["additionalProperties"] = True
        made["type"] = "object"
    return made


def _may_be_object(schema: Any) -> bool:
    named = schema.get("type", "object") if isinstance(schema, Mapping) else "object"
    return "object" in (named if isinstance(named, list) else [named])


def _json_format(schema: Any, style: str) -> Json:
    made = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_BLANKS}
    return made | ({} if style == "json" else {"style": style})


def _const(text: str) -> Json:
    return {"type": "const_string", "value": text}
