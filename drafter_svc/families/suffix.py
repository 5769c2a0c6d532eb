"""Drafting by suffix trees over the request's own text and those before it (SuffixDecoding, Oliaro et al., arXiv 2411.04975).

The longest suffix of the text that occurred before is followed along its likeliest continuations: a token's probability is
count(child) / count(parent), a guess ends where their product falls below `min_token_probability`, and no guess is longer than
`max_spec_factor` times what was matched. The trees are those of Arctic Inference, in C++, that vLLM uses as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import Field

from drafter_svc.draft_sequence import DraftSequence
from drafter_svc.families.base import Family, FamilySettings, Loaded
from drafter_svc.metrics import Metrics
from drafter_svc.placement import PlacementPlan
from outrider.errors import OutriderError, Reason

# Each tenant's trees are its own; of more tenants than these the least recently seen are forgotten.
_MAX_CORPORA = 64


class SuffixSettings(FamilySettings):
    """Settings of the family suffix."""

    max_tree_depth: int = Field(64, ge=2, le=128)
    """Longest suffix matched, and longest run proposed."""

    max_cached_requests: int = Field(1000, ge=1)
    """Texts of a tenant that are remembered; the oldest go first."""

    max_spec_factor: float = Field(1.0, gt=0)
    """Longest run, in lengths of the suffix that was matched."""

    min_token_probability: float = Field(0.1, ge=0, le=1)
    """A run ends where the product of its tokens' frequencies falls below this."""

    is_public_pool: bool = False
    """Share one pool among all requests, tenants included."""


@dataclass(eq=False, slots=True)
class _Text:
    """The trees that a sequence's text is in, and how much of it is."""

    trees: Any
    length: int


class SuffixFamily(Family):
    """Raises OutriderError(INVALID_VALUE) when made without the package arctic-inference."""

    name = "suffix"
    settings = SuffixSettings

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._texts: dict[int, _Text] = {}
        self._corpora: OrderedDict[str, Any] = OrderedDict()
        try:
            self._make: Callable[..., Any] = import_module("arctic_inference.suffix_decoding").SuffixDecodingCache
        except ImportError as cause:
            message = "family: suffix needs the package arctic-inference; in Outrider's sources, pip install '.[suffix]'"
            raise OutriderError(Reason.INVALID_VALUE, message, "family") from cause

    @classmethod
    async def load(cls, settings: SuffixSettings, place: PlacementPlan, metrics: Metrics) -> Loaded:
        cls(settings)  # raises now, not when a verifier is found
        return Loaded(lambda info: cls(settings))

    def _trees(self, tenant: str) -> Any:
        key = "" if self._settings.is_public_pool else tenant
        if key not in self._corpora:
            self._corpora[key] = self._make(self._settings.max_tree_depth, self._settings.max_cached_requests)
        self._corpora.move_to_end(key)
        while len(self._corpora) > _MAX_CORPORA:
            self._corpora.popitem(last=False)
        return self._corpora[key]

    def opened(self, sequence: DraftSequence) -> None:
        opened = sequence.opened
        text = self._texts[sequence.id] = _Text(self._trees(opened.tenant), len(sequence.tokens))
        prompt = opened.token_ids[: opened.prompt_length] or opened.token_ids
        text.trees.start_request(sequence.id, [*opened.prediction, *prompt])
        text.trees.add_active_response(sequence.id, opened.token_ids[len(prompt) :])

    def committed(self, sequence: DraftSequence, standing: int) -> None:
        text = self._texts[sequence.id]
        text.trees.add_active_response(sequence.id, sequence.tokens[text.length :])
        text.length = len(sequence.tokens)

    def closed(self, sequence: DraftSequence) -> None:
        if text := self._texts.pop(sequence.id, None):
            text.trees.stop_request(sequence.id)

    async def propose(self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]) -> None:
        for sequence in sequences:
            if sequence.room > 0:
                sequence.extend(self._continuation(sequence))

    def _continuation(self, sequence: DraftSequence) -> list[int]:
        depth = self._settings.max_tree_depth
        draft = self._texts[sequence.id].trees.speculate(
            sequence.id,
            [*sequence.tokens[-depth:], *sequence.guesses][-depth:],
            max_spec_tokens=min(sequence.room, depth),
            max_spec_factor=self._settings.max_spec_factor,
            min_token_prob=self._settings.min_token_probability,
        )
        # Each entry follows from its neighbour before, since no tree was asked for.
        return list(draft.token_ids)
