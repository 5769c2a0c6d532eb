"""Prompts of the kinds that the bundled pair was trained on, and questions for SmolLM2.

The demo uses the prompts and the questions; the benchmarks use only the prompts.
"""

from __future__ import annotations

from typing import Any

_CODE = (
    'def parse_args(self, argv):\n    """Parse the arguments',
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n\n"
    "    def put(self, item):\n",
    "import os\nimport sys\n\n\ndef main():\n    if len(sys.argv) ",
    'def read_file(path, encoding=None):\n    """Return the text of a file."""\n    with open(path',
    "class Node:\n    def __init__(self, name, value, parent=None):\n        self.name = name\n",
)
_SOURCE = (
    """def visit_Name(self, node):
    if node.id in self.names:
        return self.names[node.id]
    self.names[node.id] = node
    return node
""",
    """def get_option(self, name, default=None):
    if name not in self.options:
        return default
    value = self.options[name]
    if value is None:
        return default
    return value
""",
    """The following options are accepted:

* *name* is the name of the file.
* *mode* is the mode in which the file is opened.
* *encoding* is the name of the encoding.
""",
    """class Error(Exception):
    def __init__(self, message, filename=None):
        self.message = message
        self.filename = filename
        Exception.__init__(self, message)
""",
)
_CHATS = (
    "Extract name, age, job and city as JSON: Ada is a 36 year old pilot from Oslo.",
    "Extract name, age, job and city as JSON: In Lima lives Omar, a baker, aged 52.",
    "Extract name, age, job and city as JSON: Vera, 41, works as a chemist in Porto.",
    "List the items as JSON: Order: 3 x lamp at 12.5, 1 x desk at 80, 2 x rope at 7.25.",
    "List the items as JSON: Order: 2 x guitar at 99, 4 x bottle at 3.5.",
)

CODE = tuple(("code", prompt) for prompt in _CODE)
REWRITING = tuple(
    ("rewriting", f"{source}\n\n{source}\n\n{source.splitlines()[0]}\n") for source in _SOURCE
)
EXTRACTION = tuple(("JSON extraction", f"<|user|>{ask}<|end|><|assistant|>") for ask in _CHATS)

DEMO_PROMPTS = (*CODE, *REWRITING, *EXTRACTION)
"""14 pairs (kind, prompt); chats are rendered in the bundled pair's template."""


def object_schema(**properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object with these properties and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_ITEM = object_schema(
    name={"type": "string"}, quantity={"type": "integer"}, price={"type": "number"}
)
_SCHEMA = object_schema(items={"type": "array", "items": _ITEM})
_FORMAT = {"type": "json_schema", "json_schema": {"name": "order", "schema": _SCHEMA}}


def _question(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


SMOLLM2_QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("explanation", _question("What is photosynthesis?")),
    ("code", _question("Write a Python function that checks whether a number is even.")),
    (
        "summary",
        _question(
            "Summarize in one sentence: The meeting of the garden club was moved from Monday to"
            " Thursday at seven in the evening, because the hall is being painted. Members should"
            " bring seeds for the exchange. Coffee and cake will be served after the talk about"
            " roses."
        ),
    ),
    (
        "JSON by a schema",
        _question(
            "List the items as JSON. Order: 3 lamps at 12.5, 1 table at 80, 2 ropes at 7.25.",
            response_format=_FORMAT,
        ),
    ),
)
"""Pairs (kind, fields of a chat's body)."""
