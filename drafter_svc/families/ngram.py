"""Drafts the tokens that followed the same n-gram before.

The family looks in the text that the client predicts, then in the request's prompt and output, then
in the pool that requests share. Everything here runs on the event loop; only Redis is awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafter_svc.branching import Branch, fan_out, offer_likeliest
from drafter_svc.families.base import Family, Loaded
from drafter_svc.families.settings import NgramSettings
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from drafter_svc.pools.keys import PoolKeys, TenantKeys, read_secret
from drafter_svc.pools.memory import Continuation, MemoryPool, NgramOptions
from drafter_svc.pools.prediction import Prediction
from drafter_svc.pools.redis import Query, RedisCounters, RedisOptions, RedisPool
from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.model_info import ModelInfo

# Between two verdicts, all sequences together have about this many branches. Each sequence may have
# `_MIN_BRANCHES` in any case. A sequence needs a branch at each place where its draft can end.
# Finding branches costs almost nothing, but sending them costs time.
_BRANCHES = 64
_MIN_BRANCHES = 4


@dataclass(eq=False, slots=True)
class _Text:
    """The n-grams of one sequence's tokens.

    The first `indexed_count` tokens are in the pools of this process. The n-grams that end at
    positions below `shared_count` were offered to Redis under `tenant`'s keys.
    """

    pool: MemoryPool
    tenant: TenantKeys | None = None
    prediction: Prediction | None = None
    indexed_count: int = 0
    shared_count: int = 0


class NgramFamily(Family):
    """Drafts for the sequences of one connection by looking up n-grams.

    Each request has a pool of its own. `shared` is the public pool of this process, which all
    connections use. `redis` is this connection's client of the pools that all replicas share: one
    pool for each tenant, or one for all tenants. `shared` and `redis` may be None.
    """

    name = "ngram"
    settings = NgramSettings

    def __init__(
        self,
        options: NgramOptions,
        max_entries: int,
        shared: MemoryPool | None = None,
        redis: RedisPool | None = None,
    ) -> None:
        self._options = options
        self._max_entries = max_entries
        self._shared = shared
        self._redis = redis
        self._texts: dict[int, _Text] = {}

    @classmethod
    async def load(
        cls, settings: NgramSettings, place: PlacementPlan, metrics: DrafterMetrics
    ) -> Loaded:
        """Check the settings, and make the objects that connections share."""
        make_redis = _redis_pool(settings, metrics)
        options = NgramOptions(settings.max_draft_len, settings.max_matching_ngram_size)
        # Each tokenizer has its own public pool, since ids of two tokenizers differ. Pools outlive
        # connections.
        shared: dict[str, MemoryPool] = {}

        def make(info: ModelInfo) -> NgramFamily:
            pool = None
            if settings.is_public_pool:
                pool = shared.setdefault(
                    info.tokenizer_fingerprint, MemoryPool(options, settings.pool_entries)
                )
            return cls(options, settings.pool_entries, pool, make_redis(info))

        return Loaded(make)

    def opened(self, sequence: DraftSequence) -> None:
        """Index a sequence's tokens."""
        opened = sequence.opened
        text = self._texts[sequence.id] = _Text(MemoryPool(self._options, self._max_entries))
        if self._redis is not None:
            text.tenant = self._redis.tenant(opened.tenant)
        if opened.prediction:
            text.prediction = Prediction(
                opened.prediction, max(2, self._options.max_matching_ngram_size)
            )
        self._index(sequence, text)

    def committed(self, sequence: DraftSequence, num_valid_tokens: int) -> None:
        """Index the committed tokens."""
        self._index(sequence, self._texts[sequence.id])

    def closed(self, sequence: DraftSequence) -> None:
        """Offer Redis the last n-grams of a sequence, and drop its pool."""
        if text := self._texts.pop(sequence.id, None):
            self._offer(sequence, text, len(sequence.tokens) - 1)

    async def aclose(self) -> None:
        """Close this connection's pool in Redis."""
        if self._redis is not None:
            await self._redis.aclose()

    def _index(self, sequence: DraftSequence, text: _Text) -> None:
        """Add the new tokens to the pools."""
        for pool in (text.pool, self._shared):
            if pool is not None:
                pool.index(sequence.tokens, text.indexed_count)
        text.indexed_count = len(sequence.tokens)
        # Offer an n-gram when its continuation is complete. `closed` offers the last n-grams.
        self._offer(sequence, text, len(sequence.tokens) - self._options.max_draft_len)

    def _offer(self, sequence: DraftSequence, text: _Text, end: int) -> None:
        """Offer Redis the new n-grams that end at positions up to `end`."""
        if self._redis is None or text.tenant is None:
            return
        tokens = sequence.tokens
        size = self._options.max_matching_ngram_size
        for position in range(max(1, text.shared_count), end + 1):
            continuation = tokens[position : position + self._options.max_draft_len]
            for ngram in _suffixes(tokens[max(0, position - size) : position], size):
                self._redis.offer(text.tenant, ngram, continuation)
        text.shared_count = max(text.shared_count, end + 1)

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Extend every sequence that has room, and offer branches for the other sequences.

        One round trip to Redis serves all sequences for which this process has no continuation.
        """
        unknown: list[DraftSequence] = []
        for sequence in sequences:
            if sequence.remaining_window == 0:
                self._branch(sequence)
            elif run := self._local(sequence):
                self._extend(sequence, run)
            else:
                unknown.append(sequence)
        if unknown and self._redis is not None:
            runs = await self._redis.lookup(self._queries(unknown))
            for sequence, run in zip(unknown, runs, strict=True):
                self._extend(sequence, run)

    def _extend(self, sequence: DraftSequence, run: list[int]) -> None:
        """Extend the chain by `run`; where the verifier verifies trees, offer branches as well.

        Branches are the other continuations that the request's own pool, else the public pool,
        knows at each place of `run`.
        """
        if not sequence.wants_tree:
            sequence.extend(run)
            return
        run = run[: sequence.remaining_window]
        first = len(sequence.guesses)
        text = self._context(sequence, sequence.guesses)
        confidences: list[float] = []
        branches: list[Branch] = []
        for i, token in enumerate(run):
            share, others = self._shares(sequence, [*text, *run[:i]], token)
            # The run may come from the prediction or from Redis, which have no counts.
            confidences.append(share or sequence.acceptance)
            branches += [Branch(first + i, other.tokens, other.confidences) for other in others]
        sequence.extend(run, confidences=confidences)
        offer_likeliest(sequence, branches)

    def _shares(
        self, sequence: DraftSequence, context: list[int], token: int
    ) -> tuple[float, list[Continuation]]:
        pool = self._texts[sequence.id].pool
        found = pool.shares(context, sequence.draft_tokens, token)
        if self._shared is None or found[0] or found[1]:
            return found
        return self._shared.shares(context, sequence.draft_tokens, token)

    def _branch(self, sequence: DraftSequence) -> None:
        """Offer other continuations that the sequence's own pool knows, at each place of the draft.

        If the draft fails at a place, the branch there is the next draft, and the verifier already
        has it.
        """
        # Where the verifier verifies trees, `_extend` has offered the branches.
        if sequence.wants_tree:
            sequence.give_up_branches()
            return
        pool = self._texts[sequence.id].pool
        places = min(sequence.draft_tokens, len(sequence.guesses) - 1)
        budget = max(_MIN_BRANCHES, _BRANCHES // len(self._texts))
        counts = [1] * (places + 1)
        if len(counts) > budget:
            counts = fan_out(sequence.acceptance, places, budget)
        for at, count in enumerate(counts):
            context = self._context(sequence, sequence.guesses[:at])
            taken = sequence.guessed_at(at)
            for run in pool.alternatives(context, sequence.draft_tokens, taken, count):
                sequence.branch(at, run)
        sequence.give_up_branches()

    def _local(self, sequence: DraftSequence) -> list[int]:
        """Return a continuation from the prediction, the request's own pool or the public pool."""
        text = self._texts[sequence.id]
        room = sequence.remaining_window
        if text.prediction is not None:
            generated = [*sequence.tokens[sequence.opened.prompt_length :], *sequence.guesses]
            if expected := text.prediction.continuation(generated, room):
                return expected
        context = self._context(sequence, sequence.guesses)
        own = text.pool.continuation(context, room)
        if own or self._shared is None:
            return own
        return self._shared.continuation(context, room)

    def _queries(self, sequences: Sequence[DraftSequence]) -> list[Query]:
        size = self._options.max_matching_ngram_size
        tenants = [self._texts[sequence.id].tenant for sequence in sequences]
        contexts = [self._context(sequence, sequence.guesses) for sequence in sequences]
        pairs = zip(tenants, contexts, strict=True)
        return [
            Query(tenant, _suffixes(context, size))
            for tenant, context in pairs
            if tenant is not None
        ]

    def _context(self, sequence: DraftSequence, guesses: Sequence[int]) -> list[int]:
        """Return the last committed and guessed tokens, as many as a lookup needs."""
        size = self._options.max_matching_ngram_size
        return [*sequence.tokens[-size:], *guesses][-size:]


def _suffixes(tokens: Sequence[int], longest: int) -> list[Sequence[int]]:
    """Return the n-grams at the end of `tokens`, the longest first."""
    return [tokens[-size:] for size in range(min(longest, len(tokens)), 0, -1)]


def _redis_pool(
    settings: NgramSettings, metrics: DrafterMetrics
) -> Callable[[ModelInfo], RedisPool | None]:
    """Return a function that makes a connection's pool in Redis.

    The function returns None if `redis` is not set. Raises OutriderError(INVALID_VALUE) that names
    the setting at fault.
    """
    server = settings.redis_server()
    if server is None:
        return lambda info: None
    keys = PoolKeys(read_secret(settings.pool_secret_file), public=settings.is_public_pool)
    options = RedisOptions(settings.pool_entries, settings.pool_ttl_seconds)
    # All connections share the counters.
    counters = RedisCounters()
    metrics.watch_redis(counters)

    def make(info: ModelInfo) -> RedisPool:
        return RedisPool(
            server,
            keys,
            info.tokenizer_fingerprint,
            info.vocab_size,
            options,
            counters=counters,
            observe=metrics.redis_lookup_seconds.observe,
        )

    return make
