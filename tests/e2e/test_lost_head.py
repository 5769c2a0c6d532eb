"""Texts stay as they are when the process of a head is killed, or stops, while it drafts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from outrider.protocol.messages import SamplingParams, SpeculationOptions
from tests.stack import ROOT, TARGET, Client, Process, Stack, prompts, running

# tests/losslessness/test_heads.py loses each kind of head, in one process.
pytestmark = pytest.mark.slow

HEAD = str(ROOT / "models/heads/eagle3")
PLAIN = SpeculationOptions(enabled=False)
SETTINGS = [SamplingParams(0.0), SamplingParams(0.9, seed=7)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    stack.add_drafter("head-1", "head", "--head", HEAD, "--target", TARGET, "--threads", "1")
    with running(stack):
        yield stack


async def texts(client: Client, how: SpeculationOptions) -> list[list[int]]:
    asked = (client.answers(prompts(every=10), sampling, how, 64) for sampling in SETTINGS)
    return [text for answers in await asyncio.gather(*asked) for text in answers.texts]


async def drafted(client: Client) -> None:
    """Wait until a draft of the head has been judged."""
    while True:
        if any(each.acceptance_rate for each in (await client.model()).drafters):
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_texts_equal_plain_ones_when_the_head_is_lost(
    stack: Stack, how: signal.Signals
) -> None:
    await asyncio.to_thread(stack.wait_ready)
    head: Process = stack.drafters["head-1"]
    async with Client(stack.address) as client:
        wanted = await texts(client, PLAIN)
        options = SpeculationOptions(drafter_family="head", always_draft=True)
        asked = asyncio.create_task(texts(client, options))
        await drafted(client)
        assert not asked.done()
        head.popen.send_signal(how)
        assert await asked == wanted
    head.kill()
    head.start()
