"""Answers of Messages and Responses, whole and streamed, equal the files of golden/.

A file has the model's text, the request, the equivalent chat request if there is one, the answer,
and the events of the stream. `OUTRIDER_WRITE_GOLDEN=1 pytest tests/gateway/test_golden_answers.py`
writes answers and events anew; read the difference before you commit it.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from outrider.protocol.messages import FinishReason, TokenRequest
from tests.gateway.gateway_rig import Rig

pytestmark = pytest.mark.asyncio(loop_scope="session")

Json = dict[str, Any]
GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(GOLDEN.glob("*/*.json"))
MESSAGES = [path for path in FILES if path.parent.name == "messages"]
OF_ANTHROPIC: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
OF_OPENAI: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def case_of(path: Path) -> Json:
    case: Json = json.loads(path.read_text())
    return case


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


class Names:
    """Replaces ids by their kind and number, and times by 0."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self.of(held, name) for name, held in value.items()}
        if isinstance(value, list):
            return [self.of(held) for held in value]
        if isinstance(value, str) and key in ("id", "item_id", "call_id"):
            kind = value.replace("_", "-").partition("-")[0]
            return self._known.setdefault(value, f"{kind}-{len(self._known)}")
        return 0 if key.endswith("_at") and isinstance(value, int) else value


def play(rig: Rig, case: Json, chunk: int | None = None) -> None:
    """Let the model write the case's text in chunks of `chunk` tokens, or of the case's size."""
    ended = FinishReason[case.get("ends", "stop").upper()]
    size = chunk or case.get("chunk", 3)
    rig.says(case["says"], size, ended, cached=case.get("cached", 0))


async def whole_answer(rig: Rig, api: str, request: Json) -> Json:
    """Return the answer, checked against the type of the API's own client."""
    response = await rig.http.post(f"/v1/{api}", json=request)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    kind: Any = Message if api == "messages" else Response
    kind.model_validate(answer)
    assert response.headers["x-request-id"] == answer["id"]
    return answer


async def events_of(rig: Rig, api: str, request: Json) -> list[Json]:
    """Return the events of a stream, each checked against the type of the API's own client."""
    response = await rig.http.post(f"/v1/{api}", json=request | {"stream": True})
    assert response.status_code == 200, response.text
    events = []
    for lines in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if api == "responses":
            assert OF_OPENAI.validate_python(event).type == event["type"]
        elif event != {"type": "ping"}:
            OF_ANTHROPIC.validate_python(event)
        events.append(event)
    assert api == "responses" or response.text.isascii()
    return events


def asked(rig: Rig) -> TokenRequest:
    """Return the verifier's last request without random fields and fields of streams."""
    changed: Json = {"request_id": "", "traceparent": "", "noise_seed": 0, "min_chunk_tokens": 1}
    return replace(rig.script.requests[-1], **changed)


def write(path: Path, case: Json) -> None:
    """Write a file with one line for each value and each event."""
    events = [json.dumps(event, ensure_ascii=False) for event in case.pop("events")]
    lines = [f'"{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in case.items()]
    lines.append('"events": [\n' + ",\n".join(events) + "\n]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.mark.parametrize("path", FILES, ids=named)
async def test_an_answer_and_its_events_are_those_of_the_file(thinker: Rig, path: Path) -> None:
    api, case = path.parent.name, case_of(path)
    play(thinker, case)
    answer = Names().of(await whole_answer(thinker, api, case["request"]))
    wanted = asked(thinker)
    events = Names().of(await events_of(thinker, api, case["request"]))
    assert asked(thinker) == wanted
    if "chat" in case:
        chat = await thinker.http.post("/v1/chat/completions", json=case["chat"])
        assert chat.status_code == 200, chat.text
        assert asked(thinker) == wanted
    if os.environ.get("OUTRIDER_WRITE_GOLDEN"):
        case |= {"answer": answer, "events": events}
        write(path, dict(case))
    assert (answer, events) == (case["answer"], case["events"])


@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize("path", MESSAGES, ids=named)
async def test_anthropics_client_adds_a_stream_up_to_the_answer(
    thinker: Rig, path: Path, chunk: int
) -> None:
    case = case_of(path)
    play(thinker, case, chunk)
    url, request = thinker.gateway.http_url, case["request"]
    asked: Json = {"model": "", **{name: request[name] for name in ("messages", "max_tokens")}}
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client,
        client.messages.stream(**asked, extra_body=request) as stream,
    ):
        found = (await stream.get_final_message()).to_dict(exclude_unset=True)
    # The client adds this field as null.
    assert found.pop("stop_details") is None
    assert Names().of(found) == case["answer"]
