"""A verifier whose model calls a tool as a good model would, and answers from the tool's result.

The bundled model is too small to call a tool unasked. With this verifier an agent sees a call,
sends the tool's result back, and ends with an answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.text.prompts import Prompts
from outrider.protocol.messages import FinishReason, TokenRequest
from tests.gateway.gateway_rig import TARGET, Rig, running_rig, settings
from tests.gateway.scripted_verifier import Script, Step, last, plain, ready, serving

MODEL = "outrider"
RESULT = "21 degrees"
"""Text that each tool's result holds."""

ANSWER = "It is 21 degrees in Oslo."
# The prompts of some command-line agents have tens of thousands of tokens.
_CONTEXT_LENGTH = 262144

Calls = list[tuple[str, dict[str, Any]]]

# The first of these pieces of text that the prompt holds decides which calls the model makes.
_CALLS: dict[str, Calls] = {
    '"name": "weather"': [("weather", {"city": "Oslo"})],
    # Tools of command-line agents: Codex's, opencode's and Continue's.
    '"name": "exec_command"': [("exec_command", {"cmd": "cat notes.txt"})],
    '"name": "bash"': [("bash", {"command": "cat notes.txt", "description": "Read the notes"})],
    '"name": "Bash"': [("Bash", {"command": "cat notes.txt"})],
    # The questions of `canitoolcall probe`.
    "weather in Paris right now": [("get_weather", {"city": "Paris"})],
    "in Paris and in Tokyo": [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Tokyo"}),
    ],
    "titled 'Design review'": [
        (
            "create_event",
            {
                "title": "Design review",
                "start": "2026-10-01T15:00:00Z",
                "attendees": [
                    {"name": "Ana", "email": "ana@example.com"},
                    {"name": "Bo", "email": "bo@example.com"},
                ],
                "location": {"city": "Berlin", "room": "4.12"},
            },
        )
    ],
    "Save a note titled": [
        ("save_note", {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"})
    ],
    "time is it on the server": [("get_server_time", {})],
    "about Lisbon": [("get_weather", {"city": "Lisbon"})],
    "9.11 or 9.9": [("record_answer", {"answer": "9.9"})],
}


def answer(prompt: str, has_tools: bool) -> str:
    """Return the model's answer to this prompt, in Hermes' format."""
    if not has_tools or RESULT in prompt:
        return ANSWER
    calls = next((calls for piece, calls in _CALLS.items() if piece in prompt), [])
    written = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in calls
    ]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written) or ANSWER


@asynccontextmanager
async def running_scripted() -> AsyncIterator[Rig]:
    """Run a gateway with the scripted verifier."""
    prompts = Prompts(TARGET)

    def steps(request: TokenRequest) -> Iterator[Step]:
        text = answer(prompts.decode(request.prompt), request.grammar is not None)
        yield from (plain([token]) for token in prompts.tokenizer.encode(text).ids)
        yield last([3], FinishReason.STOP)

    info = ready(prompts.fingerprint, model_id=MODEL, context_length=_CONTEXT_LENGTH)
    script = Script(info, steps)
    async with (
        serving(script) as address,
        running_rig(settings(address), script, prompts) as rig,
    ):
        yield rig
