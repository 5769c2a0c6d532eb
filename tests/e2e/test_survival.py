"""Fifty streams lose a verifier that is killed, and each has the text that it would have had.

Two real verifiers with a drafter for both, and a real gateway. A text may differ where the two best
candidates of a draw are as close as float32 rounding. None of these requests has such a draw.
"""

from __future__ import annotations

import asyncio
import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest
from stack import TARGET, Process, Stack

from outrider.process.ports import free_port
from outrider_bench.chaos.requests import COUNT, Answer, body
from outrider_bench.raw_client import stream

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
    """Two verifiers, a drafter for both, and a gateway."""

    def __init__(self) -> None:
        self.stacks = [Stack(), Stack()]
        addresses = [part for stack in self.stacks for part in ("--verifier", stack.address)]
        self.drafter = Process("drafter_svc", "--family", "ngram", "--id", "ngram-1", *addresses)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        ports = ["--http-port", str(self.port), "--grpc-listen", "127.0.0.1:0"]
        self.gateway = Process("gateway", "--tokenizer", TARGET, *addresses, *ports)

    def wait_ready(self) -> None:
        """Wait until both verifiers serve and the gateway knows it."""
        for stack in self.stacks:
            stack.wait_ready()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.gateway.popen.poll() is None, self.gateway.output()
            try:
                states = httpx.get(f"{self.url}/readyz").json()
            except httpx.TransportError:
                states = {}
            if states.get("status") == "ready":
                return
            time.sleep(0.1)
        raise AssertionError(f"not ready: {states}\n{self.gateway.output()}")

    def stop(self) -> None:
        for process in (self.gateway, self.drafter):
            process.stop()
            process.log.close()
        for stack in self.stacks:
            stack.stop()

    def resumed(self) -> int:
        """How many sequences have gone on at another verifier."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(
            int(float(line.split()[-1]))
            for line in lines
            if line.startswith("outrider:request_resumed_total")
        )


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    made = Site()
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


@dataclass
class Round:
    """The answers to all streams at once."""

    site: Site
    moment: float = math.inf
    """After how many characters of all texts together `then` is called."""
    then: Callable[[], object] = lambda: None
    character_count: int = 0

    async def answers(self) -> list[Answer]:
        return await asyncio.gather(*(self._read(number) for number in range(STREAMS)))

    async def _read(self, number: int) -> Answer:
        blocks = []
        # The client must not be slower than the stack, so it parses nothing until the end.
        async for block in stream(self.site.port, body(number), {}):
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


async def lose_one(
    site: Site, wanted: list[Answer], length: int, number: int, how: signal.Signals
) -> None:
    """Send a signal to a verifier in the middle, and compare all answers.

    The texts of all answers together have `length` characters.
    """
    verifier = site.stacks[number % 2].verifier
    # At another moment in each of ten rounds: after 5 to 50 % of all characters.
    moment = length * (0.05 + 0.5 * (number * 7 % 10) / 10)
    resumed = site.resumed()
    found = await Round(site, moment, lambda: verifier.popen.send_signal(how)).answers()
    assert len(found) == STREAMS
    for answer, other in zip(found, wanted, strict=True):
        must_equal(answer, other)
    # One that was told to stop has handed everything over, and has nothing to wait for.
    assert verifier.popen.wait(15) == (0 if how is signal.SIGTERM else -how)
    assert site.resumed() - resumed > 0
    verifier.start()
    site.wait_ready()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_no_stream_notices_the_loss_of_its_verifier(site: Site, how: signal.Signals) -> None:
    undisturbed = Round(site)
    wanted = await undisturbed.answers()
    assert len({answer.choices["0"].text for answer in wanted}) > STREAMS / 2
    await lose_one(site, wanted, undisturbed.character_count, 4, how)


@pytest.mark.slow
async def test_no_stream_notices_the_loss_of_its_verifier_ten_times(site: Site) -> None:
    undisturbed = Round(site)
    wanted = await undisturbed.answers()
    for number in range(10):
        await lose_one(site, wanted, undisturbed.character_count, number, signal.SIGKILL)


@pytest.mark.slow
async def test_streams_wait_for_the_only_verifier_to_restart(site: Site) -> None:
    undisturbed = Round(site)
    wanted = await undisturbed.answers()
    other, only = (stack.verifier for stack in site.stacks)
    other.kill()

    def restart() -> None:
        only.kill()
        only.start()

    found = await Round(site, undisturbed.character_count / 2, restart).answers()
    for answer, expected in zip(found, wanted, strict=True):
        must_equal(answer, expected)
    other.start()
    site.wait_ready()
