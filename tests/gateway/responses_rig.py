"""Uses the Responses API, and checks that its answers have OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

import httpx
from openai.types import responses as types
from pydantic import TypeAdapter

from tests.gateway.gateway_rig import Rig

Json = dict[str, Any]
EVENT: TypeAdapter[Any] = TypeAdapter(types.ResponseStreamEvent)
TEXT = "naïve: def add(a, b):\n    return a + b  # 😀"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
CLOCK = {"type": "function", "name": "clock"}
CALLS = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "a </b>"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
THINKING = """{% for m in messages %}<|user|>{{ m['role'] }}: {% if m.reasoning_content %}<think>
{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}<|assistant|><think>
{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"""


async def ask(rig: Rig, given: Any = "hi", **body: Any) -> Json:
    """Return a whole answer, after a check that it has OpenAI's form."""
    answer = await rig.http.post("/v1/responses", json={"input": given, **body})
    assert answer.status_code == 200, answer.text
    types.Response.model_validate(answer.json())
    found: Json = answer.json()
    assert found["id"] == answer.headers["x-request-id"]
    return found


def events_of(answer: httpx.Response) -> list[Json]:
    """Return the events of a stream, and check their form.

    Each event must have OpenAI's form, and its type as its name. The events are numbered from 0.
    """
    events = []
    for text in answer.text.split("\n\n")[:-1]:
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert EVENT.validate_python(event).type == event["type"]
        events.append(event)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


async def streamed(rig: Rig, given: Any = "hi", **body: Any) -> list[Json]:
    answer = await rig.http.post("/v1/responses", json={"input": given, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return events_of(answer)


def prompt_of(rig: Rig) -> str:
    return rig.prompts.decode(rig.script.requests[-1].prompt)
