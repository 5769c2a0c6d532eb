"""A fault in our drafting leaves plain decoding: no request fails, and no text changes."""

import asyncio

import pytest

from outrider.errors import OutriderError
from outrider.protocol.messages import SamplingParams, TokenChunk, TokenRequest
from outrider.protocol.model_info import Stage
from tests.e2e.test_greedy_equality import Reference
from tests.stack import TARGET
from verifier_svc.config import VerifierSettings
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.streams.servicer import VerifierServicer
from verifier_svc.vllm.engine import VllmEngine
from verifier_svc.vllm.hub import DraftHub
from verifier_svc.vllm.loader import VllmLoader

# vLLM warns about things that it is not given, so warnings are no errors here.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
TOKENS = 40


def deliver(deliveries: list[Delivery]) -> None:
    for sink, message in deliveries:
        sink(message)


@pytest.fixture(scope="module")
def engine() -> VllmEngine:
    """Return vLLM in this process."""

    async def build() -> VllmEngine:
        flags = ["max_model_len=1024", "enforce_eager=true"]
        settings = VerifierSettings(
            target=TARGET, engine="vllm", dtype="float32", max_sequences=4, engine_arg=flags
        )
        servicer = VerifierServicer("m")
        loader = VllmLoader(settings, servicer, VerifierMetrics("m"))
        engine = loader.build(deliver)
        assert loader.info.stage is Stage.READY
        return engine

    return asyncio.run(build())


# After each case the hub has failed for good, so the fixture's flags are set back.
@pytest.mark.parametrize("method", ["plan_step", "choose", "begin", "commit"])
def test_texts_go_on_behind_a_fault(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    reference = Reference()
    hub = engine._hub
    original = getattr(hub, method)
    seen = 0

    def fail(*arguments: object) -> object:
        nonlocal seen
        seen += 1
        if seen > 6:
            raise RuntimeError("a fault of ours")
        return original(*arguments)

    monkeypatch.setattr(DraftHub, method, lambda _, *rest: fail(*rest))
    got: list[TokenChunk | OutriderError] = []
    request = TokenRequest(reference.prompts[0], TOKENS, SamplingParams(temperature=0.0))
    engine.submit(request, got.append)
    while engine._llm.has_unfinished_requests():
        engine.step()
    chunks = [chunk for chunk in got if isinstance(chunk, TokenChunk)]
    assert len(chunks) == len(got)
    assert hub.failed
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == reference.generate(0)[:TOKENS]
    assert not hub.sequences
    scheduler = engine._llm.engine_core.engine_core.scheduler
    scheduler._drafts, hub.failed = True, False
