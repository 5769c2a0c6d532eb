"""An answer that nobody reads takes a bounded amount of the verifier's memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_model import make_engine

from outrider.protocol.errors import OutriderError, Reason
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.v1 import verifier_pb2
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.streams import servicer as servicer_module
from verifier_svc.streams.servicer import VerifierServicer


async def test_an_answer_that_is_not_read_ends_with_an_error_behind_its_first_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servicer_module, "MOST_UNREAD_CHUNKS", 8)
    thread = EngineThread(lambda deliver: make_engine(deliver=deliver, eos_bias=-99)[0])
    engine = await thread.built
    servicer = VerifierServicer("fake")
    servicer.serve(thread, ModelInfo("fake", Stage.READY, "serving", "f", 8, 200))
    request = verifier_pb2.GenerateTokensRequest(prompt_token_ids=[1, 2], max_tokens=100)
    answer: Any = servicer._generate(request, "")
    await anext(answer)
    async with asyncio.timeout(20):
        while engine.sequences:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    # The last chunks are delivered before this answer.
    await thread.call(lambda: None)
    for _ in range(8):
        await anext(answer)
    with pytest.raises(OutriderError) as caught:
        await anext(answer)
    assert caught.value.reason is Reason.SLOW_READER
    await thread.stop()
