"""Drafts with suffix trees over the request's own tokens and earlier sequences.

The method is SuffixDecoding (Oliaro et al., arXiv 2411.04975). The trees find the longest suffix of
the sequence that occurred before, and follow its likeliest continuations. A token's probability is
count(child) / count(parent). A guess ends where the product of its tokens' probabilities falls
below `min_token_prob`, and is at most `max_spec_factor` times as long as the suffix. The trees are
Arctic Inference's, in C++, which vLLM uses as well. The trees are called on the event loop. With
Redis, all replicas share the texts of earlier sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drafter_svc.families.base import Family, Loaded
from drafter_svc.families.settings import SuffixSettings
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from drafter_svc.pools.corpora import MAX_TREE_DEPTH, Corpora, TenantTrees
from drafter_svc.pools.keys import PoolKeys, read_secret
from drafter_svc.pools.redis import RedisCounters
from drafter_svc.pools.texts import TextPool
from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.model_info import ModelInfo

# A chain is at most as long as the suffix that was matched, and ends where the product of its
# tokens' probabilities falls below 0.1. The verifier cuts tokens that do not pay.
_SPEC_FACTOR = 1.0
_MIN_TOKEN_PROBABILITY = 0.1


@dataclass(eq=False, slots=True)
class _Text:
    """A sequence whose tokens are in its tenant's trees.

    The trees know the sequence by its `number`, and have the first `length` of its tokens. `tokens`
    is the sequence's own list, which grows. The output begins at the index `output_start`.
    """

    trees: TenantTrees
    number: int
    tokens: list[int]
    output_start: int
    length: int


class SuffixFamily(Family):
    """Drafts for the sequences of one connection with suffix trees.

    `corpora` are the trees that connections share. If they are not given, the family makes trees of
    its own, and raises what `Corpora` raises. An event loop must run if the trees share texts
    through Redis.
    """

    name = "suffix"
    settings = SuffixSettings

    def __init__(self, settings: SuffixSettings, corpora: Corpora | None = None) -> None:
        self._corpora = corpora or _corpora(settings)
        self._corpora.join()
        self._texts: dict[int, _Text] = {}

    @classmethod
    async def load(
        cls, settings: SuffixSettings, place: PlacementPlan, metrics: DrafterMetrics
    ) -> Loaded:
        """Check the settings. Connections of one tokenizer and vocabulary size share trees."""
        make_pool = _text_pool(settings, metrics)
        # Make trees and discard them, so that a missing package is reported now and not by `make`.
        _corpora(settings)
        by_tokenizer: dict[tuple[str, int], Corpora] = {}

        def make(info: ModelInfo) -> SuffixFamily:
            # A verifier that gives a wrong vocabulary size must neither bring its ids to the trees
            # of other verifiers nor limit these verifiers' ids.
            key = (info.tokenizer_fingerprint, info.vocab_size)
            if key not in by_tokenizer:
                by_tokenizer[key] = _corpora(settings, make_pool(info))
            return cls(settings, by_tokenizer[key])

        return Loaded(make)

    def opened(self, sequence: DraftSequence) -> None:
        """Add a sequence's tokens to its tenant's trees."""
        opened = sequence.opened
        tokens = sequence.tokens
        start = opened.prompt_length or len(tokens)
        prompt = [*opened.prediction, *tokens[:start]]
        trees, number = self._corpora.begin(opened.tenant, prompt, tokens[start:])
        self._texts[sequence.id] = _Text(trees, number, tokens, start, len(tokens))

    def committed(self, sequence: DraftSequence, num_valid_tokens: int) -> None:
        """Add the committed tokens to the trees."""
        text = self._texts[sequence.id]
        text.trees.cache.add_active_response(text.number, text.tokens[text.length :])
        text.length = len(text.tokens)

    def closed(self, sequence: DraftSequence) -> None:
        """Tell the trees that the sequence has ended; they keep it for later requests."""
        if text := self._texts.pop(sequence.id, None):
            self._end(text)

    async def aclose(self) -> None:
        """Tell the shared trees that this connection and its sequences have ended."""
        try:
            for text in self._texts.values():
                self._end(text)
        finally:
            self._texts.clear()
            await self._corpora.leave()

    def _end(self, text: _Text) -> None:
        self._corpora.end(text.trees, text.number, text.tokens[text.output_start : text.length])

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Extend every sequence that has room; where the verifier verifies trees, add branches."""
        for sequence in sequences:
            if sequence.remaining_window > 0:
                self._extend(sequence)

    def _extend(self, sequence: DraftSequence) -> None:
        first = len(sequence.guesses)
        context = [*sequence.tokens, *sequence.guesses][-MAX_TREE_DEPTH:]
        # Without `use_tree_spec` the draft is a chain.
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
            # The factor bounds the tokens of the whole draft, so it grows with the number of paths.
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
        return text.trees.cache.speculate(
            text.number,
            context,
            max_spec_tokens=min(count, MAX_TREE_DEPTH),
            max_spec_factor=paths * _SPEC_FACTOR,
            min_token_prob=_MIN_TOKEN_PROBABILITY,
            use_tree_spec=use_tree_spec,
        )


def _leaves(draft: Any, acceptance: float) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and confidences of each path from a draft's root to a leaf.

    The trees' probabilities are products of frequencies. A frequency is the probability of a token,
    given that one of the tokens that followed before comes again. `acceptance` estimates the
    probability that one of them comes again.
    """
    paths: list[tuple[list[int], list[float]]] = []
    for token, parent, prob in zip(draft.token_ids, draft.parents, draft.probs, strict=True):
        tokens, confidences = paths[parent] if parent >= 0 else ([], [])
        frequency = prob / (draft.probs[parent] if parent >= 0 else 1.0)
        paths.append(([*tokens, token], [*confidences, acceptance * frequency]))
    inner = set(draft.parents)
    return [path for i, path in enumerate(paths) if i not in inner]


def _corpora(settings: SuffixSettings, pool: TextPool | None = None) -> Corpora:
    return Corpora(settings.max_cached_requests, is_public=settings.is_public_pool, pool=pool)


def _text_pool(
    settings: SuffixSettings, metrics: DrafterMetrics
) -> Callable[[ModelInfo], TextPool | None]:
    """Return a function that makes a tokenizer's pool in Redis.

    The function returns None if `redis` is not set. Raises OutriderError(INVALID_VALUE) that names
    the setting at fault.
    """
    server = settings.redis_server()
    if server is None:
        return lambda info: None
    keys = PoolKeys(read_secret(settings.pool_secret_file), public=settings.is_public_pool)
    # All tokenizers share the counters.
    counters = RedisCounters()
    metrics.watch_redis(counters)

    def make(info: ModelInfo) -> TextPool:
        return TextPool(
            server,
            keys,
            info.tokenizer_fingerprint,
            info.vocab_size,
            settings.max_cached_requests,
            settings.pool_ttl_seconds,
            counters,
        )

    return make
