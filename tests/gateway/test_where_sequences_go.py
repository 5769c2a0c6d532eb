"""A sequence continues only at a verifier that can finish its text, and is not retried for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.text.prompts import Prompts
from outrider.errors import OutriderError, Reason
from outrider.internal.v1.token_streams_pb2 import TokensPart
from outrider.protocol.messages import FinishReason, TokenRequest
from tests.gateway.gateway_rig import events_of
from tests.gateway.mortal_verifiers import LOST, TEXT, Site, running_site, text_of
from tests.gateway.scripted_verifier import Step, last, plain
from tests.waiting import until
from verifier_svc.streams.gateway_streams import GatewayStream

pytestmark = pytest.mark.asyncio(loop_scope="session")

FULL = OutriderError(Reason.OVERLOADED, "the queue is full")
HANGS = OutriderError(Reason.NOT_READY, "the verifier's step has taken 61 s")


async def change_second(site: Site, **changes: Any) -> None:
    """Let the second verifier report a changed model, and wait until the gateway knows it."""
    changed = replace(site.second.script.info, **changes)
    site.second.script.info = changed
    await until(lambda: site.gateway.router.replicas[1].info == changed)


@pytest.mark.parametrize("progress", [0, 1])
async def test_a_request_that_ends_each_verifier_is_given_up(site: Site, progress: int) -> None:
    def steps(request: TokenRequest) -> list[Step]:
        done = len(request.committed)
        return [*(plain([token]) for token in site.ids[done : max(3, done + progress)]), LOST]

    for verifier in (site.first, site.second):
        verifier.script.answer = steps
    response = await site.ask(stream=True)
    assert events_of(response)[-1]["error"]["code"] == "verifier_unavailable"
    begun = len(site.first.script.requests) + len(site.second.script.requests)
    assert begun == 5


@pytest.mark.parametrize(
    "changes",
    [{"context_length": 500}, {"model_id": "other"}, {"vocab_size": 5000}, {"eos_token_ids": (0,)}],
    ids=str,
)
async def test_a_sequence_does_not_go_on_where_it_cannot(
    site: Site, changes: dict[str, Any]
) -> None:
    """1 + 500 tokens do not fit into a context of 500; another model would write another text."""
    await change_second(site, **changes)
    asked = await site.begin(3, stream=True)
    await site.first.kill()
    site.writes(site.first)
    await site.first.start()
    assert text_of(await asked) == TEXT
    assert site.second.script.requests == []


@pytest.mark.parametrize("trouble", ["drains", "hangs"])
async def test_sequences_stay_where_no_other_verifier_can_finish_them(
    site: Site, trouble: str
) -> None:
    await change_second(site, context_length=500)
    asked = await site.pauses(0.5, stream=True)
    if trouble == "drains":
        site.first.drain()
    else:
        site.first.script.refusal = HANGS
    await site.known_lost(0)
    assert text_of(await asked) == TEXT
    assert site.second.script.requests == []


async def test_sequences_leave_a_verifier_whose_engine_hangs(site: Site) -> None:
    """Such a verifier answers polls and pings, so no connection breaks."""
    asked = await site.begin(3, stream=True)
    site.first.script.refusal = HANGS
    assert text_of(await asked) == TEXT
    [goes_on] = site.second.script.requests
    assert goes_on.committed == site.ids[:3]


def fills_up(site: Site, refusals: int) -> None:
    """Let both verifiers begin answers; together they refuse `refusals` times to continue one."""
    continued: list[TokenRequest] = []

    def steps(request: TokenRequest) -> list[Step]:
        if not request.committed:
            return [plain(site.ids[:3]), FULL]
        continued.append(request)
        if len(continued) <= refusals:
            return [FULL]
        return [*(plain([token]) for token in site.ids[3:]), last([3], FinishReason.STOP)]

    site.first.script.answer = site.second.script.answer = steps


async def test_a_sequence_that_has_begun_waits_while_all_queues_are_full(site: Site) -> None:
    fills_up(site, refusals=12)
    assert text_of(await site.ask(stream=True)) == TEXT


async def test_sequences_go_on_when_the_verifier_cuts_off_a_slow_gateway(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = OutriderError(Reason.SLOW_READER, "67108864 bytes are unread")
    asked = await site.pauses(0.3, stream=True)
    site.writes(site.second)
    send = GatewayStream._send
    cut: list[GatewayStream] = []

    def cut_off(stream: GatewayStream, part: TokensPart) -> None:
        if not cut:
            cut.append(stream)
            stream._ended.set_exception(slow)
        if stream is not cut[0]:
            send(stream, part)

    monkeypatch.setattr(GatewayStream, "_send", cut_off)
    assert text_of(await asked) == TEXT


async def test_a_deadline_that_passes_while_no_verifier_is_ready_has_its_own_error(
    site: Site,
) -> None:
    asked = await site.begin(3, stream=True, timeout=1)
    for verifier in (site.first, site.second):
        await verifier.kill()
    assert events_of(await asked)[-1]["error"]["code"] == "deadline_exceeded"


async def test_full_queues_are_not_asked_for_longer_than_the_time_to_wait(
    prompts: Prompts,
) -> None:
    async with running_site(prompts, poll_s=0.1, resume_seconds=0.5) as site:
        fills_up(site, refusals=1000)
        response = await site.ask(stream=True)
        assert events_of(response)[-1]["error"]["code"] == "overloaded"
        # Each verifier is asked once between two polls.
        asked = len(site.first.script.requests) + len(site.second.script.requests)
        assert 5 < asked < 30


async def test_a_new_request_that_finds_a_full_queue_goes_where_room_is(site: Site) -> None:
    site.writes(site.first, 0, FULL)
    site.writes(site.second)
    assert text_of(await site.ask(stream=True)) == TEXT


async def test_a_verifier_that_hung_up_but_is_well_is_used_at_once(prompts: Prompts) -> None:
    async with running_site(prompts, poll_s=60.0) as site:
        site.gateway.router.replicas[1].mark_lost(LOST)
        site.writes(site.first, 3)
        asked = site.ask(stream=True)
        await site.sent(site.first, 3)
        site.writes(site.first)
        site.first.script.hangs_up = True
        assert text_of(await asked) == TEXT
        assert len(site.first.script.requests) == 2


async def test_the_end_of_an_earlier_connection_says_nothing_of_the_verifier(
    prompts: Prompts,
) -> None:
    async with running_site(prompts, poll_s=60.0) as site:
        asked = await site.begin(3, stream=True)
        replica = site.gateway.router.replicas[0]
        replica.redial()
        site.first.script.hangs_up = True
        assert text_of(await asked) == TEXT
        assert len(site.second.script.requests) == 1
        assert replica.problem is None
