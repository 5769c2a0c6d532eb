"""A head in the verifier's process.

The verifier and the family `head` know nothing of each other; this joins them. The drafter is the
same as in a process of its own, but its messages do not pass through gRPC, and features are tensors
on the target's device.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drafter_svc.families.head import HeadFamily
from drafter_svc.families.settings import HeadSettings
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.observer import CountingObserver
from drafter_svc.placement import PlacementPlan
from outrider.drafter.strategy import Strategy
from outrider.drafter.stream import DraftStream
from outrider.protocol.draft_messages import Hello
from outrider.protocol.model_info import ModelInfo, Stage
from verifier_svc.config import VerifierSettings
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.streams.own_stream import OwnDrafter, OwnVerifier

if TYPE_CHECKING:
    from outrider.lm.runner import ModelRunner

# More would meet at barriers on the cores that the target's threads compute on.
_PLACE = PlacementPlan("local", (), None, threads=1)


async def load_head(
    head: str, states: list[int], settings: VerifierSettings, metrics: VerifierMetrics
) -> OwnDrafter:
    """Load the head of a folder, before the target takes the rest of a GPU's memory.

    The head reads these hidden states. What else its file may mean is tried when the target is
    loaded. The head's metrics are added to the verifier's. Raises
    OutriderError(INVALID_VALUE) for a head that does not fit the target.
    """
    import torch

    name = f"{HeadFamily.name}-{platform.node()}-{os.getpid()}"
    counts = DrafterMetrics(name, HeadFamily.name)
    metrics.registry.register(counts.registry)
    thread_count = torch.get_num_threads()
    own = {
        "head": head,
        "head_states": states,
        "target": settings.target,
        "device": settings.device,
        "trust_remote_code": settings.trust_remote_code,
    }
    loaded = await HeadFamily.load(HeadSettings.model_validate(own), _PLACE, counts)
    # The head's thread has set the number for itself, and for all threads that have not computed
    # yet. The engine's is one of them.
    torch.set_num_threads(thread_count)

    def hello(family: Strategy, info: ModelInfo) -> Hello:
        return Hello(
            name,
            family.name,
            loaded.tokenizer_fingerprint,
            family.max_draft_tokens,
            family.distributions,
            _PLACE.describe(family.device, family.gpu_uuid),
            feature_request=family.feature_request,
        )

    async def draft(verifier: OwnVerifier) -> None:
        await DraftStream(verifier, loaded.make, hello, CountingObserver(counts)).run()

    def meet(runner: ModelRunner) -> Sequence[int]:
        from outrider.heads.reading_choice import states_of
        from outrider_cli.check_head import read_text

        family = loaded.make(ModelInfo(settings.served_names[0], Stage.LOADING, ""))
        assert isinstance(family, HeadFamily)
        spec = family.worker.spec
        if len(spec.readings) > 1 and runner.can_watch(states_of(spec)):
            family.worker.choose_reading(*read_text(runner, settings.target, spec))
        return family.worker.feature_request.states

    return OwnDrafter(draft, meet)
