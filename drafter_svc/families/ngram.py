"""Drafting by what followed the same n-gram before: in what the client predicts, in the request's own text, then in the pool that
requests share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import Field

from drafter_svc.branching import fan_out
from drafter_svc.config import RedisSettings
from drafter_svc.families.base import Family, Loaded
from drafter_svc.metrics import Metrics
from drafter_svc.placement import PlacementPlan
from drafter_svc.pools.keys import PoolKeys, TenantKeys, read_secret
from drafter_svc.pools.memory import MemoryPool, NgramOptions
from drafter_svc.pools.prediction import Prediction
from drafter_svc.pools.redis import Query, RedisCounters, RedisOptions, RedisPool
from drafter_svc.pools.redis_server import RedisServer
from outrider.drafter.draft_sequence import DraftSequence
from outrider.limits import MAX_DRAFT_TOKENS
from outrider.model_info import ModelInfo

# Branches that are prepared between two verdicts, one for each place where a draft can end; where the sequences are too many for
# that, so many for each. Looking them up is almost free, but sending them is not.
_BRANCHES = 64
_FEWEST = 4


class NgramSettings(RedisSettings):
    """Settings of the family ngram."""

    max_draft_len: int = Field(8, ge=1, le=MAX_DRAFT_TOKENS)
    """Longest run proposed at once."""

    max_matching_ngram_size: int = Field(3, ge=1, le=16)
    """Longest suffix looked up."""

    is_keep_all: bool = True
    """Keep every continuation of an n-gram, not one."""

    is_use_oldest: bool = False
    """Propose the oldest continuation kept, not the newest."""

    pool_entries: int = Field(1_000_000, ge=1)
    """n-grams a pool holds at most, in Redis each tenant's; the least recently used go first, in Redis the oldest."""

    namespace: str = Field("default", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Pools of different namespaces in one Redis are apart; letters, digits, _, . and -."""

    pool_ttl_seconds: int = Field(86_400, ge=1)
    """Age at which an unused n-gram leaves Redis."""


@dataclass(eq=False, slots=True)
class _Text:
    """The n-grams of a sequence's own text, of which so many tokens are taken in.

    `shared_count` tokens were offered to Redis under `tenant`'s keys.
    """

    pool: MemoryPool
    tenant: TenantKeys | None = None
    prediction: Prediction | None = None
    indexed_count: int = 0
    shared_count: int = 0


class NgramFamily(Family):
    """`shared` is the pool of all requests of this process, `redis` that of all replicas, by tenant or for all; with both None each
    request has its own pool alone.
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
    async def load(cls, settings: NgramSettings, place: PlacementPlan, metrics: Metrics) -> Loaded:
        make_redis = _redis_pool(settings, metrics)
        options = NgramOptions(
            settings.max_draft_len,
            settings.max_matching_ngram_size,
            settings.is_keep_all,
            settings.is_use_oldest,
        )
        # Outlive the connection to a verifier, unlike the pools of single requests. Ids mean the same with one tokenizer alone.
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
        opened = sequence.opened
        text = self._texts[sequence.id] = _Text(MemoryPool(self._options, self._max_entries))
        if self._redis is not None:
            text.tenant = self._redis.tenant(opened.tenant)
        if opened.prediction:
            text.prediction = Prediction(
                opened.prediction, max(2, self._options.max_matching_ngram_size)
            )
        self._index(sequence, text)

    def committed(self, sequence: DraftSequence, standing: int) -> None:
        self._index(sequence, self._texts[sequence.id])

    def closed(self, sequence: DraftSequence) -> None:
        if text := self._texts.pop(sequence.id, None):
            self._offer(sequence, text, len(sequence.tokens) - 1)

    async def aclose(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()

    def _index(self, sequence: DraftSequence, text: _Text) -> None:
        for pool in (text.pool, self._shared):
            if pool is not None:
                pool.index(sequence.tokens, text.indexed_count)
        text.indexed_count = len(sequence.tokens)
        # Offered once its continuation is whole; the rest follows when the text ends.
        self._offer(sequence, text, len(sequence.tokens) - self._options.max_draft_len)

    def _offer(self, sequence: DraftSequence, text: _Text, end: int) -> None:
        """Have the n-grams that end at the positions up to `end` written to Redis."""
        if self._redis is None or text.tenant is None:
            return
        tokens, size = sequence.tokens, self._options.max_matching_ngram_size
        for position in range(max(1, text.shared_count), end + 1):
            continuation = tokens[position : position + self._options.max_draft_len]
            for ngram in _suffixes(tokens[max(0, position - size) : position], size):
                self._redis.offer(text.tenant, ngram, continuation)
        text.shared_count = max(text.shared_count, end + 1)

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """A run for every sequence with room; one round trip to Redis for all that nothing here knows. Branches for the others."""
        unknown: list[DraftSequence] = []
        for sequence in sequences:
            if sequence.room == 0:
                self._branch(sequence)
            elif run := self._local(sequence):
                sequence.extend(run)
            else:
                unknown.append(sequence)
        if unknown and self._redis is not None:
            for sequence, run in zip(
                unknown, await self._redis.lookup(self._queries(unknown)), strict=True
            ):
                sequence.extend(run)

    def _branch(self, sequence: DraftSequence) -> None:
        """Guess what else may be committed while the chain's first draft is verified, and what would follow."""
        pool = self._texts[sequence.id].pool
        places = min(sequence.draft_tokens, len(sequence.guesses) - 1)
        budget = max(_FEWEST, _BRANCHES // len(self._texts))
        counts = (
            [1] * (places + 1) if places < budget else fan_out(sequence.acceptance, places, budget)
        )
        for at, count in enumerate(counts):
            context = self._context(sequence, sequence.guesses[:at])
            for run in pool.alternatives(
                context, sequence.draft_tokens, sequence.guessed_at(at), count
            ):
                sequence.branch(at, run)
        sequence.give_up_branches()

    def _local(self, sequence: DraftSequence) -> list[int]:
        text, room = self._texts[sequence.id], sequence.room
        if text.prediction is not None:
            generated = [*sequence.tokens[sequence.opened.prompt_length :], *sequence.guesses]
            if expected := text.prediction.continuation(generated, room):
                return expected
        context = self._context(sequence, sequence.guesses)
        own = text.pool.continuation(context, room)
        return own if own or self._shared is None else self._shared.continuation(context, room)

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
        """The last tokens; a text is long, and what is looked up of it short."""
        size = self._options.max_matching_ngram_size
        return [*sequence.tokens[-size:], *guesses][-size:]


def _suffixes(tokens: Sequence[int], longest: int) -> list[Sequence[int]]:
    """The n-grams that `tokens` end with, the longest first."""
    return [tokens[-size:] for size in range(min(longest, len(tokens)), 0, -1)]


def _redis_pool(
    settings: NgramSettings, metrics: Metrics
) -> Callable[[ModelInfo], RedisPool | None]:
    """How to make the pool for a connection; raises OutriderError(INVALID_VALUE) that names the setting at fault."""
    if settings.redis is None:
        return lambda info: None
    server = RedisServer.parse(settings.redis, settings.redis_password_file, settings.redis_ca_file)
    keys = PoolKeys(
        read_secret(settings.pool_secret_file), settings.namespace, public=settings.is_public_pool
    )
    options = RedisOptions(
        settings.pool_entries, settings.pool_ttl_seconds, use_oldest=settings.is_use_oldest
    )
    # Counts go on from one connection to the next.
    counters = RedisCounters()
    metrics.watch_redis(counters)

    def make(info: ModelInfo) -> RedisPool:
        names = info.tokenizer_fingerprint, info.vocab_size
        return RedisPool(
            server,
            keys,
            *names,
            options,
            counters=counters,
            observe=metrics.redis_lookup_seconds.observe,
        )

    return make
