"""A stream that pauses sends pings, so that no proxy takes its connection for dead."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic

from gateway.text.prompts import Prompts
from outrider.errors import OutriderError, Reason
from outrider.protocol.messages import FinishReason
from tests.gateway.gateway_rig import Rig, own_rig
from tests.gateway.scripted_verifier import last, plain
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
}
COMMENT = ": ping"
ANTHROPICS = 'event: ping\ndata: {"type": "ping"}'
PAUSE_S = 0.3


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def impatient(prompts: Prompts) -> AsyncIterator[Rig]:
    """Yield a gateway that sends pings early. `pauses` makes its verifier pause."""
    async with own_rig(prompts, ping_seconds=0.1) as rig:
        yield rig


def pauses(rig: Rig) -> None:
    ids = rig.prompts.tokenizer.encode("one two").ids
    rig.script.play(PAUSE_S, plain(ids[:1]), PAUSE_S, plain(ids[1:]), last([3], FinishReason.STOP))


@pytest.mark.parametrize("path", BODIES)
async def test_pings_come_before_the_first_token_and_between_tokens(
    impatient: Rig, path: str
) -> None:
    pauses(impatient)
    answer = await impatient.http.post(
        path, json=BODIES[path] | {"model": "models/target", "stream": True}
    )
    ping = ANTHROPICS if path == "/v1/messages" else COMMENT
    events = [event for event in answer.text.split("\n\n") if event]
    assert events[0] == ping
    texts = [index for index, event in enumerate(events) if "one" in event or " two" in event]
    between = events[texts[0] : texts[1]]
    assert ping in between
    assert events[-1] != ping
    assert all(event == ping or "data: " in event for event in events)


async def test_clients_skip_pings(impatient: Rig) -> None:
    pauses(impatient)
    stream = await impatient.client.completions.create(
        model="models/target", prompt="x", stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "one two"
    async with (
        AsyncAnthropic(base_url=impatient.gateway.http_url, api_key="any") as client,
        client.messages.stream(
            model="models/target", max_tokens=4, messages=[{"role": "user", "content": "x"}]
        ) as answer,
    ):
        assert await answer.get_final_text() == "one two"


async def test_an_error_after_a_ping_is_an_event(impatient: Rig) -> None:
    impatient.script.play(PAUSE_S, OutriderError(Reason.LOGITS_NOT_FINITE, "no"))
    stream = await impatient.client.completions.create(
        model="models/target", prompt="x", stream=True
    )
    with pytest.raises(openai.APIError, match="no"):
        _ = [chunk async for chunk in stream]
    counts = impatient.gateway.generation.admission.counts
    await until(lambda: not any(counts.values()))


async def test_an_error_without_a_pause_is_a_status(impatient: Rig) -> None:
    impatient.script.play(OutriderError(Reason.LOGITS_NOT_FINITE, "no"))
    body = {"prompt": "x", "stream": True}
    assert (await impatient.http.post("/v1/completions", json=body)).status_code == 500


async def test_a_client_that_leaves_while_pings_come_frees_its_sequence(impatient: Rig) -> None:
    impatient.script.play(30.0)
    cancelled = impatient.script.cancelled
    body = {"prompt": "x", "stream": True}
    async with impatient.http.stream("POST", "/v1/completions", json=body) as response:
        assert await anext(response.aiter_lines()) == COMMENT
        assert impatient.script.running == 1
    await until(lambda: impatient.script.cancelled == cancelled + 1)
    assert impatient.script.running == 0


async def test_no_pings_come_if_they_are_turned_off(prompts: Prompts) -> None:
    async with own_rig(prompts, ping_seconds=0.0) as rig:
        pauses(rig)
        body = {"prompt": "x", "stream": True}
        assert COMMENT not in (await rig.http.post("/v1/completions", json=body)).text
