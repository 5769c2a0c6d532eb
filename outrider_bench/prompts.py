"""The bundled prompts of experiments: the demo's prompts, chats, and prompts with a grammar."""

from __future__ import annotations

from typing import Any

from outrider_cli.prompts import CODE, EXTRACTION, REWRITING, object_schema

_CHATS = (
    "What is a list in Python, and how does it differ from a tuple?",
    "Explain in a few sentences what a virtual environment is for.",
    "How do I read a file line by line?",
    "Write a short note that thanks a colleague for a review.",
)
CHAT = tuple(("chat", f"<|user|>{ask}<|end|><|assistant|>") for ask in _CHATS)
_PEOPLE = (
    "Ada is a 36 year old pilot from Oslo.",
    "In Lima lives Omar, a baker, aged 52.",
    "Vera, 41, works as a chemist in Porto.",
    "Chen is 29 and a teacher in Riga.",
    "Jonas, a nurse of 47 years, lives in Graz.",
)
_ASK = "Extract name, age, job and city as JSON: "
SCHEMA = tuple(("schema", f"<|user|>{_ASK}{who}<|end|><|assistant|>") for who in _PEOPLE)
TOOLS = tuple(("tools", f"<|user|>{_ASK}{who}<|end|><|assistant|>") for who in _PEOPLE)
KINDS = {
    "code": CODE,
    "rewriting": REWRITING,
    "json": EXTRACTION,
    "chat": CHAT,
    "schema": SCHEMA,
    "tools": TOOLS,
}
"""For each kind of an experiment, pairs (the demo's name of the kind, prompt).

Chats are already in the form of the bundled pair's template.
"""


_TEXT = {"type": "string", "maxLength": 24}
_PERSON = object_schema(
    name=_TEXT, age={"type": "integer", "minimum": 0, "maximum": 120}, job=_TEXT, city=_TEXT
)
_FUNCTIONS = {
    "save_person": object_schema(
        **_PERSON["properties"],
        state={"enum": ["working", "retired", "unknown"]},
        notify={"type": "boolean"},
    ),
    "search_person": object_schema(name=_TEXT, city=_TEXT),
}


def _calls(functions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the structural tag of a call of one of these functions, in the format of Qwen 3."""
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
            "content": {"type": "json_schema", "json_schema": parameters},
            "end": "}\n</tool_call>",
        }
        for name, parameters in functions.items()
    ]
    calls = {"triggers": ["<tool_call>"], "tags": tags, "at_least_one": True}
    one = {"type": "triggered_tags", **calls, "stop_after_first": True}
    return {"type": "structural_tag", "format": one}


GRAMMARS = {"schema": {"json": _PERSON}, "tools": {"structural_tag": _calls(_FUNCTIONS)}}
"""`structured_outputs` of the kinds with a grammar. An answer ends when its grammar's text does."""
