"""Drafters in the verifier's process.

The verifier and the families do not import each other; this module joins them. A drafter works as
in a separate process, but its messages do not pass through gRPC, and features are tensors on the
target's device. On a GPU, two processes would get the device in turns.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.registry import Collector

from drafter_svc.families.base import Loaded
from drafter_svc.families.head import HeadFamily
from drafter_svc.families.registry import find_family
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.observer import CountingObserver
from drafter_svc.placement import PlacementPlan
from outrider.drafter.strategy import Strategy
from outrider.drafter.stream import DraftStream
from outrider.errors import invalid
from outrider.protocol.draft_messages import Hello
from outrider.protocol.model_info import ModelInfo, Stage
from outrider_cli.drafter_spec import DrafterSpec, InProcessSettings
from verifier_svc.config import VerifierSettings
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.streams.in_process_stream import InProcessDrafter, InProcessVerifier

if TYPE_CHECKING:
    import torch

    from outrider.lm.runner import ModelRunner

# With more than one thread, a drafter's threads would meet at barriers on the cores of the target's
# threads.
_PLACE = PlacementPlan("local", (), None, threads=1)
# These settings of the verifier also apply to its drafters.
_SHARED = ("target", "device", "dtype", "trust_remote_code")


async def load_drafters(
    specs: Sequence[DrafterSpec], settings: VerifierSettings, metrics: VerifierMetrics
) -> list[InProcessDrafter]:
    """Load drafters one after the other, before the target takes the rest of a GPU's memory.

    If a head's file has several interpretations, one is chosen once the target is loaded. The
    drafters' metrics are added to the verifier's. Raises OutriderError(INVALID_VALUE) for a drafter
    that does not fit the target, or for two drafters with one name.
    """
    found: dict[str, InProcessDrafter] = {}
    counts = []
    for number, spec in enumerate(specs, 1):
        name = spec.options.get("id") or _name(spec.family, number)
        if name in found:
            raise invalid("in_process", f"names two drafters {name!r}")
        counts.append(DrafterMetrics(name, find_family(spec.family).name))
        with _kept_thread_count():
            found[name] = await _load(spec, settings, counts[-1])
    metrics.registry.register(_JoinedMetrics(counts))
    return [*found.values()]


def _name(family: str, number: int) -> str:
    """Return the id of this process's drafter `number`, from its family, host and process id."""
    name = f"{find_family(family).name}-{platform.node()}-{os.getpid()}"
    return name if number == 1 else f"{name}-{number}"


class _JoinedMetrics(Collector):
    """Joins the metrics of several drafters: each name once, with the samples of all drafters."""

    def __init__(self, drafters: Sequence[DrafterMetrics]) -> None:
        self._drafters = drafters

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics. Exporters call this method on their own threads."""
        found: dict[str, Metric] = {}
        for drafter in self._drafters:
            for metric in drafter.registry.collect():
                if (first := found.setdefault(metric.name, metric)) is not metric:
                    first.samples += metric.samples
        return found.values()


def in_process_settings(spec: DrafterSpec, settings: VerifierSettings) -> InProcessSettings:
    """Return a drafter's settings, some of which are the verifier's."""
    return spec.settings_in_process({name: getattr(settings, name) for name in _SHARED})


@contextmanager
def _kept_thread_count() -> Iterator[None]:
    """Restore torch's number of threads.

    A drafter's thread sets the number for itself, and for all threads that have not computed yet,
    such as the engine's.
    """
    import torch

    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


async def _load(
    spec: DrafterSpec, settings: VerifierSettings, counts: DrafterMetrics
) -> InProcessDrafter:
    from outrider.lm.devices import find_device

    drafter_settings = in_process_settings(spec, settings)
    if share := getattr(drafter_settings, "gpu_memory_share", None):
        share = _in_process_memory_share(share, find_device(settings.device))
        drafter_settings = drafter_settings.model_copy(update={"gpu_memory_share": share})
    loaded = await find_family(spec.family).load(drafter_settings, _PLACE, counts)

    def hello(strategy: Strategy, info: ModelInfo) -> Hello:
        return Hello(
            counts.drafter_id,
            strategy.name,
            loaded.tokenizer_fingerprint or info.tokenizer_fingerprint,
            strategy.max_draft_tokens,
            strategy.distributions,
            _PLACE.describe(strategy.device, strategy.gpu_uuid),
            feature_request=strategy.feature_request,
            requires_grammar=strategy.requires_grammar,
            weights_version=strategy.weights_version,
        )

    async def draft(verifier: InProcessVerifier) -> None:
        await DraftStream(verifier, loaded.make, hello, CountingObserver(counts)).run()

    return InProcessDrafter(counts.drafter_id, draft, partial(_choose_states, loaded, settings))


def _in_process_memory_share(share: float, device: torch.device) -> float:
    """Return a drafter's share of a GPU's memory plus the share that this process holds already."""
    import torch

    if device.type != "cuda":
        return share
    return min(1.0, share + torch.cuda.memory_reserved(device) / torch.cuda.mem_get_info(device)[1])


def _choose_states(
    loaded: Loaded, settings: VerifierSettings, runner: ModelRunner | None
) -> Sequence[int]:
    """Return the states that a drafter reads.

    For a head, first choose the interpretation of its file with the loaded target. If `runner` is
    None or cannot watch the states, the likeliest interpretation is taken.
    """
    family = loaded.make(ModelInfo(settings.served_names[0], Stage.LOADING, ""))
    if family.feature_request is None:
        return ()
    if isinstance(family, HeadFamily):
        from outrider.heads.reading_choice import states_of
        from outrider_cli.check_head import read_text

        spec = family.worker.spec
        if runner is not None and len(spec.readings) > 1 and runner.can_watch(states_of(spec)):
            family.worker.choose_reading(*read_text(runner, settings.target, spec))
        return family.worker.feature_request.states
    return family.feature_request.states
