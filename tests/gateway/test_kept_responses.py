"""Kept answers of the Responses API are replayed, listed and refused as OpenAI's client asks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from gateway.http.responses import kept as responses_kept
from outrider.protocol.messages import FinishReason
from tests.gateway.gateway_rig import Rig, rig_with_template
from tests.gateway.responses_rig import (
    CALLS,
    CLOCK,
    TEXT,
    THINKING,
    WEATHER,
    Json,
    ask,
    events_of,
    prompt_of,
    streamed,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
TOOLS = [WEATHER, CLOCK]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """Yield a gateway of a model whose answers begin with a thought."""
    folder = tmp_path_factory.mktemp("thinker")
    async with rig_with_template(folder, THINKING, tool_format="hermes") as made:
        yield made


@pytest.fixture(autouse=True)
def one_tenant(rig: Rig, thinker: Rig) -> Iterator[None]:
    """Send the key of OpenAI's client with all requests, so that all have the same tenant.

    Without API keys at the gateway, a bearer token names the tenant.
    """
    for each in (rig, thinker):
        each.http.headers["authorization"] = f"Bearer {each.client.api_key}"
    yield
    for each in (rig, thinker):
        del each.http.headers["authorization"]


async def replayed(rig: Rig, response_id: str) -> list[Json]:
    answer = await rig.http.get(f"/v1/responses/{response_id}?stream=true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"Hm. So?</think>{CALLS}\n Done. 😀 é", FinishReason.STOP),
        (f"Hm.</think>{CALLS[:-40]}", FinishReason.LENGTH),
        ("Hm", FinishReason.LENGTH),
        ("Hm.</think>", FinishReason.STOP),
    ],
)
async def test_a_stream_is_sent_again_event_by_event(
    thinker: Rig, text: str, reason: FinishReason
) -> None:
    thinker.says(text, 2, reason)
    events = await streamed(thinker, tools=TOOLS, speculation={"metrics": True})
    response = events[-1]["response"]
    assert await replayed(thinker, response["id"]) == events
    whole = await ask(thinker, tools=TOOLS)
    assert (await replayed(thinker, whole["id"]))[-1]["response"] == whole


async def test_openais_client_goes_on_behind_an_event(rig: Rig) -> None:
    rig.says(TEXT)
    count = len(await streamed(rig))
    response_id = (await streamed(rig))[-1]["response"]["id"]
    client = rig.client.responses
    for after in (0, 4, count - 2, count - 1, count + 5):
        stream = await client.retrieve(response_id, stream=True, starting_after=after)
        assert [event.sequence_number async for event in stream] == [*range(after + 1, count)]
    async with client.stream(response_id=response_id, starting_after=1) as resumed:
        texts = [each.delta async for each in resumed if each.type == "response.output_text.delta"]
        assert "".join(texts) == (await resumed.get_final_response()).output_text == TEXT
    for query in ({"starting_after": -1}, {"starting_after": "x"}, {"stream": "maybe"}):
        answer = await rig.http.get(f"/v1/responses/{response_id}", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, *query)


async def test_a_response_too_large_to_be_sent_thrice_is_read_whole(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.says(TEXT)
    kept = await ask(rig)
    path = f"/v1/responses/{kept['id']}"
    monkeypatch.setattr(responses_kept, "MAX_REPLAYED_BYTES", 1000)
    answer = await rig.http.get(f"{path}?stream=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    assert "at most 1000 bytes" in answer.json()["error"]["message"]
    assert (await rig.http.get(path)).json() == kept


async def listed(rig: Rig, response_id: str, **query: Any) -> list[Json]:
    """Return all items that OpenAI's client finds, page by page; check their form."""
    pages = rig.client.responses.input_items.list(response_id, **query)
    found = [item.to_dict() async for item in pages]
    for item in found:
        ITEM.validate_python(item)
    return found


async def test_the_items_before_an_answer_are_listed(thinker: Rig) -> None:
    thinker.says(f"Hm.</think>{CALLS}")
    first = await ask(thinker, tools=TOOLS)
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        for call in calls
    ]
    thinker.says("So.</think>Cold.")
    again = [{**item, "id": f"own_{at}"} for at, item in enumerate(results)]
    answer = await ask(thinker, again, tools=TOOLS, previous_response_id=first["id"])
    items = await listed(thinker, answer["id"], order="asc")
    assert items[0] | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    assert items[1:-2] == first["output"]
    assert items[-2:] == [{**item, "status": "completed"} for item in again]
    assert len({item["id"] for item in items}) == len(items)
    assert await listed(thinker, answer["id"]) == items[::-1]
    for limit in (1, 2, 100):
        assert await listed(thinker, answer["id"], order="asc", limit=limit) == items
    after = items[2]["id"]
    assert await listed(thinker, answer["id"], order="asc", after=after) == items[3:]
    assert await listed(thinker, answer["id"], after=after) == items[1::-1]
    # Items that a client sends back are listed like items that the gateway kept.
    sent = [{"role": "user", "content": "hi"}, *first["output"], *again]
    answer = await ask(thinker, sent, tools=TOOLS)
    assert [{**item, "id": ""} for item in await listed(thinker, answer["id"], order="asc")] == [
        {**item, "id": ""} for item in items
    ]


async def test_a_page_that_cannot_be_is_refused(rig: Rig) -> None:
    rig.says(TEXT)
    path = f"/v1/responses/{(await ask(rig))['id']}/input_items"
    for name, value in (("after", "msg_none"), ("limit", 0), ("limit", 101), ("order", "up")):
        answer = await rig.http.get(path, params={name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "given",
    [
        {"input": "hi"},
        {"input": "hi", "instructions": "Be kind.", "tools": TOOLS, "tool_choice": "required"},
        {"input": "hi", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
        {"input": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
        {"input": "hi", "truncation": "disabled", "parallel_tool_calls": False},
    ],
)
async def test_the_count_of_a_prompt_is_the_usage_of_its_answer(thinker: Rig, given: Any) -> None:
    thinker.says(f"Hm.</think>{CALLS}")
    first = await ask(thinker, tools=TOOLS)
    client = thinker.client.responses
    for more in ({}, {"previous_response_id": first["id"]}):
        asked = len(thinker.script.requests)
        counted = await client.input_tokens.count(**given, **more)
        assert counted.object == "response.input_tokens"
        assert len(thinker.script.requests) == asked
        answer = await client.create(model="models/target", **given, **more)
        assert answer.usage is not None
        assert counted.input_tokens == answer.usage.input_tokens


async def test_a_count_that_cannot_be_names_the_callers_parameter(rig: Rig) -> None:
    for body, param in (
        ({}, "input"),
        ({"input": "hi", "model": "none"}, "model"),
        ({"input": "hi", "temperature": 1}, "temperature"),
        ({"input": "hi", "previous_response_id": "none"}, "previous_response_id"),
        ({"input": "x " * 200_000}, "input"),
    ):
        answer = await rig.http.post("/v1/responses/input_tokens", json=body)
        assert answer.json()["error"]["param"] == param
        assert answer.json()["error"]["message"].startswith(param)


async def test_no_answer_can_be_cancelled(rig: Rig) -> None:
    rig.says(TEXT)
    kept = await ask(rig)
    with pytest.raises(openai.BadRequestError, match="only background responses"):
        await rig.client.responses.cancel(kept["id"])
    assert (await rig.http.get(f"/v1/responses/{kept['id']}")).json() == kept


async def test_a_cut_off_call_is_listed_as_it_came(rig: Rig) -> None:
    rig.says(CALLS[:60], 5, FinishReason.LENGTH)
    first = await ask(rig, tools=TOOLS)
    rig.says("yes")
    answer = await ask(rig, "and?", previous_response_id=first["id"])
    items = await listed(rig, answer["id"], order="asc")
    assert items[1:-1] == first["output"]
    assert '"weather"' in prompt_of(rig)
