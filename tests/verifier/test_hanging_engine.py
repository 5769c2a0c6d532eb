"""The health service says that a verifier does not serve while its engine hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.process.network import rpc
from tests.verifier.fake_model import make_engine
from verifier_svc.engine import engine_thread
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.streams import servicer
from verifier_svc.streams.servicer import report_health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_verifier_does_not_serve_while_its_engine_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servicer, "_MAX_STEP_S", 0.3)
    monkeypatch.setattr(servicer, "_HEALTH_POLL_S", 0.05)
    thread = EngineThread(lambda deliver: make_engine()[0])
    await thread.built
    server = rpc.Server()
    [port] = await server.start("127.0.0.1:0")
    reporting = asyncio.create_task(report_health(thread, server))
    release = threading.Event()
    async with asyncio.timeout(20), rpc.dial(f"127.0.0.1:{port}") as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        seen = [(await watching.read()).status]
        if seen == [NOT_SERVING]:
            seen = [(await watching.read()).status]
        thread.post(lambda: release.wait(30))
        seen.append((await watching.read()).status)
        release.set()
        seen.append((await watching.read()).status)
    assert seen == [SERVING, NOT_SERVING, SERVING]
    reporting.cancel()
    await asyncio.gather(reporting, return_exceptions=True)
    await server.stop(0)
    await thread.stop()


async def test_a_verifier_ends_though_its_engine_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "_STOP_S", 0.2)
    thread = EngineThread(lambda deliver: make_engine()[0])
    await thread.built
    release = threading.Event()
    thread.post(lambda: release.wait(30))
    async with asyncio.timeout(10):
        await thread.stop()
    assert not thread.ended.done()
    release.set()
    await thread.ended
