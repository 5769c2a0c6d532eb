"""New weights take the place of the earlier ones, or the log says why they do not."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from drafter_svc.families.base import Family, Loaded
from drafter_svc.families.model import ModelFamily
from drafter_svc.families.settings import ModelSettings
from drafter_svc.families.weights_version import load_versioned
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from drafter_svc.served_weights import ServedWeights
from outrider.errors import OutriderError
from outrider.protocol.draft_messages import FeatureDtype, FeatureRequest
from outrider.protocol.model_info import ModelInfo
from tests.drafter.conftest import MODEL
from tests.drafter.counting_drafter import Counting
from tests.drafter.scripted_drafts import READY
from tests.waiting import until

STATES = FeatureRequest((1, 2), False, FeatureDtype.BFLOAT16, projection="old")


def version(name: str, states: FeatureRequest | None = None, spoken: str = "words") -> Loaded:
    """Return loaded weights of this version."""

    def make(info: ModelInfo) -> Family:
        family = Counting()
        family.weights_version = name
        family.feature_request = states
        return family

    return Loaded(make, spoken, page_count=7)


class Panic(BaseException):
    """Like the panics of tokenizers' Rust code."""


class Files:
    """Weights files. The next load returns the next result, or raises it if it is an exception."""

    def __init__(self, *results: Loaded | BaseException) -> None:
        self.results = [*results]
        self.page_counts: list[int | None] = []
        self.rejoined: list[str] = []
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.weights = ServedWeights(self.load)

    async def load(self, page_count: int | None) -> Loaded:
        self.page_counts.append(page_count)
        result = self.results.pop(0)
        self.begun.set()
        await self.may_end.wait()
        if isinstance(result, BaseException):
            raise result
        return result

    @property
    def serving(self) -> str:
        """Return the version that a new connection gets."""
        return self.weights.make(READY).weights_version

    async def rejoin(self) -> None:
        self.rejoined.append(self.serving)


@asynccontextmanager
async def following(
    weights: ServedWeights, rejoin: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Load the weights. During the block, load and use new weights whenever they are asked for."""
    await weights.load()
    task = asyncio.create_task(weights.follow(rejoin))
    try:
        yield
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gc.unfreeze()


async def test_new_weights_serve_after_connections_were_replaced() -> None:
    files = Files(version("one"), version("two"))
    async with following(files.weights, files.rejoin):
        assert files.serving == "one"
        files.weights.ask()
        await until(lambda: files.rejoined)
        assert files.rejoined == [files.serving] == ["two"]
        assert files.page_counts == [None, 7]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (ValueError("a header\nof two lines"), "ValueError: a header of two lines"),
        (MemoryError(), "MemoryError: "),
        (Panic("a string"), "Panic: a string"),
        (version("two", spoken="other words"), "tokenizer is not the tokenizer of the earlier"),
        (version("two", STATES), "head reads other hidden states of the target"),
    ],
)
async def test_weights_that_cannot_serve_change_nothing(
    found: Loaded | BaseException, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = Files(version("one"), found, version("three"))
    async with following(files.weights, files.rejoin):
        files.weights.ask()
        await until(lambda: "draft on" in caplog.text)
        [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
        sentence = f"the new weights were not loaded, and one draft on: {why}"
        assert record.getMessage().startswith(sentence)
        assert "\n" not in record.getMessage()
        assert (files.serving, files.rejoined) == ("one", [])
        files.weights.ask()
        await until(lambda: files.rejoined == ["three"])


async def test_a_head_with_another_projection_of_the_same_states_may_serve() -> None:
    new = FeatureRequest((1, 2), False, FeatureDtype.BFLOAT16, projection="new")
    files = Files(version("one", STATES), version("two", new))
    async with following(files.weights, files.rejoin):
        files.weights.ask()
        await until(lambda: files.rejoined == ["two"])


async def test_requests_that_come_while_weights_are_loaded_count_as_one() -> None:
    files = Files(version("one"), version("two"), version("three"), version("four"))
    async with following(files.weights, files.rejoin):
        files.begun.clear()
        files.may_end.clear()
        files.weights.ask()
        await files.begun.wait()
        for _ in range(5):
            files.weights.ask()
        files.may_end.set()
        await until(lambda: len(files.rejoined) == 2)
        await asyncio.sleep(0.05)
        assert files.rejoined == ["two", "three"]


async def test_a_drafter_on_a_gpu_keeps_its_weights(caplog: pytest.LogCaptureFixture) -> None:
    on_gpu = version("one").make(READY)
    on_gpu.device, on_gpu.weights_version = "cuda:0", "one"
    files = Files(Loaded(lambda info: on_gpu, "words"), version("two"))
    async with following(files.weights, files.rejoin):
        files.weights.ask()
        await until(lambda: "on a GPU start a new process" in caplog.text)
        assert (files.serving, files.rejoined) == ("one", [])


async def test_the_earlier_weights_leave_memory_and_equal_files_have_an_equal_version() -> None:
    metrics = DrafterMetrics("d1", "model")
    place = PlacementPlan("local", (), None, threads=1)
    settings = ModelSettings(model=MODEL, dtype="float32", page_count=64)
    weights = ServedWeights(lambda pages: ModelFamily.load(settings, place, metrics))
    versions: list[str] = []

    async def rejoin() -> None:
        versions.append(weights.make(READY).weights_version)

    async with following(weights, rejoin):
        first = weights.make(READY)
        assert isinstance(first, ModelFamily)
        versions.append(first.weights_version)
        earlier = weakref.ref(first._model.runner)
        del first
        gc.collect()
        gc.freeze()
        weights.ask()
        await until(lambda: len(versions) == 2, 120)
        await until(lambda: earlier() is None)
    assert versions[0] == versions[1] != ""


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_files_that_change_while_they_are_read_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    changing = folder / name

    def overwritten() -> None:
        changing.write_bytes(changing.read_bytes())

    with pytest.raises(OutriderError, match=r"^model the files of .* changed while they were read"):
        load_versioned("model", str(folder), overwritten)
    assert load_versioned("model", str(folder), lambda: 3)[0] == 3
