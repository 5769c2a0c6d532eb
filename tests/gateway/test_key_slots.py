"""An API key never exceeds its limit of running sequences, however its requests end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from gateway.text.prompts import Prompts
from outrider.errors import OutriderError, Reason
from outrider.process.network import rpc_errors
from outrider.v1 import generation_pb2
from tests.gateway.gateway_rig import Rig, echo
from tests.gateway.keyed_rig import ALICE, BOB, auth, entry, keyed_rig
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = {"prompt": "if x", "temperature": 0, "max_tokens": 8}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keyed(prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """Yield a gateway where alice may run three sequences at once and bob any number."""
    keys = [entry(ALICE, "alice", concurrent_sequences=3), entry(BOB, "bob")]
    async with keyed_rig(prompts, tmp_path_factory.mktemp("keys"), keys) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="session")
async def rig(keyed: Rig) -> AsyncIterator[Rig]:
    """Yield the gateway with an echo. After the test, no sequence of a key may be running."""
    keyed.script.answer = echo
    yield keyed
    assert not keyed.gateway.generation.key_slots.taken


async def post(rig: Rig, key: str = ALICE, **given: Any) -> Any:
    return await rig.http.post("/v1/completions", json=BODY | given, headers=auth(key))


async def test_only_so_many_sequences_run_at_once(rig: Rig) -> None:
    rig.says("one two three", pause_s=0.05)
    running = asyncio.create_task(post(rig, n=2))
    await until(lambda: rig.script.running == 2)
    refused = await post(rig, n=2)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert (await post(rig, n=4)).json()["error"]["param"] == "n"
    assert [(await each).status_code for each in (post(rig), post(rig, BOB, n=4))] == [200, 200]
    assert (await running).status_code == 200
    assert (await post(rig, n=3)).status_code == 200


async def test_requests_that_fail_give_their_slots_back(rig: Rig) -> None:
    rig.script.answer = lambda _: [OutriderError(Reason.OVERLOADED, "full")]
    for _ in range(4):
        assert (await post(rig, n=2)).json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_gives_its_slots_back(rig: Rig, stream: bool) -> None:
    rig.says("one two three", pause_s=60.0)
    asking = asyncio.create_task(post(rig, n=3, stream=stream))
    await until(lambda: rig.script.running == 3)
    assert (await post(rig)).status_code == 429
    asking.cancel()
    await asyncio.wait([asking])
    await until(lambda: not rig.gateway.generation.key_slots.taken)


async def test_grpc_tells_when_to_retry(rig: Rig) -> None:
    request = generation_pb2.GenerateTextRequest(prompt="x")
    metadata = tuple(auth(ALICE).items())
    with (
        rig.gateway.generation.key_slots.held(entry(ALICE, "alice"), 3),
        pytest.raises(grpc.aio.AioRpcError) as caught,
    ):
        _ = [each async for each in rig.generation.GenerateText(request, metadata=metadata)]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = rpc_errors.error_of(caught.value)
    assert (error.reason, error.retry_after_s) == (Reason.RATE_LIMIT_EXCEEDED, 1.0)
