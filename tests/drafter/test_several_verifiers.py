"""One drafter process for several verifiers: trouble with one does not disturb the others."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from outrider.errors import OutriderError, Reason
from outrider.process.network import rpc_errors
from outrider.process.network.ports import free_port
from outrider.protocol.draft_messages import StepBatch
from tests.drafter.counting_drafter import opened
from tests.drafter.drafter_process import NOT_SERVING, SERVING, drafter, health
from tests.drafter.scripted_drafts import ScriptedVerifier, serving
from tests.waiting import until


def flags(*verifiers: ScriptedVerifier) -> list[str]:
    """Return the settings of an n-gram drafter for all these verifiers."""
    addresses = [word for each in verifiers for word in ("--verifier", each.address)]
    return ["--family", "ngram", "--id", "d1", *addresses]


async def gauges(port: int) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {sample.name.removeprefix("outrider:drafter_"): sample.value for sample in samples}


async def becomes(port: int, connected: int) -> float:
    """Wait until the drafter has `connected` streams; return its number of sequences."""
    deadline = time.monotonic() + 30
    while (values := await gauges(port))["connected"] != connected:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    return values["sequences"]


async def test_a_verifiers_restart_does_not_disturb_the_other(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    """Both verifiers have a sequence with the same id."""
    async with drafter(*flags(verifier, other)):
        first = await verifier.accepted()
        stays = await other.accepted()
        assert first.said.drafter_id == stays.said.drafter_id == "d1"
        assert (await first.drafted(opened(1, [5, 6, 7, 8, 5, 6])))[:2] == [7, 8]
        await verifier.stop()
        assert (await stays.drafted(opened(1, [5, 6, 9, 10, 5, 6])))[:2] == [9, 10]
        await verifier.start()
        again = await verifier.accepted()
        assert (await again.drafted(opened(1, [5, 6, 3, 4, 5, 6])))[:2] == [3, 4]
        assert other.streams.empty()


async def test_hanging_verifiers_do_not_disturb_another(other: ScriptedVerifier) -> None:
    async with (
        serving(ScriptedVerifier(stops_reading=True)) as deaf,
        serving(ScriptedVerifier(silent=True)) as silent,
        drafter(*flags(deaf, silent, other)) as process,
    ):
        stays = await other.accepted()
        sequences = [opened(i, [100 + i, 101 + i, 102 + i, 100 + i]) for i in range(300)]
        for each in (deaf, silent):
            (await each.accepted()).send(StepBatch(opened=sequences))
        for i in range(20):
            assert (await stays.drafted(opened(i, [5, 6, 7, 8, 5, 6])))[:2] == [7, 8]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_it_drafts_on_after_a_refusal_and_ends_with_every_reason_once_all_refuse(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    strange = OutriderError(Reason.TOKENIZER_MISMATCH, "the drafter's tokenizer is another")
    verifier.refusal = rpc_errors.status_of(strange)
    async with drafter(*flags(verifier, other)) as process:
        await until(lambda: verifier.attempts)
        last = await other.accepted()
        # A drafter that came back would do so within this time.
        await asyncio.sleep(0.5)
        assert (await last.drafted(opened(1, [5, 6, 7, 8, 5, 6])))[:2] == [7, 8]
        assert len(verifier.attempts) == 1
        message = "hello.family must be another"
        last.send(OutriderError(Reason.INVALID_VALUE, message, "hello.family"))
        _, error = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 1
        assert f"{verifier.address} refuses this drafter for good" in error.decode()
        sentence = error.decode().splitlines()[-1]
        assert sentence.startswith("drafter: every verifier refuses this drafter: ")
        assert f"{verifier.address}: {strange.message}" in sentence
        assert f"{other.address}: hello.family must be another" in sentence


async def test_its_health_and_its_gauges_are_those_of_all_its_streams(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    port = free_port()
    health_port = free_port()
    listening = ["--metrics-port", str(port), "--listen", f"127.0.0.1:{health_port}"]
    await verifier.stop()
    await other.stop()
    async with drafter(*flags(verifier, other), *listening):
        assert await health(health_port) == NOT_SERVING
        await verifier.start()
        await other.start()
        for each, count in ((verifier, 1), (other, 2)):
            stream = await each.accepted()
            for i in range(count):
                await stream.drafted(opened(i, [5, 6, 7, 8, 5, 6]))
        assert await becomes(port, connected=2) == 3
        await other.stop()
        assert await becomes(port, connected=1) == 1
        assert await health(health_port) == SERVING
        await verifier.stop()
        assert await becomes(port, connected=0) == 0
        assert await health(health_port) == NOT_SERVING


async def test_each_verifiers_own_socket_is_dialled(tmp_path: Path) -> None:
    """The verifiers listen only at their sockets, not at their addresses."""
    uds = [word for name in ("one", "two") for word in ("--uds", str(tmp_path / name))]
    async with (
        serving(ScriptedVerifier(), f"unix:{tmp_path}/one") as one,
        serving(ScriptedVerifier(), f"unix:{tmp_path}/two") as two,
        drafter("--family", "ngram", "--verifier", "127.0.0.1:1,127.0.0.2:1", *uds),
    ):
        for each, text in ((one, [5, 6, 7, 8, 5, 6]), (two, [5, 6, 9, 10, 5, 6])):
            assert (await (await each.accepted()).drafted(opened(1, text)))[:2] == text[2:4]
