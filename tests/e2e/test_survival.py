"""Fifty streams lose a verifier that is killed, and each has the text that it would have had.

Two real verifiers with a drafter for both, and a real gateway, in float32, and in bfloat16 also
with SmolLM2. Our C decoder gives a row the same bits in every forward, so the text is promised.
"""

from __future__ import annotations

import asyncio
import math
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest

from outrider_bench.chaos.requests import COUNT, Answer, body
from outrider_bench.raw_client import stream
from tests.smollm2_texts import smollm2
from tests.stack import TARGET, GatewayProcess, Process, Stack, running

# The quick suite loses verifiers before a real gateway (tests/gateway/test_lost_sequences.py), goes
# on in a real engine (tests/verifier/test_continuation.py) and over gRPC (test_fingerprints.py).
pytestmark = pytest.mark.slow

STREAMS = COUNT
# Good enough to see how far the streams are: a text may be cut in two.
TEXT = re.compile(rb'"text":"([^"]*)')


def must_equal(answer: Answer, other: Answer) -> None:
    """Check that two answers came whole and are the same but for the rounding of logprobs."""
    assert (answer.code, answer.problems, answer.is_done) == ("", [], True)
    assert answer.usage == other.usage
    assert answer.choices.keys() == other.choices.keys()
    for index, choice in answer.choices.items():
        wanted = other.choices[index]
        assert (choice.text, choice.reason) == (wanted.text, wanted.reason)
        assert choice.tokens == wanted.tokens
        assert choice.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


class Site:
    """A gateway before two verifiers with a common drafter. The tests end the verifier `lost`."""

    def __init__(self, stays: Stack, dtype: str, target: str) -> None:
        self.target = target
        self.lost = Stack(dtype=dtype, target=target)
        addresses = [stays.address, self.lost.address]
        dialled = [word for address in addresses for word in ("--verifier", address)]
        self.drafter = Process("drafter_svc", "--family", "ngram", "--id", "shared", *dialled)
        self.gateway = GatewayProcess(*addresses, tokenizer=target)

    def wait_ready(self) -> None:
        """Start the lost verifier if it has ended, and wait until the gateway has both."""
        if self.lost.verifier.popen.poll() is not None:
            self.lost.verifier.start()
        self.lost.wait_ready()
        self.gateway.wait_ready()

    def stop(self) -> None:
        self.gateway.close()
        self.drafter.stop()
        self.drafter.log.close()
        self.lost.stop()

    def resumed(self) -> int:
        """How many sequences have gone on at another verifier."""
        lines = httpx.get(f"{self.gateway.url}/metrics").text.splitlines()
        return sum(
            int(float(line.split()[-1]))
            for line in lines
            if line.startswith("outrider:request_resumed_total")
        )


@pytest.fixture(scope="module", params=["float32", "bfloat16", "smollm2"])
def shared_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """The bundled target in either type, or SmolLM2 in bfloat16."""
    dtype = "float32" if request.param == "float32" else "bfloat16"
    target = smollm2() if request.param == "smollm2" else TARGET
    with ExitStack() as own:
        if request.param == "float32":
            stays = request.getfixturevalue("stack")
        else:
            stays = own.enter_context(running(Stack(dtype=dtype, target=target)))
        made = Site(stays, dtype, target)
        own.callback(made.stop)
        yield made


@pytest.fixture
def site(shared_site: Site) -> Site:
    shared_site.wait_ready()
    return shared_site


@dataclass
class Round:
    """The answers to all streams at once."""

    gateway: GatewayProcess
    moment: float = math.inf
    """After how many characters of all texts together `then` is called."""
    then: Callable[[], object] = lambda: None
    character_count: int = 0

    async def answers(self) -> list[Answer]:
        return await asyncio.gather(*(self._read(number) for number in range(STREAMS)))

    async def _read(self, number: int) -> Answer:
        blocks = []
        # The client must not be slower than the stack, so it parses nothing until the end.
        async for block in stream(self.gateway.port, body(number), {}):
            blocks.append(block)
            self._count(sum(map(len, TEXT.findall(block))))
        answer = Answer()
        for line in b"".join(blocks).decode().splitlines():
            answer.add(line)
        return answer

    def _count(self, characters: int) -> None:
        before = self.character_count
        self.character_count += characters
        if before < self.moment <= self.character_count:
            self.then()


@dataclass
class Calm:
    """The answers when nothing is lost, and the number of characters of all their texts."""

    answers: list[Answer]
    character_count: int


@pytest.fixture(scope="module")
def calm(shared_site: Site) -> Calm:
    shared_site.wait_ready()
    undisturbed = Round(shared_site.gateway)
    answers = asyncio.run(undisturbed.answers())
    assert len({answer.choices["0"].text for answer in answers}) > STREAMS / 2
    return Calm(answers, undisturbed.character_count)


async def disturbed(
    gateway: GatewayProcess, calm: Calm, share: float, then: Callable[[], object]
) -> None:
    """Call `then` after this share of all characters, and compare the answers with calm ones."""
    moment = max(1.0, share * calm.character_count)
    found = await Round(gateway, moment, then).answers()
    assert len(found) == STREAMS
    for answer, other in zip(found, calm.answers, strict=True):
        must_equal(answer, other)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_no_stream_notices_the_loss_of_its_verifier(
    site: Site, calm: Calm, how: signal.Signals
) -> None:
    """Each round loses the verifier earlier, until sequences have gone on at the other one.

    On a busy machine the verifier may have written all its texts before the client has read the
    characters that the round waits for.
    """
    verifier = site.lost.verifier
    for share in (0.3, 0.1, 0.0):
        await asyncio.to_thread(site.wait_ready)
        resumed = site.resumed()
        await disturbed(site.gateway, calm, share, lambda: verifier.popen.send_signal(how))
        # One that was told to stop has handed everything over, and has nothing to wait for.
        status = await asyncio.to_thread(verifier.popen.wait, 30)
        assert status == (0 if how is signal.SIGTERM else -how)
        if site.resumed() > resumed:
            return
    pytest.fail("in no round has a sequence gone on at the other verifier")


async def test_streams_wait_for_the_only_verifier_to_restart(site: Site, calm: Calm) -> None:
    only = site.lost

    def restart() -> None:
        only.verifier.kill()
        only.verifier.start()

    # A verifier's start takes longer than the default on a busy machine.
    flags = ("--resume-seconds", "240")
    gateway = GatewayProcess(only.address, flags=flags, tokenizer=site.target)
    try:
        await asyncio.to_thread(gateway.wait_ready)
        await disturbed(gateway, calm, 0.5, restart)
    finally:
        await asyncio.to_thread(gateway.close)
