"""Drafts with suffix trees over the request's own tokens and earlier sequences.

This is SuffixDecoding (Oliaro et al., arXiv 2411.04975). The trees find the longest suffix of the
sequence that occurred before, and follow its likeliest continuations. A token's probability is
count(child) / count(parent). A guess ends where the product of its tokens' probabilities falls
below `min_token_probability`, and is at most `max_spec_factor` times as long as the suffix. The
trees are Arctic Inference's, in C++, which vLLM uses as well. They are called on the event loop.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from drafter_svc.families.base import Family, Loaded
from drafter_svc.families.settings import SuffixSettings
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import Opened
from outrider.protocol.model_info import ModelInfo

# The maximum number of tenants with trees. A new tenant replaces the least recently seen tenant.
_MAX_CORPORA = 64
# The maximum number of tokens of a matched suffix, and of a proposal: as many as a verifier takes.
_MAX_TREE_DEPTH = 64
# A proposal is at most as long as the suffix that was matched, and ends where the product of its
# tokens' probabilities falls below the second number. The verifier cuts tokens that do not pay.
_SPEC_FACTOR = 1.0
_MIN_TOKEN_PROBABILITY = 0.1


@dataclass(eq=False, slots=True)
class _Text:
    """A sequence in the trees: its request number, and how many of its tokens the trees have."""

    trees: Any
    number: int
    length: int


class Corpora:
    """The suffix trees of each tenant, for the ids of one tokenizer. Connections share them.

    Raises OutriderError(INVALID_VALUE) if the package arctic-inference is not installed.
    """

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._numbers = itertools.count()
        self._corpora: OrderedDict[str, Any] = OrderedDict()
        try:
            package = import_module("arctic_inference.suffix_decoding")
        except ImportError as cause:
            message = (
                "family: suffix needs the package arctic-inference; "
                "in Outrider's sources, pip install '.[suffix]'"
            )
            raise OutriderError(Reason.INVALID_VALUE, message, "family") from cause
        self._make: Callable[..., Any] = package.SuffixDecodingCache

    def begin(self, opened: Opened) -> _Text:
        """Add the tokens of a new sequence: prediction, prompt and output so far."""
        trees = self._trees(opened.tenant)
        number = next(self._numbers)
        prompt = opened.token_ids[: opened.prompt_length] or opened.token_ids
        trees.start_request(number, [*opened.prediction, *prompt])
        trees.add_active_response(number, opened.token_ids[len(prompt) :])
        return _Text(trees, number, len(opened.token_ids))

    def _trees(self, tenant: str) -> Any:
        key = "" if self._settings.is_public_pool else tenant
        if key not in self._corpora:
            self._corpora[key] = self._make(_MAX_TREE_DEPTH, self._settings.max_cached_requests)
        self._corpora.move_to_end(key)
        while len(self._corpora) > _MAX_CORPORA:
            self._corpora.popitem(last=False)
        return self._corpora[key]


class SuffixFamily(Family):
    """Drafts for the sequences of one connection with suffix trees.

    `corpora` are the trees that connections share; unless given, the family makes its own and
    raises as Corpora does.
    """

    name = "suffix"
    settings = SuffixSettings

    def __init__(self, settings: SuffixSettings, corpora: Corpora | None = None) -> None:
        self._settings = settings
        self._corpora = corpora or Corpora(settings)
        self._texts: dict[int, _Text] = {}

    @classmethod
    async def load(
        cls, settings: SuffixSettings, place: PlacementPlan, metrics: DrafterMetrics
    ) -> Loaded:
        """Check the settings. Connections of one tokenizer share their trees."""
        # Make trees and discard them, so that a missing package is reported now, not on connecting.
        Corpora(settings)
        by_tokenizer: dict[str, Corpora] = {}

        def make(info: ModelInfo) -> SuffixFamily:
            key = info.tokenizer_fingerprint
            if key not in by_tokenizer:
                by_tokenizer[key] = Corpora(settings)
            return cls(settings, by_tokenizer[key])

        return Loaded(make)

    def opened(self, sequence: DraftSequence) -> None:
        """Add a sequence's tokens to its tenant's trees."""
        self._texts[sequence.id] = self._corpora.begin(sequence.opened)

    def committed(self, sequence: DraftSequence, num_valid_tokens: int) -> None:
        """Add the committed tokens to the trees."""
        text = self._texts[sequence.id]
        text.trees.add_active_response(text.number, sequence.tokens[text.length :])
        text.length = len(sequence.tokens)

    def closed(self, sequence: DraftSequence) -> None:
        """Tell the trees that the sequence has ended; they keep it for later requests."""
        if text := self._texts.pop(sequence.id, None):
            text.trees.stop_request(text.number)

    async def aclose(self) -> None:
        """Tell the shared trees that this connection's sequences have ended."""
        for text in self._texts.values():
            text.trees.stop_request(text.number)
        self._texts.clear()

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Extend every sequence that has room; where the verifier verifies trees, add branches."""
        for sequence in sequences:
            if sequence.remaining_window > 0:
                self._extend(sequence)

    def _extend(self, sequence: DraftSequence) -> None:
        first = len(sequence.guesses)
        context = [*sequence.tokens, *sequence.guesses][-_MAX_TREE_DEPTH:]
        # Without the option for trees of tokens, the draft is a chain.
        draft = self._speculate(sequence, context, sequence.remaining_window)
        if not sequence.wants_tree:
            sequence.extend(draft.token_ids)
            return
        for tokens, confidences in _leaves(draft, sequence.acceptance):
            sequence.extend(tokens, confidences=confidences)
        if len(sequence.guesses) == first:
            return  # branches begin beside a guess
        if room := sequence.tree_room:
            count = len(sequence.guesses) - first + room
            # The factor bounds the tokens of the whole draft, so it grows with the tree's paths.
            paths = sequence.tree_tokens / sequence.draft_tokens
            tree = self._speculate(sequence, context, count, paths=paths, use_tree_spec=True)
            for tokens, confidences in _leaves(tree, sequence.acceptance):
                sequence.branch(first, tokens, confidences)

    def _speculate(
        self,
        sequence: DraftSequence,
        context: list[int],
        count: int,
        *,
        paths: float = 1.0,
        use_tree_spec: bool = False,
    ) -> Any:
        """Return at most `count` tokens that may follow `context`, the likeliest first."""
        text = self._texts[sequence.id]
        return text.trees.speculate(
            text.number,
            context,
            max_spec_tokens=min(count, _MAX_TREE_DEPTH),
            max_spec_factor=paths * _SPEC_FACTOR,
            min_token_prob=_MIN_TOKEN_PROBABILITY,
            use_tree_spec=use_tree_spec,
        )


def _leaves(draft: Any, acceptance: float) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and confidences of each path of a draft that no other path continues.

    The trees' probabilities are products of frequencies. A frequency says how probable a token is
    if one of the tokens that followed before comes again; `acceptance` says how often that is so.
    """
    paths: list[tuple[list[int], list[float]]] = []
    for token, parent, prob in zip(draft.token_ids, draft.parents, draft.probs, strict=True):
        tokens, confidences = paths[parent] if parent >= 0 else ([], [])
        frequency = prob / (draft.probs[parent] if parent >= 0 else 1.0)
        paths.append(([*tokens, token], [*confidences, acceptance * frequency]))
    inner = set(draft.parents)
    return [path for i, path in enumerate(paths) if i not in inner]
