"""Fifty streams lose a verifier that is killed, and each has the text that it would have had.

Two real verifiers with a drafter for both, and a real gateway. A text may differ where the two best
candidates of a draw are as close as float32 rounding. None of these requests has such a draw.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from stack import TARGET, Process, Stack, free_port

from outrider_bench.raw_client import stream

STREAMS = 50
TOKENS = 100
# Good enough to see how far the streams are: a text may be cut in two.
TEXT = re.compile(rb'"text":"([^"]*)')
PROMPTS = (
    "def read(path):\n    ",
    "import os\n\nclass Cache:\n    def get(self, key):\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [",
    "# The parser\n",
)
PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "seeded": {"temperature": 1, "ignore_eos": True},
    "truncated": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "ignore_eos": True},
    "grammar": {"temperature": 1, "regex": "[a-z]{3,9}( = [0-9]{1,4}, [a-z]{1,9}){9,30}"},
    "greedy grammar": {"temperature": 0, "response_format": {"type": "json_object"}},
    "logprobs": {"temperature": 1, "logprobs": 3, "ignore_eos": True},
    "penalties": {"temperature": 1, "ignore_eos": True, **PENALTIES},
    "greedy penalties": {"temperature": 0, "ignore_eos": True, **PENALTIES},
    "n=2": {"temperature": 1, "n": 2, "max_tokens": TOKENS // 2, "ignore_eos": True},
    "stop": {"temperature": 1, "stop": ["return", "\n\n\n", "=="]},
}


def body(number: int) -> dict[str, Any]:
    """The request of a stream: ten kinds, five prompts each."""
    kind = list(KINDS)[number % len(KINDS)]
    prompt = PROMPTS[number // len(KINDS)]
    common = {"prompt": prompt, "seed": (number + 1) * 7919, "max_tokens": TOKENS, "stream": True}
    return common | {"stream_options": {"include_usage": True}} | KINDS[kind]


@dataclass
class Choice:
    """What a client got of one choice."""

    text: str = ""
    reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def must_equal(self, other: Choice) -> None:
        assert (self.text, self.reason, self.tokens) == (other.text, other.reason, other.tokens)
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@dataclass
class Answer:
    """What a client got of one stream."""

    choices: dict[int, Choice] = field(default_factory=dict)
    counts: tuple[int, int] = (0, 0)
    """Prompt and completion tokens."""

    def add(self, event: dict[str, Any]) -> None:
        """Add an event of the stream."""
        assert "error" not in event, event
        for part in event["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            assert choice.reason is None, "a choice goes on after its end"
            choice.text += part["text"]
            choice.reason = part["finish_reason"]
            logprobs = part["logprobs"] or {"tokens": [], "token_logprobs": []}
            choice.tokens += logprobs["tokens"]
            choice.logprobs += logprobs["token_logprobs"]
        if event["usage"]:
            usage = event["usage"]
            self.counts = (usage["prompt_tokens"], usage["completion_tokens"])

    def must_equal(self, other: Answer) -> None:
        assert self.counts == other.counts
        assert self.choices.keys() == other.choices.keys()
        for index, choice in self.choices.items():
            choice.must_equal(other.choices[index])


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
        for line in b"".join(blocks).splitlines():
            if line.startswith(b"data: {"):
                answer.add(json.loads(line.removeprefix(b"data: ")))
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
    # At another moment in each round: after 5 to 53 % of all characters.
    moment = length * (0.05 + 0.5 * (number * 7 % 20) / 20)
    resumed = site.resumed()
    found = await Round(site, moment, lambda: verifier.popen.send_signal(how)).answers()
    assert len(found) == STREAMS
    for answer, other in zip(found, wanted, strict=True):
        answer.must_equal(other)
    # One that was told to stop has handed everything over, and has nothing to wait for.
    assert verifier.popen.wait(5) == (0 if how is signal.SIGTERM else -how)
    assert site.resumed() - resumed > 0
    verifier.start()
    site.wait_ready()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_no_stream_notices_the_loss_of_its_verifier(site: Site, how: signal.Signals) -> None:
    undisturbed = Round(site)
    wanted = await undisturbed.answers()
    assert len({answer.choices[0].text for answer in wanted}) > STREAMS / 2
    await lose_one(site, wanted, undisturbed.character_count, 4, how)


@pytest.mark.slow
async def test_no_stream_notices_the_loss_of_its_verifier_twenty_times(site: Site) -> None:
    undisturbed = Round(site)
    wanted = await undisturbed.answers()
    for number in range(20):
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
        answer.must_equal(expected)
    other.start()
    site.wait_ready()
