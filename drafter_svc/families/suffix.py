"""Drafting by suffix trees over the request's own text and those before it (SuffixDecoding, Oliaro et al., arXiv 2411.04975).

The longest suffix of the text that occurred before is followed along its likeliest continuations: a token's probability is
count(child) / count(parent), a guess ends where their product falls below `min_token_probability`, and no guess is longer than
`max_spec_factor` times what was matched. The trees are those of Arctic Inference, in C++, that vLLM uses as well.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import Field

from drafter_svc.families.base import Family, FamilySettings, Loaded
from drafter_svc.metrics import Metrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError, Reason
from outrider.messages import Opened
from outrider.model_info import ModelInfo

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
    """The trees that a sequence's text is in, its number there, and how much of it is."""

    trees: Any
    number: int
    length: int


class Corpora:
    """Each tenant's trees, of one tokenizer's ids. Connections share them.

    Raises OutriderError(INVALID_VALUE) when made without the package arctic-inference.
    """

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._numbers = itertools.count()
        self._corpora: OrderedDict[str, Any] = OrderedDict()
        try:
            self._make: Callable[..., Any] = import_module(
                "arctic_inference.suffix_decoding"
            ).SuffixDecodingCache
        except ImportError as cause:
            message = "family: suffix needs the package arctic-inference; in Outrider's sources, pip install '.[suffix]'"
            raise OutriderError(Reason.INVALID_VALUE, message, "family") from cause

    def begin(self, opened: Opened) -> _Text:
        """Take in the text of a sequence that begins."""
        trees, number = self._trees(opened.tenant), next(self._numbers)
        prompt = opened.token_ids[: opened.prompt_length] or opened.token_ids
        trees.start_request(number, [*opened.prediction, *prompt])
        trees.add_active_response(number, opened.token_ids[len(prompt) :])
        return _Text(trees, number, len(opened.token_ids))

    def _trees(self, tenant: str) -> Any:
        key = "" if self._settings.is_public_pool else tenant
        if key not in self._corpora:
            self._corpora[key] = self._make(
                self._settings.max_tree_depth, self._settings.max_cached_requests
            )
        self._corpora.move_to_end(key)
        while len(self._corpora) > _MAX_CORPORA:
            self._corpora.popitem(last=False)
        return self._corpora[key]


class SuffixFamily(Family):
    """One verifier's texts in the trees that connections share. Without `corpora` it has trees of its own; raises as they do."""

    name = "suffix"
    settings = SuffixSettings

    def __init__(self, settings: SuffixSettings, corpora: Corpora | None = None) -> None:
        self._settings = settings
        self._corpora = corpora or Corpora(settings)
        self._texts: dict[int, _Text] = {}

    @classmethod
    async def load(cls, settings: SuffixSettings, place: PlacementPlan, metrics: Metrics) -> Loaded:
        Corpora(settings)  # raises now, not when a verifier is found
        by_tokenizer: dict[str, Corpora] = {}

        def make(info: ModelInfo) -> SuffixFamily:
            return cls(
                settings, by_tokenizer.setdefault(info.tokenizer_fingerprint, Corpora(settings))
            )

        return Loaded(make)

    def opened(self, sequence: DraftSequence) -> None:
        self._texts[sequence.id] = self._corpora.begin(sequence.opened)

    def committed(self, sequence: DraftSequence, standing: int) -> None:
        text = self._texts[sequence.id]
        text.trees.add_active_response(text.number, sequence.tokens[text.length :])
        text.length = len(sequence.tokens)

    def closed(self, sequence: DraftSequence) -> None:
        if text := self._texts.pop(sequence.id, None):
            text.trees.stop_request(text.number)

    async def aclose(self) -> None:
        """The texts are over for the trees too, which others go on with."""
        for text in self._texts.values():
            text.trees.stop_request(text.number)
        self._texts.clear()

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        for sequence in sequences:
            if sequence.room > 0:
                sequence.extend(self._continuation(sequence))

    def _continuation(self, sequence: DraftSequence) -> list[int]:
        depth = self._settings.max_tree_depth
        text = self._texts[sequence.id]
        draft = text.trees.speculate(
            text.number,
            [*sequence.tokens[-depth:], *sequence.guesses][-depth:],
            max_spec_tokens=min(sequence.room, depth),
            max_spec_factor=self._settings.max_spec_factor,
            min_token_prob=self._settings.min_token_probability,
        )
        # Each entry follows from its neighbour before, since no tree was asked for.
        return list(draft.token_ids)
