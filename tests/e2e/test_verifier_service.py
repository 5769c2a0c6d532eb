"""The verifier's gRPC service tells its model's names, and drains."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from outrider.errors import Reason
from outrider.internal.v1.token_streams_pb2_grpc import TokenStreamServiceStub
from outrider.process.network import rpc_errors
from outrider.protocol.messages import SamplingParams, TokenRequest
from outrider.protocol.model_info import Stage
from outrider.protocol.wire import requests as wire_requests
from tests.stack import TARGET, Client, Stack, running

GREEDY = SamplingParams(temperature=0.0)
GOOD = TokenRequest([5, 6, 7], 4, GREEDY)


async def test_a_loaded_verifier_tells_all_its_names(stack: Stack) -> None:
    async with Client(stack.address) as client:
        assert (await client.model()).names == (TARGET, "a further name")


@pytest.mark.slow
async def test_a_draining_verifier_finishes_requests_and_takes_no_new_ones() -> None:
    # This request runs for seconds on any machine.
    long = replace(GOOD, max_tokens=2000, ignore_eos=True)
    with running(Stack("--drain-seconds", "60")) as stack:
        async with Client(stack.address) as client, client.drafter("mute") as drafter:
            running_call = aiter(client.stub.GenerateTokens(wire_requests.request_to_proto(long)))
            chunks = [wire_requests.chunk_from_proto(await anext(running_call))]
            stack.verifier.popen.terminate()
            # The verifier is another process, so there is no event to wait for.
            while (await client.model()).stage is not Stage.DRAINING:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.generate(GOOD)
            assert rpc_errors.error_of(caught.value).reason is Reason.DRAINING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(TokenStreamServiceStub(client.channel).StreamTokens(iter([]))))
            assert rpc_errors.error_of(caught.value).reason is Reason.DRAINING
            while not (message := await drafter.hear()).HasField("draining"):
                pass
            assert message.draining.grace_duration.seconds == 60
            chunks += [wire_requests.chunk_from_proto(response) async for response in running_call]
            ended = await drafter.error()
            assert (ended.reason, ended.retry_after_s) == (Reason.DRAINING, 1.0)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 2000
        assert await asyncio.to_thread(stack.verifier.popen.wait, 10) == 0
