"""What a family of drafters has to do. docs/drafters.md explains it with a whole family as its example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from drafter_svc.metrics import Metrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.strategy import Strategy
from outrider.model_info import ModelInfo


class FamilySettings(BaseModel):
    """Base of a family's own settings: they are flags, keys and variables of a drafter that runs this family, and of no other.

    The docstring below each is its help.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What outlives a connection: how to make the family for the model that a verifier serves.

    `tokenizer_fingerprint` is that of the tokenizer the family drafts with; empty if it works on ids alone, whatever they mean.
    """

    make: Callable[[ModelInfo], Family]
    tokenizer_fingerprint: str = ""


class Family(Strategy):
    """A strategy with settings, which `python -m drafter_svc --family` runs."""

    settings: ClassVar[type[FamilySettings]] = FamilySettings

    @classmethod
    async def load(cls, settings: Any, place: PlacementPlan, metrics: Metrics) -> Loaded:
        """Load what outlives connections. `settings` is an instance of `cls.settings`.

        Raises OutriderError(INVALID_VALUE) that names the setting at fault.
        """
        return Loaded(lambda info: cls())
