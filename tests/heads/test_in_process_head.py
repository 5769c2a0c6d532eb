"""A head in the verifier's process drafts the same as over gRPC; its faults harm nothing else.

The tests run heads of every kind, and a target, with random weights and a vocabulary of 40 tokens,
on a real engine thread.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_svc.families.head import HeadFamily
from drafter_svc.families.head_worker import HeadWorker
from drafter_svc.families.settings import HeadSettings
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.grpc_transport import Dialled
from outrider.drafter.strategy import Strategy
from outrider.drafter.stream import DraftStream, Observer
from outrider.drafter.transport import Verifier
from outrider.errors import OutriderError
from outrider.heads import reading_choice
from outrider.heads.reading import read
from outrider.lm.cpu.weights import int8_is_faster
from outrider.lm.pages import PagePool
from outrider.lm.runner import ModelRunner
from outrider.lm.streams import SharedRows
from outrider.process.network import rpc
from outrider.process.observability.telemetry import NO_SPAN
from outrider.process.settings.config import Weights
from outrider.protocol.draft_messages import DraftBatch, FeatureRows, Hello
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenChunk, TokenRequest
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from outrider_cli.check_head import read_text
from outrider_cli.drafter_spec import DrafterSpec
from outrider_cli.in_process_drafters import load_drafters
from tests.heads.head_files import DIALECTS, write
from tests.heads.head_files import TARGET as CONFIG
from tests.heads.random_target import BANNED, load_for_target, target
from tests.waiting import until
from verifier_svc.config import VerifierSettings
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT, PAYING_DRAFTS, DraftPolicy
from verifier_svc.streams.in_process_stream import InProcessVerifier
from verifier_svc.streams.servicer import VerifierServicer

ROOT = Path(__file__).parents[2]
TARGET = str(ROOT / "models/target")
HEAD = str(ROOT / "models/heads/eagle3")
PAGE, PAGES = 4, 64
PROMPT = [*range(9, 30), 3, 1]
LENGTH = 40
PLAIN = SpeculationOptions(enabled=False)
ALWAYS = SpeculationOptions(drafter_family="head", always_draft=True)
SETTINGS = {
    "greedy": SamplingParams(0.0, banned_token_ids=BANNED),
    "seeded": SamplingParams(0.8, seed=2**63 + 5, banned_token_ids=BANNED),
}
# The other kinds differ from these two only in their forwards.
QUICK = ("eagle3", "dspark")
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in DIALECTS]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(copy.deepcopy(target()), page_size=PAGE, page_count=PAGES)


@pytest.fixture(scope="module", params=KINDS)
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HeadWorker]:
    """Yield the head, on a thread of its own."""
    kind: str = request.param
    folder: Path = tmp_path_factory.mktemp(kind)
    head = read(write(folder, next(iter(DIALECTS[kind].values()))()), CONFIG)
    with ThreadPoolExecutor(1) as thread:
        yield HeadWorker(load_for_target(head, PAGES, PAGE), thread)


@pytest.fixture(scope="module")
def bundled_runner() -> ModelRunner:
    """Return the bundled target, since a choice of layers needs a text that it knows."""
    return ModelRunner.load(TARGET, dtype="float32", device="cpu", page_count=64, threads=1)


@pytest.fixture(scope="module")
def bundled_worker() -> Iterator[HeadWorker]:
    """Yield the bundled head, on a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(
            lambda: HeadWorker.load(
                thread,
                head=HEAD,
                target=TARGET,
                layers=(),
                dtype="float32",
                device="cpu",
                page_count=64,
                threads=1,
            )
        )
        yield loading.result()


class Site(Observer):
    """An engine on its thread, and a head's messages to it."""

    def __init__(self, runner: ModelRunner, worker: HeadWorker, policy: DraftPolicy) -> None:
        self.worker = worker
        self.info = ModelInfo(
            "target",
            Stage.READY,
            "serving",
            "fingerprint",
            runner.vocab_size,
            runner.context_length,
        )
        self._runner = runner
        self._policy = policy
        self.thread = EngineThread(self._build)
        self.proposals: dict[int, list[tuple[int, float]]] = {}
        """Maps a base length to the tokens of the first draft after it, with their confidences."""
        self.kinds: set[type] = set()
        """The types of the features that the head got."""

    def _build(self, deliver: Callable[[list[Delivery]], None]) -> Engine:
        pool = PagePool(self._runner.page_count, self._runner.page_size, prefix_caching=False)
        policy = DraftTokensPolicy("fixed", 3)
        config = EngineConfig(policy, max_batch_tokens=16)
        runner = self._runner
        metrics = VerifierMetrics("target")
        return Engine(
            runner,
            pool,
            deliver,
            metrics,
            config,
            features=runner,
            draft_policy=self._policy,
        )

    def drafted(self, batch: DraftBatch, seconds: float) -> None:
        for each in batch.proposals:
            guesses = list(zip(each.token_ids, each.confidences, strict=True))
            self.proposals.setdefault(each.base_length, guesses)

    def family(self, info: ModelInfo) -> HeadFamily:
        site = self

        class Watched(HeadFamily):
            def features(self, sequence: object, first_position: int, rows: FeatureRows) -> None:
                site.kinds.add(type(rows))
                super().features(sequence, first_position, rows)

        return Watched(self.worker, info.vocab_size)

    @asynccontextmanager
    async def head(
        self, verifier: Verifier, make: Callable[[ModelInfo], Strategy] | None = None
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Yield a head that drafts for the verifier."""

        def hello(strategy: Strategy, info: ModelInfo) -> Hello:
            return Hello(
                "head-1",
                strategy.name,
                info.tokenizer_fingerprint,
                strategy.max_draft_tokens,
                strategy.distributions,
                feature_request=strategy.feature_request,
            )

        stream = DraftStream(verifier, make or self.family, hello, self)
        running = asyncio.create_task(stream.run())
        await until(lambda: self.drafter_count == 1)
        yield running
        stream.stop()
        await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), 10)
        await until(lambda: self.drafter_count == 0)

    @property
    def drafter_count(self) -> int:
        return len(self.thread.engine.drafting.roster.connected)

    @property
    def in_process(self) -> InProcessVerifier:
        return InProcessVerifier(self.thread, self.info)

    async def text(
        self, options: SpeculationOptions, sampling: SamplingParams = SETTINGS["greedy"]
    ) -> list[int]:
        """Return the text after the prompt."""
        chunks: asyncio.Queue[TokenChunk | OutriderError] = asyncio.Queue()
        request = TokenRequest(PROMPT, LENGTH, sampling, speculation=options, ignore_eos=True)
        await self.thread.call(
            lambda: self.thread.engine.submit(request, chunks.put_nowait, NO_SPAN, None)
        )
        tokens: list[int] = []
        while True:
            chunk = await asyncio.wait_for(chunks.get(), 60)
            assert isinstance(chunk, TokenChunk), chunk
            tokens += chunk.token_ids
            if chunk.finish_reason is not None:
                return tokens


@asynccontextmanager
async def running_site(
    runner: ModelRunner, worker: HeadWorker, policy: DraftPolicy
) -> AsyncIterator[Site]:
    made = Site(runner, worker, policy)
    await made.thread.built
    yield made
    await made.thread.stop()


@pytest.fixture
async def site(runner: ModelRunner, worker: HeadWorker) -> AsyncIterator[Site]:
    """Yield a site whose engine waits for drafts, however busy the machine is."""
    async with running_site(runner, worker, EVERY_DRAFT) as made:
        yield made


async def test_proposals_in_process_equal_those_by_stream(site: Site) -> None:
    servicer = VerifierServicer("target")
    servicer.serve(site.thread, site.info)
    server = rpc.Server("outrider.v1.VerifierService")
    add_VerifierServiceServicer_to_server(servicer, server.grpc)
    [port] = await server.start("127.0.0.1:0")
    async with site.head(Dialled(lambda: f"127.0.0.1:{port}")):
        text = await site.text(ALWAYS)
    await server.stop(0.1)
    by_stream, site.proposals = site.proposals, {}
    async with site.head(site.in_process):
        assert await site.text(ALWAYS) == text
    # On a busy machine a draft may be late, and then one of the two runs has no proposal for its
    # base length. The last digits of a confidence depend on the parts in which the head reads the
    # prompt.
    both = sorted(site.proposals.keys() & by_stream.keys())
    assert len(both) > 5
    for length in both:
        for local, streamed in zip(site.proposals[length], by_stream[length], strict=False):
            assert local[0] == streamed[0]
            assert local[1] == pytest.approx(streamed[1], rel=1e-4)
    # Features from the stream are bytes.
    assert site.kinds == {bytes, SharedRows}


@pytest.mark.parametrize("setting", SETTINGS)
async def test_a_head_in_process_changes_no_text(site: Site, setting: str) -> None:
    sampling = SETTINGS[setting]
    plain = await site.text(PLAIN, sampling)
    async with site.head(site.in_process):
        drafter = site.thread.engine.drafting.roster.connected["head-1"]
        assert await site.text(ALWAYS, sampling) == plain
        assert drafter.accepted_count > 0
    assert site.kinds == {SharedRows}


class Faulty(HeadFamily):
    """Fails at its third draft and at all later drafts."""

    asked = 0

    async def propose(self, *arguments: Any) -> None:
        self.asked += 1
        if self.asked > 2:
            raise ArithmeticError("planted")
        await super().propose(*arguments)


async def test_a_fault_in_one_draft_costs_its_sequence_the_drafts(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    plain = await site.text(PLAIN)
    async with site.head(site.in_process, lambda info: Faulty(site.worker, info.vocab_size)):
        assert await site.text(ALWAYS) == plain
        assert site.drafter_count == 1
    assert "ArithmeticError: planted" in caplog.text
    assert site.proposals


async def test_a_fatal_fault_ends_the_head_and_no_text(site: Site) -> None:
    plain = await site.text(PLAIN)

    def make(info: ModelInfo) -> HeadFamily:
        family = Faulty(site.worker, info.vocab_size)
        family.fatal = (ArithmeticError,)
        return family

    async with site.head(site.in_process, make) as running:
        assert await site.text(ALWAYS) == plain
        await until(lambda: site.drafter_count == 0)
        assert await site.text(SpeculationOptions()) == plain
    with pytest.raises(ArithmeticError, match="planted"):
        await running


async def test_no_text_waits_for_a_head_that_hangs(runner: ModelRunner, worker: HeadWorker) -> None:
    hangs = threading.Event()
    async with running_site(runner, worker, PAYING_DRAFTS) as site, site.head(site.in_process):
        plain = await site.text(PLAIN)
        worker._thread.submit(hangs.wait)
        try:
            assert await site.text(SpeculationOptions()) == plain
            assert not site.proposals
        finally:
            hangs.set()
        while not site.proposals:
            assert await site.text(ALWAYS) == plain


def head_of_other_layers(folder: Path) -> str:
    """Copy the bundled head; return the copy's path.

    In the copy's config, the number of each auxiliary layer is one too low: [0, 2, 4].
    """
    shutil.copytree(HEAD, folder)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [0, 2, 4]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("set_by_user", "read"), [("", [1, 3, 5]), (",head-states=0,2,4", [0, 2, 4])]
)
async def test_a_head_chooses_its_layers_by_the_loaded_target_unless_they_are_set(
    bundled_runner: ModelRunner,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    set_by_user: str,
    read: list[int],
) -> None:
    # The bundled target is so small that its layers are similar. So a small lead must suffice.
    monkeypatch.setattr(reading_choice, "_RATIO", 1.1)
    head = head_of_other_layers(tmp_path / "head")
    settings = VerifierSettings(target=TARGET, device="cpu")
    spec = DrafterSpec.parse(f"head={head}{set_by_user}")
    [drafter] = await load_drafters([spec], settings, VerifierMetrics("target"))
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as engine:
        assert engine.submit(drafter.meet, bundled_runner).result() == read
    assert ("it reads states [1, 3, 5]" in caplog.text) == (not set_by_user)


async def test_a_head_in_its_own_process_takes_the_reading_that_is_set(tmp_path: Path) -> None:
    head = head_of_other_layers(tmp_path / "head")
    settings = HeadSettings(head=head, target=TARGET, device="cpu", page_count=4, head_reading=2)
    place = PlacementPlan("local", (), None, threads=1)
    loaded = await HeadFamily.load(settings, place, DrafterMetrics("head-1", "head"))
    family = loaded.make(ModelInfo("target", Stage.READY, ""))
    assert list(family.feature_request.states) == [1, 3, 5]


@pytest.mark.parametrize("weights", ["int8", "dtype", "auto"])
async def test_a_heads_weights_are_kept_as_the_setting_says(weights: Weights) -> None:
    settings = HeadSettings(head=HEAD, target=TARGET, device="cpu", page_count=4, weights=weights)
    place = PlacementPlan("local", (), None, threads=1)
    loaded = await HeadFamily.load(settings, place, DrafterMetrics("head-1", "head"))
    family: Any = loaded.make(ModelInfo("target", Stage.READY, ""))
    in_int8 = int8_is_faster() if weights == "auto" else weights == "int8"
    assert family.worker._model.lm_head.numbers == ("int8" if in_int8 else "bfloat16")


async def test_a_heads_pages_are_free_behind_its_choice_of_layers(
    bundled_runner: ModelRunner, bundled_worker: HeadWorker
) -> None:
    before = bundled_worker.feature_request
    bundled_worker.choose_reading(*read_text(bundled_runner, TARGET, bundled_worker.spec))
    assert bundled_worker.feature_request == before
    pool = bundled_worker._model.pool
    assert pool.used_count == 0
    pool.check_integrity()


async def test_the_heads_thread_leaves_the_targets_number_of_threads_alone(
    bundled_runner: ModelRunner,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        settings = VerifierSettings(target=TARGET, device="cpu")
        spec = DrafterSpec.parse(f"head={HEAD}")
        [drafter] = await load_drafters([spec], settings, VerifierMetrics("target"))
        with ThreadPoolExecutor(1) as engine:
            assert engine.submit(torch.get_num_threads).result() == 2
        assert drafter.meet(bundled_runner) == [1, 3, 5]
    finally:
        torch.set_num_threads(before)
