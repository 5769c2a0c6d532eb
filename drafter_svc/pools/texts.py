"""The texts in Redis that the suffix trees of all replicas hold.

Each text has one string: its tokens, as little-endian uint32. keys.py makes its key, whose end is a
keyed hash of the text. So nobody without the pool's secret can plant a text, or give one tenant
another tenant's text. Texts have a time to live and an index, as n-grams have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from redis.exceptions import InvalidResponse

from drafter_svc.pools.keys import DIGEST_BYTES, PoolKeys, TextKeys
from drafter_svc.pools.redis import RedisCounters
from drafter_svc.pools.redis_client import RedisClient, token_ids
from outrider.process.redis.server import RedisServer

MAX_TEXT_TOKENS = 2048
"""The maximum number of tokens of a text in Redis."""
MAX_TOKEN_ID = 2**24 - 1
"""The largest token id of a text in Redis. Above it, a text could look like the head of a list,
which the client refuses to read."""


@dataclass(frozen=True, slots=True)
class TextPool:
    """The texts of all tenants, for one tokenizer.

    `max_texts` bounds the texts of a tenant. Redis drops a text that was not written again within
    `ttl_s`. The methods that take a client, which `connect` makes, may raise any exception if Redis
    fails.
    """

    server: RedisServer
    keys: PoolKeys
    fingerprint: str
    vocab_size: int
    max_texts: int = 1000
    ttl_s: int = 86_400
    counters: RedisCounters = field(default_factory=RedisCounters)

    def connect(self) -> RedisClient:
        """Return a client, which connects with its first command. The caller closes it."""
        return RedisClient(self.server)

    def tenant(self, name: str) -> TextKeys:
        """Return the keys of a tenant's texts."""
        return self.keys.texts(name, self.fingerprint)

    async def write(
        self, client: RedisClient, keys: TextKeys, values: Mapping[bytes, bytes]
    ) -> None:
        """Write the values of texts, given by digest."""
        pairs = [(keys.index + digest, value) for digest, value in values.items()]
        [result] = await client.store({keys.index: pairs}, self.ttl_s, self.max_texts)
        if isinstance(result, Exception):
            raise result
        self.counters.written += len(pairs)

    async def digests(self, client: RedisClient, keys: TextKeys) -> list[bytes]:
        """Return the digests of a tenant's texts, the oldest first."""
        self.counters.lookups += 1
        found = await client.newest(keys.index, self.ttl_s, self.max_texts)
        # A hostile Redis may send more than was asked for.
        found = found[: self.max_texts][::-1]
        return [each for each in found if isinstance(each, bytes) and len(each) == DIGEST_BYTES]

    async def read(
        self, client: RedisClient, keys: TextKeys, digests: Sequence[bytes]
    ) -> list[list[int]]:
        """Return the texts with these digests; a text that is gone or malformed is empty.

        If the client refuses the reply, all these texts count as malformed: otherwise one value
        could stop the reading of all texts.
        """
        self.counters.lookups += 1
        try:
            values = await client.mget([keys.index + digest for digest in digests])
        except InvalidResponse:
            self.counters.malformed += len(digests)
            return [[] for _ in digests]
        texts = []
        for digest, value in zip(digests, values, strict=True):
            text = token_ids(value, MAX_TEXT_TOKENS, self.vocab_size)
            if text and keys.digest(text) == digest:
                self.counters.found += 1
            elif value is None:
                self.counters.missed += 1
            else:
                self.counters.malformed += 1
                text = []
            texts.append(text)
        return texts
