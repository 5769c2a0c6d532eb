"""A drafter drafts for all verifiers that a name stands for, while verifiers come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from drafter_svc.config import settings_schema
from outrider.drafter.serve import DraftStreams
from outrider.drafter.stream import DraftStream
from outrider.errors import OutriderError, Reason
from outrider.process.network import addresses, rpc_errors
from outrider.process.network.addresses import Addresses
from tests.drafter.counting_drafter import Drafter, opened
from tests.drafter.drafter_process import drafter
from tests.drafter.scripted_drafts import ScriptedVerifier
from tests.waiting import until

REPEATING = opened(tokens=(5, 6, 7, 8, 5, 6))
STRANGE = OutriderError(Reason.TOKENIZER_MISMATCH, "the drafter's tokenizer is another")


@dataclass
class Name:
    """A DNS name with the addresses of verifiers, and the streams of a drafter that follows it."""

    listed: list[ScriptedVerifier] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    """The addresses of the streams, in the order in which they were made."""
    streams: DraftStreams = field(init=False)

    async def resolve(self, *_: object) -> list[str]:
        return [verifier.address for verifier in self.listed]

    def make(self, address: str) -> DraftStream:
        self.made.append(address)
        return Drafter(int(address.rpartition(":")[2])).stream


@contextlib.asynccontextmanager
async def following(*listed: ScriptedVerifier) -> AsyncIterator[Name]:
    """Let a drafter follow a name that stands for these verifiers at first."""
    name = Name(list(listed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(addresses, "resolve", name.resolve)
        patch.setattr(addresses, "_RESOLVE_S", 0.05)
        name.streams = DraftStreams(Addresses(["dns:name:1"]), name.make)
        task = asyncio.create_task(name.streams.run())
        yield name
        assert not task.done()
        name.streams.stop()
        await asyncio.wait_for(task, 30)


async def test_it_serves_the_verifiers_that_join(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    async with following(verifier) as name:
        assert await (await verifier.accepted()).drafted(REPEATING)
        name.listed = [verifier, other]
        assert await (await other.accepted()).drafted(REPEATING)
        assert len(name.made) == 2


async def test_it_drafts_on_for_a_verifier_that_left_until_the_verifier_ends_the_stream(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    async with following(verifier, other) as name:
        leaving = await verifier.accepted()
        stays = await other.accepted()
        await until(lambda: all(each.is_registered for each, _ in name.streams._streams.values()))
        name.listed = [other]
        await asyncio.sleep(0.3)
        assert await leaving.drafted(REPEATING)
        await verifier.stop()
        await until(lambda: len(name.streams._streams) == 1)
        await verifier.start()
        assert await stays.drafted(REPEATING)
        assert len(verifier.attempts) == 1
        name.listed = [other, verifier]
        assert await (await verifier.accepted()).drafted(REPEATING)


async def test_refusals_do_not_end_it_since_others_may_join(
    verifier: ScriptedVerifier, other: ScriptedVerifier
) -> None:
    verifier.refusal = rpc_errors.status_of(STRANGE)
    async with following(verifier) as name:
        await until(lambda: name.streams._refusals)
        name.listed = [verifier, other]
        assert await (await other.accepted()).drafted(REPEATING)
        assert len(verifier.attempts) == 1


async def test_it_stops_while_nothing_answers_to_the_name() -> None:
    async with following() as name:
        await asyncio.sleep(0.1)
        assert name.made == []


async def test_a_drafter_process_finds_its_verifier_by_name(verifier: ScriptedVerifier) -> None:
    entry = f"dns:localhost:{verifier.port}"
    async with drafter("--family", "ngram", "--verifier", entry):
        assert await (await verifier.accepted()).drafted(REPEATING)


def test_a_name_takes_no_socket() -> None:
    schema = settings_schema("ngram")
    with pytest.raises(ValueError, match="uds: takes no dns:NAME:PORT"):
        schema(family="ngram", verifier=["dns:name:1"], uds=["/x"])
    with pytest.raises(ValueError, match="must name dns:NAME:PORT, not dns:name"):
        schema(family="ngram", verifier=["dns:name"])
