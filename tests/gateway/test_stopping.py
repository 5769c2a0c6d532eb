"""A stopping gateway sends an error to running, waiting and new requests."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx

from gateway.text.prompts import Prompts
from outrider.errors import Reason
from outrider.process.network import rpc, rpc_errors
from outrider.protocol.messages import FinishReason, TokenRequest
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.gateway.gateway_process import gateway_process
from tests.gateway.gateway_rig import events_of
from tests.gateway.scripted_verifier import last, plain
from tests.stack import GatewayProcess
from tests.waiting import until

EACH = 8
# The verifier sends one token for this prompt, and nothing for others.
BEGUN = 5


def half_answered(request: TokenRequest) -> list[Any]:
    return [plain([request.prompt[0]]), 600.0] if request.prompt == [BEGUN] else [600.0]


async def asked_by_grpc(gateway: GatewayProcess, prompt: int) -> tuple[int, Any]:
    """Return the number of messages received, and the error."""
    async with rpc.dial(gateway.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        tokens = generation_pb2.TokenPrompt(token_ids=[prompt])
        count = 0
        try:
            async for _ in stub.GenerateText(generation_pb2.GenerateTextRequest(tokens=tokens)):
                count += 1
        except grpc.aio.AioRpcError as failure:
            return count, rpc_errors.error_of(failure)
        return count, None


async def ended(gateway: GatewayProcess) -> int:
    """Wait until the gateway has ended; return its exit status."""
    return await asyncio.to_thread(gateway.popen.wait, 60)


def is_draining(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    retry_after = answer.headers["retry-after"]
    return (answer.status_code, error["code"], retry_after) == (503, "draining", "1")


async def test_every_request_gets_an_error_when_the_gateway_stops(prompts: Prompts) -> None:
    async with (
        gateway_process(prompts, "--drain-seconds", "1") as (gateway, script),
        httpx.AsyncClient(
            base_url=gateway.url, timeout=60, limits=httpx.Limits(max_connections=None)
        ) as http,
    ):
        script.answer = half_answered

        def ask(prompt: int, stream: bool) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(
                http.post("/v1/completions", json={"prompt": [prompt], "stream": stream})
            )

        begun = [ask(BEGUN, True) for _ in range(EACH)]
        waiting = [ask(BEGUN + 1, stream) for stream in (False, True) for _ in range(EACH)]
        by_grpc = [
            asyncio.create_task(asked_by_grpc(gateway, prompt)) for prompt in (BEGUN, BEGUN + 1)
        ]
        await until(lambda: script.running == 3 * EACH + 2, timeout_s=30)
        gateway.popen.terminate()

        async def is_stopping() -> bool:
            return (await http.get("/readyz")).json()["status"] == "draining"

        await until(is_stopping)
        # A new request is refused while others may still finish.
        assert is_draining(await ask(BEGUN, True))

        for response in [await task for task in begun]:
            _, error = events_of(response)
            assert error["error"]["code"] == "draining"
        assert all([is_draining(await task) for task in waiting])
        for count, (received, failure) in zip(
            (1, 0), [await task for task in by_grpc], strict=True
        ):
            assert received == count
            assert failure.reason is Reason.DRAINING
            assert failure.retry_after_s == 1.0
        assert await ended(gateway) == 0
        assert "Traceback" not in gateway.output()
        assert "Exception" not in gateway.output()


async def test_a_request_that_ends_in_time_is_not_cut_off(prompts: Prompts) -> None:
    async with (
        gateway_process(prompts, "--drain-seconds", "60") as (gateway, script),
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
    ):
        script.answer = lambda _: [plain([5]), 1.0, last([5], FinishReason.LENGTH)]
        asked = asyncio.create_task(
            http.post("/v1/completions", json={"prompt": [5], "stream": True})
        )
        await until(lambda: script.running == 1, timeout_s=30)
        gateway.popen.terminate()
        assert (await asked).text.endswith("data: [DONE]\n\n")
        assert await ended(gateway) == 0


async def test_idle_clients_do_not_delay_the_stop(prompts: Prompts) -> None:
    """One client reads nothing of its answer, and another client has sent half a body."""
    async with gateway_process(prompts, "--drain-seconds", "0.2") as (gateway, script):
        script.answer = lambda _: [*[plain([5] * 5)] * 400, 600.0]
        where = urlsplit(gateway.url)
        address = (where.hostname, where.port)
        with socket.create_connection(address) as unread, socket.create_connection(address) as half:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            asked = {"prompt": [5], "max_tokens": 2000, "stream": True}
            body = json.dumps(asked | {"speculation": {"tokens": True}})
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            half.sendall(f"{head}{{".encode())
            unread.sendall(f"{head}{body}".encode())
            await until(lambda: script.running == 1, timeout_s=30)
            gateway.popen.terminate()
            assert await ended(gateway) == 0
        assert "Traceback" not in gateway.output()
