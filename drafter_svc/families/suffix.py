"""Drafting by suffix trees over the request's own text and those before it (SuffixDecoding, Oliaro et al., arXiv 2411.04975).

The longest suffix of the text that occurred before is followed along its likeliest continuations: a token's probability is
count(child) / count(parent), a guess ends where their product falls below `min_token_probability`, and no guess is longer than
`max_spec_factor` times what was matched. The trees are those of Arctic Inference, in C++, that vLLM uses as well.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from drafter_svc.chain import Chain
from drafter_svc.families.base import Failures
from outrider.errors import OutriderError, Reason
from outrider.messages import MAX_DEPTH, DraftBatch, Opened, Rule, Verdict

# Each tenant's trees are its own; of more tenants than these the least recently seen are forgotten.
_MAX_CORPORA = 64


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """`max_tree_depth` tokens are matched and guessed at most, `max_cached_requests` texts make the corpus of a tenant."""

    max_tree_depth: int = 64
    max_cached_requests: int = 1000
    max_spec_factor: float = 1.0
    min_token_probability: float = 0.1
    is_public_pool: bool = False


@dataclass(eq=False, slots=True)
class _Text:
    """A sequence's chain, and the trees that know it."""

    chain: Chain
    trees: Any


class SuffixFamily:
    """Raises OutriderError(INVALID_VALUE) when made without the package arctic-inference."""

    name = "suffix"
    distributions = frozenset({Rule.ONE_HOT})
    max_depth = MAX_DEPTH
    device = "cpu"

    def __init__(self, options: SuffixOptions) -> None:
        self._options = options
        self._texts: dict[int, _Text] = {}
        self.failures = Failures(self.close)
        self._corpora: OrderedDict[str, Any] = OrderedDict()
        try:
            self._make: Callable[..., Any] = import_module("arctic_inference.suffix_decoding").SuffixDecodingCache
        except ImportError as cause:
            message = "family: suffix needs the package arctic-inference; in Outrider's sources, pip install '.[suffix]'"
            raise OutriderError(Reason.INVALID_VALUE, message, "family") from cause

    def _trees(self, tenant: str) -> Any:
        key = "" if self._options.is_public_pool else tenant
        if key not in self._corpora:
            self._corpora[key] = self._make(self._options.max_tree_depth, self._options.max_cached_requests)
        self._corpora.move_to_end(key)
        while len(self._corpora) > _MAX_CORPORA:
            self._corpora.popitem(last=False)
        return self._corpora[key]

    def open(self, opened: Opened) -> None:
        text = _Text(Chain(opened), self._trees(opened.tenant))
        self._texts[opened.sequence_id] = text
        prompt = opened.token_ids[: opened.prompt_length] or opened.token_ids
        text.trees.start_request(opened.sequence_id, [*opened.prediction, *prompt])
        text.trees.add_active_response(opened.sequence_id, opened.token_ids[len(prompt) :])

    def verdict(self, verdict: Verdict) -> None:
        if text := self._texts.get(verdict.sequence_id):
            text.chain.apply(verdict)
            text.trees.add_active_response(verdict.sequence_id, verdict.new_token_ids)

    def close(self, sequence_id: int) -> None:
        if text := self._texts.pop(sequence_id, None):
            text.trees.stop_request(sequence_id)

    async def aclose(self) -> None:
        for sequence_id in list(self._texts):
            self.close(sequence_id)

    async def draft(self, interrupted: Callable[[], bool]) -> DraftBatch:
        """A run for every sequence with room, or a skip where nothing is likely enough."""
        batch = DraftBatch()
        for sequence_id, text in list(self._texts.items()):
            with self.failures.of(sequence_id):
                self._draft(sequence_id, text, batch)
        return batch

    def _draft(self, sequence_id: int, text: _Text, batch: DraftBatch) -> None:
        """Add one sequence's part."""
        chain = text.chain
        if run := chain.resend():
            batch.proposals.append(run)
        if chain.room == 0:
            return
        started = time.monotonic()
        guess = self._continuation(sequence_id, text)
        if guess:
            batch.proposals.append(chain.grow(guess, draft_seconds=time.monotonic() - started))
        else:
            batch.skips.append(chain.skip())

    def _continuation(self, sequence_id: int, text: _Text) -> list[int]:
        options, chain = self._options, text.chain
        depth = options.max_tree_depth
        draft = text.trees.speculate(
            sequence_id,
            [*chain.tokens[-depth:], *chain.ahead][-depth:],
            max_spec_tokens=min(chain.room, depth),
            max_spec_factor=options.max_spec_factor,
            min_token_prob=options.min_token_probability,
        )
        # Each entry follows from its neighbour before, since no tree was asked for.
        return list(draft.token_ids)
