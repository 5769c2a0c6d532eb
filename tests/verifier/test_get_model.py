"""GetModel answers during a long step, and reports an engine that hangs."""

import threading
from typing import Any

import pytest

from outrider.errors import OutriderError
from outrider.protocol.messages import SamplingParams, TokenRequest
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.protocol.wire.model import model_from_proto
from outrider.v1 import verifier_pb2
from tests.verifier.fake_model import Client, ScriptedDrafter, make_engine
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.streams import servicer as servicer_module
from verifier_svc.streams.servicer import VerifierServicer


async def test_get_model_answers_during_a_long_step_but_not_an_endless_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, model = make_engine()
    entered = threading.Event()
    release = threading.Event()

    def stall(_: object) -> None:
        entered.set()
        release.wait(30)

    model.broken = stall
    ScriptedDrafter(engine, "known")
    thread = EngineThread(lambda deliver: engine)
    await thread.built
    servicer = VerifierServicer("fake")
    servicer.serve(thread, ModelInfo("fake", Stage.READY, "serving", "f", model.vocab_size, 64))
    context: Any = None

    async def drafters() -> list[str]:
        response = await servicer.GetModel(verifier_pb2.GetModelRequest(), context)
        return [drafter.drafter_id for drafter in response.drafters]

    assert await drafters() == ["known"]
    thread.post(lambda: engine.submit(TokenRequest([1, 2], 4, SamplingParams(0.0)), Client()))
    assert entered.wait(30)
    assert await drafters() == ["known"]
    ScriptedDrafter(engine, "joined during the step")
    monkeypatch.setattr(servicer_module, "_MAX_STEP_S", 0.1)
    with pytest.raises(OutriderError, match="step has taken"):
        await servicer._ask(thread)
    release.set()
    await thread.call(lambda: None)
    monkeypatch.setattr(servicer_module, "_ANSWER_S", 0.0)
    assert await drafters() == ["known", "joined during the step"], "a late answer counts"
    await thread.stop()


async def test_get_model_tells_the_number_and_memory_of_the_graphs() -> None:
    info = ModelInfo("m", Stage.READY, graph_count=94, graph_memory_bytes=3 * 2**31)
    servicer = VerifierServicer("m")
    servicer.info = info
    context: Any = None
    response = await servicer.GetModel(verifier_pb2.GetModelRequest(), context)
    assert (response.graph_count, response.graph_memory_bytes) == (94, 3 * 2**31)
    assert model_from_proto(response) == info
