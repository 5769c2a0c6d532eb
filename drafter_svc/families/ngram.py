"""Drafting by what followed the same n-gram before: in what the client predicts, in the request's own text, then in the pool that
requests share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from drafter_svc.chain import Chain
from drafter_svc.families.base import Failures
from drafter_svc.outcomes import fan_out
from drafter_svc.pools.keys import TenantKeys
from drafter_svc.pools.memory import MemoryPool, NgramOptions
from drafter_svc.pools.prediction import Prediction
from drafter_svc.pools.redis import Query, RedisPool
from outrider.messages import MAX_DEPTH, DraftBatch, Opened, Rule, Verdict

# Outcomes that a round prepares for, one for each place where a draft can end; where the texts are too many for that, so many for
# each. Looking them up is almost free, but sending them is not.
_BRANCHES = 64
_FEWEST = 4


@dataclass(eq=False, slots=True)
class _Text:
    """A sequence's chain and the n-grams of its own text. `shared_count` tokens were offered to Redis under `tenant`'s keys."""

    chain: Chain
    pool: MemoryPool
    tenant: TenantKeys | None = None
    prediction: Prediction | None = None
    shared_count: int = 0
    enumerated: tuple[int, int] = (-1, 0)
    """The epoch and length for which outcomes were guessed."""

    def context(self, size: int) -> list[int]:
        """The last tokens, guesses included; a text is long, and what is looked up of it short."""
        return [*self.chain.tokens[-size:], *self.chain.ahead][-size:]


class NgramFamily:
    """`shared` is the pool of all requests of this process, `redis` that of all replicas, by tenant or for all; with both None each
    request has its own pool alone.
    """

    name = "ngram"
    distributions = frozenset({Rule.ONE_HOT})
    max_depth = MAX_DEPTH
    device = "cpu"

    def __init__(
        self, options: NgramOptions, max_entries: int, shared: MemoryPool | None = None, redis: RedisPool | None = None
    ) -> None:
        self._options = options
        self._max_entries = max_entries
        self._shared = shared
        self._redis = redis
        self._texts: dict[int, _Text] = {}
        self.failures = Failures(lambda sequence_id: self._texts.pop(sequence_id, None))

    def open(self, opened: Opened) -> None:
        text = _Text(Chain(opened), MemoryPool(self._options, self._max_entries))
        if self._redis is not None:
            text.tenant = self._redis.tenant(opened.tenant)
        if opened.prediction:
            text.prediction = Prediction(opened.prediction, max(2, self._options.max_matching_ngram_size))
        self._texts[opened.sequence_id] = text
        self._index(text, 0)

    def verdict(self, verdict: Verdict) -> None:
        if text := self._texts.get(verdict.sequence_id):
            start = len(text.chain.tokens)
            text.chain.apply(verdict)
            self._index(text, start)

    def close(self, sequence_id: int) -> None:
        if text := self._texts.pop(sequence_id, None):
            self._offer(text, len(text.chain.tokens) - 1)

    async def aclose(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()

    def _index(self, text: _Text, start: int) -> None:
        text.pool.index(text.chain.tokens, start)
        if self._shared is not None:
            self._shared.index(text.chain.tokens, start)
        # Offered once its continuation is whole; the rest follows when the text ends.
        self._offer(text, len(text.chain.tokens) - self._options.max_draft_len)

    def _offer(self, text: _Text, end: int) -> None:
        """Have the n-grams that end at the positions up to `end` written to Redis."""
        if self._redis is None or text.tenant is None:
            return
        tokens, size = text.chain.tokens, self._options.max_matching_ngram_size
        for position in range(max(1, text.shared_count), end + 1):
            continuation = tokens[position : position + self._options.max_draft_len]
            for ngram in _suffixes(tokens[max(0, position - size) : position], size):
                self._redis.offer(text.tenant, ngram, continuation)
        text.shared_count = max(text.shared_count, end + 1)

    async def draft(self, interrupted: Callable[[], bool]) -> DraftBatch:
        """A run for every sequence with room, or a skip where nothing is known; one round trip to Redis for all of them.

        Outcomes are prepared for when there is nothing else to say.
        """
        started = time.monotonic()
        batch = DraftBatch()
        unknown: dict[int, _Text] = {}
        for sequence_id, text in list(self._texts.items()):
            with self.failures.of(sequence_id):
                if run := text.chain.resend():
                    batch.proposals.append(run)
                if text.chain.room > 0 and not self._grow(text, self._local(text), batch):
                    unknown[sequence_id] = text
        shared = await self._ask_redis(unknown.values()) if unknown else []
        for (sequence_id, text), continuation in zip(unknown.items(), shared, strict=True):
            with self.failures.of(sequence_id):
                if not self._grow(text, continuation, batch):
                    batch.skips.append(text.chain.skip())
        if not batch.proposals and not batch.skips:
            for sequence_id, text in list(self._texts.items()):
                with self.failures.of(sequence_id):
                    self._enumerate(text, batch)
        seconds = time.monotonic() - started
        batch.proposals = [replace(proposal, draft_seconds=seconds) for proposal in batch.proposals]
        return batch

    def _enumerate(self, text: _Text, batch: DraftBatch) -> None:
        """Guess what else may be committed while the chain's first draft is verified, and what would follow."""
        chain = text.chain
        if text.enumerated == (chain.epoch, len(chain.tokens)) or chain.window.depth <= chain.depth or not chain.ahead:
            return
        text.enumerated = (chain.epoch, len(chain.tokens))
        places = min(chain.depth, len(chain.ahead) - 1)
        budget = max(_FEWEST, _BRANCHES // len(self._texts))
        counts = [1] * (places + 1) if places < budget else fan_out(chain.acceptance, places, budget)
        for at, count in enumerate(counts):
            if count == 0:
                continue
            size = self._options.max_matching_ngram_size
            context = [*chain.tokens[-size:], *chain.ahead[:at]][-size:]
            for run in text.pool.alternatives(context, chain.depth, chain.branches_at(at), count):
                if cut := run[: max(0, min(chain.side_room, chain.window.depth - at))]:
                    batch.proposals.append(chain.branch(at, cut))

    def _grow(self, text: _Text, continuation: list[int], batch: DraftBatch) -> bool:
        run = continuation[: text.chain.room]
        if run:
            batch.proposals.append(text.chain.grow(run))
        return bool(run)

    def _local(self, text: _Text) -> list[int]:
        if text.prediction is not None:
            generated = [*text.chain.tokens[text.chain.opened.prompt_length :], *text.chain.ahead]
            if expected := text.prediction.continuation(generated, text.chain.room):
                return expected
        context = text.context(self._options.max_matching_ngram_size)
        own = text.pool.continuation(context, text.chain.room)
        return own if own or self._shared is None else self._shared.continuation(context, text.chain.room)

    async def _ask_redis(self, texts: Collection[_Text]) -> list[list[int]]:
        if self._redis is None:
            return [[] for _ in texts]
        size = self._options.max_matching_ngram_size
        queries = [Query(text.tenant, _suffixes(text.context(size), size)) for text in texts if text.tenant is not None]
        return await self._redis.lookup(queries)


def _suffixes(tokens: Sequence[int], longest: int) -> list[Sequence[int]]:
    """The n-grams that `tokens` end with, the longest first."""
    return [tokens[-size:] for size in range(min(longest, len(tokens)), 0, -1)]
