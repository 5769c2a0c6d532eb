"""A drafter in the verifier's process that fails, hangs or loses its GPU, on a served target."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_svc.families import head_worker
from drafter_svc.families.forwards import Forwards
from outrider.errors import OutriderError
from outrider.lm import streams
from outrider.lm.runner import ModelRunner
from outrider.process.network.ports import free_port
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from outrider.tokenizer import load_tokenizer
from outrider_cli.drafter_spec import DrafterSpec
from outrider_cli.in_process_drafters import _in_process_memory_share, load_drafters
from tests.stack import Client
from tests.waiting import until
from verifier_svc.config import VerifierSettings
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.server import serve
from verifier_svc.streams.in_process_stream import InProcessDrafter, InProcessVerifier

ROOT = Path(__file__).parents[2]
TARGET, DRAFT = str(ROOT / "models/target"), str(ROOT / "models/draft")
PLAIN = SpeculationOptions(enabled=False)
GREEDY = SamplingParams(0.0)
SETTINGS = [
    GREEDY,
    SamplingParams(0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(0.0, logit_bias=((5, 4.0), (9, -100.0))),
    SamplingParams(0.8, seed=7),
    SamplingParams(1.2, top_k=20, top_p=0.9, min_p=0.02, seed=2**63 + 5),
    SamplingParams(0.7, repetition_penalty=1.3, frequency_penalty=0.2, seed=3),
]
ALWAYS = SpeculationOptions(drafter_family="model", always_draft=True)


@asynccontextmanager
async def served(
    drafters: list[InProcessDrafter] | None = None,
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """Yield a verifier of the bundled target on this event loop: its address and its task."""
    address = f"127.0.0.1:{free_port()}"
    settings = VerifierSettings(
        target=TARGET, device="cpu", dtype="float32", threads=1, page_count=64, listen=address
    )
    metrics = VerifierMetrics("target")
    if drafters is None:
        drafters = await load_drafters([DrafterSpec.parse(f"model={DRAFT}")], settings, metrics)
    serving = asyncio.create_task(serve(settings, metrics, drafters))
    try:
        async with Client(address) as client:
            await until(lambda: serving.done() or is_ready(client))
        yield address, serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        # Undo a verifier's `gc.freeze`, which covers all objects of this process.
        gc.unfreeze()


async def is_ready(client: Client) -> bool:
    """Return whether the verifier takes requests."""
    return bool((await client.model()).tokenizer_fingerprint)


async def text(
    address: str, options: SpeculationOptions, sampling: SamplingParams = GREEDY
) -> list[int]:
    """Return the text after a prompt of code."""
    prompt = load_tokenizer(TARGET).encode("def main() -> None:\n    for i in range(").ids
    async with Client(address) as client:
        request = TokenRequest(prompt, 24, sampling, ignore_eos=True, speculation=options)
        return [token for chunk in await client.generate(request) for token in chunk.token_ids]


async def test_a_fault_ends_its_drafter_alone_and_a_lost_gpu_the_verifier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle engine would not notice a lost GPU, and `/readyz` would go on saying ready."""
    faulty, lost = asyncio.Event(), asyncio.Event()

    captures: list[bool] = []
    monkeypatch.setattr(ModelRunner, "capture", lambda *_: captures.append(faulty.is_set()))

    async def fail(verifier: InProcessVerifier) -> None:
        faulty.set()
        raise ArithmeticError("planted")

    async def lose(verifier: InProcessVerifier) -> None:
        await lost.wait()
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    drafters = [InProcessDrafter(run.__name__, run, lambda runner: ()) for run in (fail, lose)]
    async with served(drafters) as (address, serving):
        await faulty.wait()
        # Graphs are captured before drafters run: during a capture, no thread may wait for the GPU.
        assert captures == [False]
        assert len(await text(address, SpeculationOptions())) == 24
        assert not serving.done()
        lost.set()
        with pytest.raises(OutriderError, match="the GPU failed under the drafter lose"):
            await asyncio.wait_for(serving, 20)


@pytest.mark.slow
async def test_a_draft_model_changes_no_text_also_when_it_fails_or_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grow, hangs, goes_on = Forwards.grow, threading.Event(), threading.Event()
    faults = {"fails": False, "hangs": False}

    def faulty(*arguments: Any) -> None:
        if faults["hangs"]:
            hangs.set()
            goes_on.wait()
        if faults["fails"]:
            raise ArithmeticError("planted")
        grow(*arguments)

    monkeypatch.setattr(Forwards, "grow", faulty)
    async with served() as (address, serving), Client(address) as client:
        await client.connected("model")
        for sampling in SETTINGS:
            plain = await text(address, PLAIN, sampling)
            assert await text(address, ALWAYS, sampling) == plain
        [drafter] = (await client.model()).drafters
        assert drafter.acceptance_rate
        plain = await text(address, PLAIN)
        # A request that waits for every draft waits a second for each hanging drafter.
        for fault, options in {"fails": ALWAYS, "hangs": SpeculationOptions()}.items():
            faults[fault] = True
            assert await text(address, options) == plain
            assert hangs.is_set() is faults["hangs"]
            faults[fault] = False
        goes_on.set()
        assert await text(address, ALWAYS) == plain
        assert not serving.done()


async def test_each_drafter_has_a_stream_on_the_thread_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []

    def note(device: torch.device) -> None:
        found.append(threading.current_thread().name.rpartition("_")[0])

    monkeypatch.setattr(streams, "use_own_stream", note)
    monkeypatch.setattr(head_worker, "use_own_stream", note)
    settings = VerifierSettings(target=TARGET, device="cpu", dtype="float32")
    texts = [f"model={DRAFT},page-count=8", f"head={ROOT / 'models/heads/mtp'},page-count=8"]
    specs = [DrafterSpec.parse(text) for text in texts]
    drafters = await load_drafters(specs, settings, VerifierMetrics("target"))
    assert found == ["draft-model", "head"]
    assert len({each.name for each in drafters}) == 2


def test_a_drafters_share_of_a_gpu_is_beside_what_the_process_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 100))
    assert _in_process_memory_share(0.1, torch.device("cuda", 0)) == pytest.approx(0.3)
    assert _in_process_memory_share(0.9, torch.device("cuda", 0)) == 1.0
    assert _in_process_memory_share(0.1, torch.device("cpu")) == 0.1
