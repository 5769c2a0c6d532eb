"""One drafter process for several verifiers: trouble with one does not disturb the others."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from counting_drafter import opened
from prometheus_client.parser import text_string_to_metric_families
from scripted_drafts import READY, ScriptedVerifier, Stream
from test_drafter_process import NOT_SERVING, SERVING, drafter, health

from outrider.errors import OutriderError, Reason
from outrider.process.ports import free_port
from outrider.protocol.draft_messages import DraftBatch, StepBatch

STRANGE = replace(READY, tokenizer_fingerprint="0" * 64)


@pytest.fixture
async def other() -> AsyncIterator[ScriptedVerifier]:
    verifier = ScriptedVerifier()
    await verifier.start()
    yield verifier
    await verifier.stop()


def address(verifier: ScriptedVerifier) -> str:
    return f"127.0.0.1:{verifier.port}"


def flags(*verifiers: ScriptedVerifier) -> list[str]:
    """Settings of an n-gram drafter for all these verifiers."""
    addresses = [word for each in verifiers for word in ("--verifier", address(each))]
    return ["--family", "ngram", "--id", "d1", *addresses]


async def drafted(stream: Stream, text: list[int], sequence_id: int = 1) -> list[int]:
    """Open a sequence with this text; returns the drafter's guesses."""
    stream.send(StepBatch(opened=[opened(sequence_id, text)]))
    batch = await stream.receive()
    assert isinstance(batch, DraftBatch)
    [proposal] = batch.proposals
    assert proposal.sequence_id == sequence_id
    return proposal.token_ids


async def becomes(port: int, status: int) -> None:
    deadline = time.monotonic() + 30
    while await health(port) != status:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def gauges(port: int) -> dict[str, float]:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {sample.name.removeprefix("outrider:drafter_"): sample.value for sample in samples}


async def test_equal_sequence_ids_of_two_verifiers_are_separate(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    async with drafter(*flags(verifier, other)):
        one = await verifier.accepted()
        two = await other.accepted()
        assert one.hello.drafter_id == two.hello.drafter_id == "d1"
        assert (await drafted(one, [5, 6, 7, 8, 5, 6]))[:2] == [7, 8]
        assert (await drafted(two, [5, 6, 9, 10, 5, 6]))[:2] == [9, 10]


async def test_addresses_may_be_separated_by_commas(
    verifier: ScriptedVerifier, other: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFTER_VERIFIER", f"{address(verifier)}, {address(other)}")
    async with drafter("--family", "ngram"):
        await verifier.accepted()
        await other.accepted()


async def test_a_verifiers_restart_does_not_disturb_the_other(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    port = free_port()
    async with drafter(*flags(verifier, other), "--listen", f"127.0.0.1:{port}"):
        await verifier.accepted()
        stays = await other.accepted()
        await verifier.stop()
        assert (await drafted(stays, [5, 6, 7, 8, 5, 6]))[:2] == [7, 8]
        assert await health(port) == SERVING
        await verifier.start()
        again = await verifier.accepted()
        assert (await drafted(again, [5, 6, 9, 10, 5, 6]))[:2] == [9, 10]
        assert other.streams.empty()


async def test_it_is_serving_while_registered_with_any_verifier(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    port = free_port()
    await verifier.stop()
    async with drafter(*flags(verifier, other), "--listen", f"127.0.0.1:{port}"):
        await other.accepted()
        await becomes(port, SERVING)
        await other.stop()
        await becomes(port, NOT_SERVING)
        await verifier.start()
        await verifier.accepted()
        await becomes(port, SERVING)


@pytest.mark.parametrize("silence", ["stops_reading", "silent"])
async def test_a_hanging_verifier_does_not_disturb_the_other(
    silence: str, other: ScriptedVerifier
) -> None:
    hanging = ScriptedVerifier(stops_reading=silence == "stops_reading", silent=silence == "silent")
    await hanging.start()
    try:
        async with drafter(*flags(hanging, other)) as process:
            unread = await hanging.accepted()
            stays = await other.accepted()
            sequences = [opened(i, [100 + i, 101 + i, 102 + i, 100 + i]) for i in range(300)]
            unread.send(StepBatch(opened=sequences))
            for i in range(20):
                assert (await drafted(stays, [5, 6, 7, 8, 5, 6], i))[:2] == [7, 8]
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        await hanging.stop()


async def test_after_a_refusal_the_other_verifier_is_still_drafted_for(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    verifier.info = STRANGE
    async with drafter(*flags(verifier, other)) as process:
        refused = await verifier.accepted()
        stays = await other.accepted()
        await asyncio.sleep(1.0)
        assert (await drafted(stays, [5, 6, 7, 8, 5, 6]))[:2] == [7, 8]
        assert refused.hello.tokenizer_fingerprint == STRANGE.tokenizer_fingerprint
        assert verifier.streams.empty()
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0
        assert f"{address(verifier)} refuses this drafter for good" in log.decode()


async def test_it_ends_with_every_reason_once_all_refuse(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    verifier.info = STRANGE
    async with drafter(*flags(verifier, other)) as process:
        await verifier.accepted()
        last = await other.accepted()
        assert await lives_on(process)
        message = "hello.family must be another"
        last.send(OutriderError(Reason.INVALID_VALUE, message, "hello.family"))
        _, error = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 1
        sentence = error.decode().splitlines()[-1]
        assert sentence.startswith("drafter: every verifier refuses this drafter: ")
        theirs = STRANGE.tokenizer_fingerprint
        assert f"{address(verifier)}: the drafter's tokenizer is {theirs}" in sentence
        assert f"{address(other)}: hello.family must be another" in sentence


async def lives_on(process: asyncio.subprocess.Process) -> bool:
    """Whether the process still runs after half a second."""
    await asyncio.sleep(0.5)
    return process.returncode is None


async def test_its_gauges_are_sums_over_the_verifiers(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    port = free_port()
    health_port = free_port()
    listening = ["--metrics-port", str(port), "--listen", f"127.0.0.1:{health_port}"]
    async with drafter(*flags(verifier, other), *listening):
        one = await verifier.accepted()
        two = await other.accepted()
        for stream, count in ((one, 1), (two, 2)):
            for i in range(count):
                await drafted(stream, [5, 6, 7, 8, 5, 6], i)
        values = await gauges(port)
        assert (values["connected"], values["sequences"]) == (2, 3)
        await other.stop()
        deadline = time.monotonic() + 30
        while (values := await gauges(port))["connected"] != 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert values["sequences"] == 1
        await asyncio.sleep(0.1)
        assert await health(health_port) == SERVING


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["--verifier", "a:1", "--verifier", "b:1", "--uds", "/tmp/a"],
            "uds: must name one socket for each verifier",
        ),
        (
            ["--verifier", "a:1", "--uds", "/tmp/a", "--uds", "/tmp/b"],
            "in the same order, not 2 for 1",
        ),
        (["--verifier", "a:1,b:1", "--verifier", "a:1"], "verifier: names a:1 more than once"),
        (
            ["--verifier", "a:1,,b:1"],
            "verifier: must name host:port, with nothing empty between commas",
        ),
    ],
)
async def test_bad_addresses_are_refused(arguments: list[str], named: str) -> None:
    async with drafter("--family", "ngram", *arguments) as process:
        _, error = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 2
        assert named in error.decode()


async def test_each_verifiers_own_socket_is_dialled(tmp_path: Path) -> None:
    """Nothing listens at the addresses."""
    one = ScriptedVerifier(uds=tmp_path / "one")
    two = ScriptedVerifier(uds=tmp_path / "two")
    await one.start()
    await two.start()
    try:
        sockets = [word for each in (one, two) for word in ("--uds", str(each.uds))]
        async with drafter("--family", "ngram", "--verifier", "127.0.0.1:1,127.0.0.2:1", *sockets):
            assert (await drafted(await one.accepted(), [5, 6, 7, 8, 5, 6]))[:2] == [7, 8]
            assert (await drafted(await two.accepted(), [5, 6, 9, 10, 5, 6]))[:2] == [9, 10]
    finally:
        await one.stop()
        await two.stop()
