"""One drafter process drafts for two verifiers; their texts are those of plain decoding."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest
from stack import Client, Process, Stack, running  # lies beside this file
from test_same_seed import PLAIN, PROMPTS, SETTINGS, request

from outrider.protocol.messages import SamplingParams, SpeculationOptions

SHARED = SpeculationOptions(drafter_id="shared")
GREEDY = SamplingParams(0.0)


@pytest.fixture(scope="module")
def verifiers() -> Iterator[tuple[Stack, Stack]]:
    """Two verifiers that wait for drafts, and one drafter process for both."""
    first = Stack("--always-draft")
    second = Stack("--always-draft")
    first.add_drafter("shared", "model", "--verifier", second.address)
    # The first stack's process; both stacks wait until it is connected.
    second.drafters["shared"] = first.drafters["shared"]
    with running(first), running(second):
        yield first, second


async def texts(
    client: Client, options: SpeculationOptions, sampling: SamplingParams
) -> list[list[int]]:
    """Texts of all prompts, requested at once."""
    requests = [request(i, options, sampling) for i in range(len(PROMPTS))]
    return await asyncio.gather(*(client.tokens(one) for one in requests))


async def accepted(client: Client) -> int:
    """Number of the shared drafter's tokens that were accepted in four requests."""
    answers = await asyncio.gather(*(client.generate(request(i, SHARED)) for i in range(4)))
    stats = [answer[-1].stats for answer in answers]
    return sum(found.accepted_token_count for found in stats if found is not None)


async def disturb(verifier: Process, until: asyncio.Event) -> int:
    """Pause and resume, kill and restart the verifier, `until` is set; return the rounds."""
    rounds = 0
    while not until.is_set():
        verifier.popen.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        verifier.popen.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.3)
        verifier.kill()
        verifier.start()
        await asyncio.sleep(2.0)
        rounds += 1
    return rounds


@pytest.mark.slow
async def test_texts_of_both_verifiers_equal_plain_decoding_under_load(
    verifiers: tuple[Stack, Stack],
) -> None:
    async with Client(verifiers[0].address) as one, Client(verifiers[1].address) as two:
        for sampling in (GREEDY, SETTINGS[0]):
            expected = await texts(one, PLAIN, sampling)
            for _ in range(2):
                both = (texts(one, SHARED, sampling), texts(two, SHARED, sampling))
                assert await asyncio.gather(*both) == [expected, expected]
        assert min(await asyncio.gather(accepted(one), accepted(two))) > 20


@pytest.mark.slow
async def test_a_failing_verifier_does_not_disturb_the_drafts_of_the_other(
    verifiers: tuple[Stack, Stack],
) -> None:
    stays, suffers = verifiers
    stopping = asyncio.Event()
    async with Client(stays.address) as client:
        expected = await texts(client, PLAIN, GREEDY)
        disturbing = asyncio.create_task(disturb(suffers.verifier, stopping))
        began = time.monotonic()
        while time.monotonic() - began < 10:
            assert await texts(client, SHARED, GREEDY) == expected
            assert await accepted(client) > 20
        stopping.set()
        assert await disturbing >= 2
    suffers.wait_ready()
    async with Client(suffers.address) as client:
        assert await texts(client, SHARED, GREEDY) == expected
        assert await accepted(client) > 20
