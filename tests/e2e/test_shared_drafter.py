"""One drafter process with one draft model for two verifiers: their texts are what each would write alone."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest
from stack import Client, Process, Stack, running  # lies beside this file
from test_same_seed import PLAIN, PROMPTS, SETTINGS, request

from outrider.messages import SamplingParams, SpeculationOptions

SHARED = SpeculationOptions(drafter="shared")
GREEDY = SamplingParams(0.0)


@pytest.fixture
def verifiers() -> Iterator[tuple[Stack, Stack]]:
    """Two verifiers that wait for drafts, and one drafter process for both."""
    first, second = Stack("--always-draft"), Stack("--always-draft")
    first.add_drafter("shared", "model", "--verifier", second.address)
    # Of the first stack's process, to wait for it at both.
    second.drafters["shared"] = first.drafters["shared"]
    with running(first), running(second):
        yield first, second


async def texts(
    client: Client, options: SpeculationOptions, sampling: SamplingParams
) -> list[list[int]]:
    """Of all prompts at once."""
    return await asyncio.gather(
        *(client.tokens(request(i, options, sampling)) for i in range(len(PROMPTS)))
    )


async def accepted(client: Client) -> int:
    """Draft tokens of the shared drafter that stood, of some requests."""
    answers = await asyncio.gather(*(client.generate(request(i, SHARED)) for i in range(4)))
    return sum(
        answer[-1].stats.accepted_token_count for answer in answers if answer[-1].stats is not None
    )


async def torment(verifier: Process, until: asyncio.Event) -> int:
    """Pause the verifier and go on, kill it and start it anew, until told to stop; how often."""
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
async def test_texts_of_both_verifiers_under_load_equal_plain_decoding(
    verifiers: tuple[Stack, Stack],
) -> None:
    async with Client(verifiers[0].address) as one, Client(verifiers[1].address) as two:
        for sampling in (GREEDY, SETTINGS[0]):
            expected = await texts(one, PLAIN, sampling)
            for _ in range(2):
                assert await asyncio.gather(
                    texts(one, SHARED, sampling), texts(two, SHARED, sampling)
                ) == [expected, expected]
        assert min(await asyncio.gather(accepted(one), accepted(two))) > 20


@pytest.mark.slow
async def test_a_verifier_that_hangs_dies_and_restarts_costs_the_other_no_drafts(
    verifiers: tuple[Stack, Stack],
) -> None:
    stays, suffers = verifiers
    stopping = asyncio.Event()
    async with Client(stays.address) as client:
        expected = await texts(client, PLAIN, GREEDY)
        tormentor = asyncio.create_task(torment(suffers.verifier, stopping))
        began = time.monotonic()
        while time.monotonic() - began < 10:
            assert await texts(client, SHARED, GREEDY) == expected
            assert await accepted(client) > 20
        stopping.set()
        assert await tormentor >= 2
    suffers.wait_ready()
    async with Client(suffers.address) as client:
        assert await texts(client, SHARED, GREEDY) == expected
        assert await accepted(client) > 20
