"""Before a verifier leaves, it sends the tokens that it has gathered."""

from __future__ import annotations

import asyncio
import threading

import pytest

from outrider.errors import OutriderError
from outrider.protocol.messages import SamplingParams, TokenChunk, TokenRequest
from outrider.protocol.model_info import ModelInfo, Stage
from tests.verifier.fake_model import Client, make_engine
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.streams import servicer as servicer_module
from verifier_svc.streams.servicer import VerifierServicer


async def test_gathered_tokens_leave_before_the_verifier_says_that_it_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servicer_module, "_ANSWER_S", 30.0)
    engine, model = make_engine(eos_bias=-99)
    servicer = VerifierServicer("fake")
    client = Client()
    stages: list[Stage] = []
    forwards: list[object] = []
    entered = threading.Event()
    release = threading.Event()

    def stall(forward: object) -> None:
        forwards.append(forward)
        if len(forwards) == 4:
            entered.set()
            release.wait(30)

    def sink(message: TokenChunk | OutriderError) -> None:
        stages.append(servicer.info.stage)
        client(message)

    model.broken = stall
    thread = EngineThread(lambda deliver: engine)
    await thread.built
    servicer.serve(thread, ModelInfo("fake", Stage.READY))
    request = TokenRequest([1, 2], 12, SamplingParams(0.0), min_chunk_tokens=12)
    thread.post(lambda: engine.submit(request, sink))
    assert entered.wait(30)
    draining = asyncio.create_task(servicer.drain(0.0))
    # The drain must reach the engine while its forward stalls. It runs in a task within a task, so
    # it gets there only after a few turns of the event loop.
    for _ in range(10):
        await asyncio.sleep(0)
    release.set()
    await draining
    await thread.stop()
    assert [len(chunk.token_ids) for chunk in client.chunks[:2]] == [1, 3]
    assert stages[:2] == [Stage.READY, Stage.READY]
    assert servicer.info.stage is Stage.DRAINING
