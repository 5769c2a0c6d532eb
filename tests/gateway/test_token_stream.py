"""All requests to a verifier share one stream; after it breaks, the next request opens another."""

from __future__ import annotations

import asyncio
import gc

import openai
import pytest

from outrider.errors import OutriderError, Reason
from outrider.protocol.messages import FinishReason, TokenRequest
from tests.gateway.gateway_rig import Rig
from tests.gateway.scripted_verifier import last, plain
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def ask(rig: Rig) -> str:
    answer = await rig.client.completions.create(model="models/target", prompt="x", max_tokens=5)
    return answer.choices[0].text


def stream_has_ended(rig: Rig) -> bool:
    """Return whether the gateway has read the end of its last stream."""
    call = rig.gateway.router.replicas[0].tokens._call
    return call is not None and call.ended


async def test_successive_and_simultaneous_requests_share_a_stream(rig: Rig) -> None:
    await ask(rig)
    before = rig.script.stream_count
    await asyncio.gather(*(ask(rig) for _ in range(8)))
    await rig.client.completions.create(model="models/target", prompt="x", n=3)
    assert rig.script.stream_count == before


async def test_requests_that_wait_to_be_sent_share_messages(rig: Rig) -> None:
    stream = rig.gateway.router.replicas[0].tokens
    await ask(rig)
    before = rig.script.message_count
    running = [stream.generate(TokenRequest([5, number], 5)) for number in range(40)]
    await asyncio.gather(*map(anext, running))
    prompts = [request.prompt for request in rig.script.requests[-40:]]
    assert prompts == [[5, number] for number in range(40)]
    assert rig.script.message_count - before < 10
    for each in running:
        await each.aclose()


async def test_after_a_stream_breaks_the_next_request_opens_another(
    rig: Rig,
) -> None:
    rig.script.answer = lambda _: [60.0]
    asked = [asyncio.create_task(ask(rig)) for _ in range(3)]
    await until(lambda: rig.script.running == 3)
    before = rig.script.stream_count
    rig.script.hangs_up = True
    for failure in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(failure, openai.InternalServerError)
        assert failure.status_code == 503
        assert failure.code == "draining"
        assert "the verifier is about to stop" in failure.message
        assert failure.response.headers["retry-after"] == "1"
    await until(lambda: rig.script.running == 0 and stream_has_ended(rig))
    # A poll finds out that the verifier takes requests again.
    rig.gateway.router.replicas[0].poll_now.set()
    await until(lambda: rig.gateway.router.replicas[0].problem is None)
    rig.script.answer = lambda _: [plain([5]), last([], FinishReason.LENGTH)]
    await ask(rig)
    assert rig.script.stream_count == before + 1


async def test_a_failing_sequence_does_not_end_the_stream(rig: Rig) -> None:
    refused = OutriderError(Reason.OVERLOADED, "64 requests are waiting already", retry_after_s=1.0)
    rig.script.answer = lambda request: (
        [refused] if len(request.prompt) > 2 else [0.2, plain([5]), last([], FinishReason.LENGTH)]
    )
    good = asyncio.create_task(ask(rig))
    await until(lambda: rig.script.running == 1)
    with pytest.raises(openai.RateLimitError, match="64 requests are waiting already"):
        await rig.client.completions.create(model="models/target", prompt=[5, 6, 7], max_tokens=5)
    assert await good


async def test_a_stream_that_breaks_while_idle_leaves_no_task_behind(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    await ask(rig)
    rig.script.hangs_up = True
    await until(lambda: not rig.script.hangs_up)
    before = rig.script.stream_count
    await until(lambda: stream_has_ended(rig))
    await ask(rig)
    assert rig.script.stream_count == before + 1
    gc.collect()
    await asyncio.sleep(0.05)
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_request_too_large_for_a_message_fails_no_other(rig: Rig) -> None:
    rig.script.answer = lambda _: [0.3, plain([5]), last([], FinishReason.LENGTH)]
    good = asyncio.create_task(ask(rig))
    await until(lambda: rig.script.running == 1)
    stream = rig.gateway.router.replicas[0].tokens
    with pytest.raises(OutriderError, match="the request makes 1") as caught:
        await anext(stream.generate(TokenRequest([5], 5, prediction=[4000] * 9_000_000)))
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE
    assert await good
