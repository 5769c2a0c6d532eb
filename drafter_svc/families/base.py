"""The interface of a drafter family. docs/drafters.md shows a whole family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from drafter_svc.families.settings import FamilySettings
from outrider.drafter.strategy import Strategy
from outrider.protocol.model_info import ModelInfo

if TYPE_CHECKING:
    from drafter_svc.metrics import DrafterMetrics
    from drafter_svc.placement import PlacementPlan

__all__ = ["Family", "FamilySettings", "Loaded"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded family: one object for the process and all its connections.

    The event loop calls `make` for each new connection, with the model that the verifier serves.
    `tokenizer_fingerprint` is the fingerprint of the family's tokenizer; empty if the family works
    only on ids. `page_count` is the number of pages of the family's KV cache, if the next load must
    take the same number, whatever memory is free then; else None.
    """

    make: Callable[[ModelInfo], Family]
    tokenizer_fingerprint: str = ""
    page_count: int | None = None


class Family(Strategy):
    """A strategy with settings, which `outrider drafter --family` runs.

    The process calls `load` once, and again after each SIGHUP if `has_weights` is true. Each
    connection to a verifier has a separate instance. The connection's session calls the instance's
    methods on the event loop, one at a time. While `propose` of one connection awaits, `propose` of
    another connection may run.
    """

    settings: ClassVar[type[FamilySettings]] = FamilySettings
    has_weights: ClassVar[bool] = False
    """True if SIGHUP makes the process load again, and draft with the earlier weights meanwhile."""

    @classmethod
    async def load(cls, settings: Any, place: PlacementPlan, metrics: DrafterMetrics) -> Loaded:
        """Load what all connections share. `settings` is an instance of `cls.settings`.

        The base class loads nothing, and makes instances of the family without arguments.

        Raises OutriderError(INVALID_VALUE) that names the setting at fault.
        """
        return Loaded(lambda info: cls())
