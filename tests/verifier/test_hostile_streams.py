"""Draft streams over real gRPC: bad messages, too many drafters, and drafters that are awaited."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from outrider.errors import OutriderError, Reason
from outrider.process.network import rpc, rpc_errors
from outrider.protocol.model_info import DrafterInfo, ModelInfo, Placement, Stage
from outrider.protocol.wire import model as wire_model
from outrider.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from outrider_bench.experiment.links import ShapedLink
from outrider_bench.experiment.spec import Link
from tests.raw_drafter import RawDrafter
from tests.short_grpc_times import hastened
from tests.verifier.fake_model import VOCAB
from tests.verifier.served_engine import verifier
from verifier_svc.engine.config import EngineConfig
from verifier_svc.streams import servicer


async def test_a_message_that_cannot_be_parsed_counts_against_the_drafter() -> None:
    async with verifier() as served, rpc.dial(served.address) as channel:
        for _ in range(3):
            drafter = RawDrafter(channel, "garbled")
            await drafter.welcomed()
            await drafter.send(b"\xff" * 30)
            error = await drafter.error()
            assert error.reason is Reason.MALFORMED_REQUEST
        with pytest.raises(OutriderError) as caught:
            await RawDrafter(channel, "garbled").welcomed()
        assert caught.value.reason is Reason.QUARANTINED


async def test_drafters_beyond_the_limit_of_an_address_are_refused() -> None:
    async with (
        verifier(config=EngineConfig(max_drafters=12)) as served,
        rpc.dial(served.address) as channel,
    ):
        drafters = [RawDrafter(channel, f"d{number}") for number in range(4)]
        for drafter in drafters[:3]:
            await drafter.welcomed()
        message = "3 drafters of ipv4:127.0.0.1 are connected, a quarter of --max-drafters"
        with pytest.raises(OutriderError, match=message) as caught:
            await drafters[3].welcomed()
        assert await drafters[3].call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (caught.value.reason, caught.value.retry_after_s) == (Reason.OVERLOADED, 5.0)
        drafters[0].call.cancel()
        async with asyncio.timeout(10):
            while True:
                try:
                    await RawDrafter(channel, "later").welcomed()
                    break
                except OutriderError:
                    await asyncio.sleep(0.01)


async def until_free(channel: grpc.aio.Channel, name: str) -> RawDrafter:
    """Retry a Hello until the drafter's id is free."""
    while True:
        drafter = RawDrafter(channel, name)
        try:
            await drafter.welcomed()
            return drafter
        except OutriderError as error:
            if error.reason is not Reason.DRAFTER_ID_TAKEN:
                raise
            await asyncio.sleep(0.05)


async def test_the_id_of_a_drafter_that_vanished_is_soon_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that dies leaves its connection open. All times are a tenth of the real times."""
    monkeypatch.setattr(rpc, "CHANNEL_OPTIONS", hastened(rpc.CHANNEL_OPTIONS))
    monkeypatch.setattr(rpc, "SERVER_OPTIONS", hastened(rpc.SERVER_OPTIONS))
    link = ShapedLink(Link())
    async with (
        verifier() as served,
        link.forward(("127.0.0.1", 0), ("127.0.0.1", served.port)) as port,
        rpc.dial(f"127.0.0.1:{port}") as old,
        rpc.dial(served.address) as new,
    ):
        await RawDrafter(old, "model-1").welcomed()
        with pytest.raises(OutriderError, match="a drafter with the id model-1 is connected"):
            await RawDrafter(new, "model-1").welcomed()
        link.vanish()
        async with asyncio.timeout(20):
            successor = await until_free(new, "model-1")
        connected = served.engine.drafting.roster.connected.values()
        assert [drafter.id for drafter in connected] == ["model-1"]
        successor.call.cancel()


async def test_get_models_answer_fits_a_message_with_any_number_of_drafters() -> None:
    name = "\N{SLIGHTLY SMILING FACE}" * 128
    cores = tuple(range(60_000, 61_024))
    place = Placement(name, name, name, cores, 1, name)
    drafters = tuple(DrafterInfo(f"{number}", name, place, True, 0) for number in range(5000))
    info = ModelInfo("fake", Stage.READY, "serving", "f", VOCAB, 64, drafters=drafters)
    proto = wire_model.model_to_proto(info)
    assert proto.ByteSize() < rpc.MAX_MESSAGE_BYTES // 2
    listed = wire_model.model_from_proto(proto)
    assert 500 < len(listed.drafters) < 5000
    assert listed.drafters == drafters[: len(listed.drafters)]


def naming(family: str) -> verifier_pb2.GenerateTokensRequest:
    """Return a request that names a family of drafters, and asks for a single token."""
    options = common_pb2.SpeculationOptions(drafter_family=family)
    return verifier_pb2.GenerateTokensRequest(
        prompt_token_ids=[1, 2], max_tokens=1, speculation=options
    )


async def test_soon_after_the_start_a_request_waits_for_the_drafter_that_it_names() -> None:
    async with (
        verifier() as served,
        rpc.dial(served.address) as channel,
        asyncio.timeout(30),
    ):
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        call = stub.GenerateTokens(naming("raw"))
        asked = asyncio.ensure_future(call.read())
        await asyncio.sleep(0.3)
        assert not asked.done()
        drafter = RawDrafter(channel, "late")
        await drafter.welcomed()
        part: Any = await asked
        assert len(part.token_ids) == 1


async def test_later_it_is_told_that_no_such_drafter_is_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servicer, "JOIN_S", -1.0)
    async with (
        verifier() as served,
        rpc.dial(served.address) as channel,
        asyncio.timeout(5),
    ):
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateTokens(naming("absent")).read()
        error = rpc_errors.error_of(caught.value)
        assert error.reason is Reason.DRAFTER_NOT_FOUND
        assert "no drafter of the family absent is connected (yet)" in error.message
