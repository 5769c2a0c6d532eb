"""What a family of drafters has to do. docs/drafters.md explains it with a whole family as its example."""

# ruff: noqa: B027  # hooks that a family may leave out
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from drafter_svc.draft_sequence import DraftSequence
from drafter_svc.metrics import Metrics
from drafter_svc.placement import PlacementPlan
from outrider.messages import MAX_DEPTH, ModelInfo, Rule


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


class Family(ABC):
    """A way of drafting, for one connection to a verifier.

    The session owns the sequences; a family owns its model or pool, and what it caches for each sequence. What a method raises for
    one sequence costs that sequence its drafts and nobody else anything. An OutriderError ends the connection, and an exception of
    a `fatal` type the process.
    """

    name: str
    settings: ClassVar[type[FamilySettings]] = FamilySettings
    distributions: frozenset[Rule] = frozenset({Rule.ONE_HOT})
    max_draft_tokens = MAX_DEPTH
    """Most guesses, one behind the other, that it ever offers for a step; at most 64."""
    device = "cpu"
    fatal: tuple[type[Exception], ...] = ()

    @classmethod
    async def load(cls, settings: Any, place: PlacementPlan, metrics: Metrics) -> Loaded:
        """Load what outlives connections. `settings` is an instance of `cls.settings`.

        Raises OutriderError(INVALID_VALUE) that names the setting at fault.
        """
        return Loaded(lambda info: cls())

    @abstractmethod
    async def propose(self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]) -> None:
        """Guess for these sequences with `sequence.extend` and `sequence.branch`; `sequence.goal` tokens are wanted of each now.

        A sequence for which nothing is offered is not asked for again before its next verdict, unless it is postponed. What takes
        long looks at `interrupted` now and then and returns once that is true, since a message of the verifier waits to be read.
        """

    def opened(self, sequence: DraftSequence) -> None:
        """A sequence begins. This and the next two run between two drafts and should be quick."""

    def committed(self, sequence: DraftSequence, standing: int) -> None:
        """A verdict was followed: of the tokens held before, committed ones and guesses behind them, the first `standing` stand."""

    def closed(self, sequence: DraftSequence) -> None:
        """A sequence is over or given up; also after `opened` failed."""

    async def aclose(self) -> None:
        """The connection is over. Sequences are not closed one by one."""
