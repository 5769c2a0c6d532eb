"""Suffix drafters of two verifiers share texts in Redis, which changes acceptance but no text."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from drafter_svc.erase import main as erase
from drafter_svc.pools.keys import PoolKeys, is_index
from drafter_svc.pools.texts import TextPool
from outrider.process.network.ports import free_port
from outrider.protocol.messages import SamplingParams, SpeculationOptions
from tests.redis_servers import Standalone
from tests.stack import Answers, Client, Process, Stack, prompts, running
from tests.waiting import until, wait_until

pytestmark = pytest.mark.slow  # Two verifiers.
pytest.importorskip(
    "arctic_inference", reason="the suffix family's package is missing: make suffix"
)
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SpeculationOptions(enabled=False)
DRAFTED = SpeculationOptions(always_draft=True)
SECRET = b"a secret of some length"


@dataclass
class Site:
    """Two verifiers and a Redis. Each verifier has a drafter, which can be started anew."""

    redis: Standalone
    secret: Path
    stacks: tuple[Stack, Stack]

    @contextmanager
    def drafter(self, of: int) -> Iterator[str]:
        """Run a new suffix drafter at a verifier; yield the URL of its metrics."""
        port = free_port()
        stack = self.stacks[of]
        pool = [*self.redis.flags(), "--pool-secret-file", str(self.secret)]
        more = ["--metrics-port", str(port), *pool]
        words = ["--family", "suffix", "--verifier", stack.address, "--id", f"suffix-{of}"]
        with Process("drafter_svc", *words, *more) as process:
            registered = f"registered with {stack.address}"
            wait_until(lambda: registered in process.output())
            yield f"http://127.0.0.1:{port}/metrics"

    def texts(self) -> int:
        return sum(not is_index(key) for key in self.redis.all_keys())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    redis = Standalone(folder / "redis")
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    one, other = Stack(), Stack()
    try:
        with running(one), running(other):
            yield Site(redis, secret, (one, other))
    finally:
        redis.close()


async def asked(
    stack: Stack, options: SpeculationOptions, sampling: SamplingParams = GREEDY
) -> Answers:
    async with Client(stack.address) as client:
        return await client.answers(prompts(every=2), sampling, options)


async def count(metrics: str, name: str) -> float:
    """Return the sum of those counters of a drafter whose lines contain `name`."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(metrics)).text
    values = [line.split()[-1] for line in text.splitlines() if name in line and line[0] != "#"]
    return sum(map(float, values))


@asynccontextmanager
async def warm(site: Site, of: int) -> AsyncIterator[None]:
    """Run a new drafter that has read all texts of Redis."""
    with site.drafter(of) as metrics:
        async with Client(site.stacks[of].address) as client:
            await client.connected("suffix")
            # A first request tells the drafter the tenant whose texts it must read.
            await client.answers([[1, 2, 3]], GREEDY, DRAFTED, max_tokens=2)
            wanted = site.texts()

            async def has_read() -> bool:
                return await count(metrics, 'outcome="found"') >= wanted

            await until(has_read)
            yield


async def test_a_new_drafter_of_another_verifier_is_warm_until_the_tenant_is_erased(
    site: Site,
) -> None:
    one, other = site.stacks
    plain = await asked(one, PLAIN)
    with site.drafter(0) as metrics:
        cold = await asked(one, DRAFTED)

        async def has_written() -> bool:
            return await count(metrics, 'outcome="written"') >= len(plain.texts)

        await until(has_written)
        local = await asked(one, DRAFTED)
    async with warm(site, of=1):
        found = await asked(other, DRAFTED)
        seeded = await asked(other, DRAFTED, SamplingParams(0.8, seed=3))
    for way in (cold, local, found):
        assert way.texts == plain.texts
    assert seeded.texts == (await asked(one, PLAIN, SamplingParams(0.8, seed=3))).texts
    assert found.accepted_token_count > 1.3 * cold.accepted_token_count
    assert found.forward_count < cold.forward_count
    flags = [*site.redis.flags(), "--pool-secret-file", str(site.secret), "--tenant", ""]
    await asyncio.to_thread(erase, flags)
    assert site.texts() == 0
    with site.drafter(1):
        async with Client(other.address) as client:
            await client.connected("suffix")
        erased = await asked(other, DRAFTED)
    assert erased.texts == plain.texts
    assert erased.accepted_token_count < 0.8 * found.accepted_token_count
    for name, way in {"cold": cold, "local": local, "warm": found, "erased": erased}.items():
        print(
            f"{name}: {way.accepted_token_count} of {way.draft_token_count} drafted accepted,"
            f" {way.forward_count} forwards"
        )


async def test_texts_poisoned_by_a_replica_with_the_secret_change_no_text(site: Site) -> None:
    one, other = site.stacks
    plain = await asked(one, PLAIN)
    async with Client(other.address) as client:
        info = await client.model()
    pool = TextPool(
        site.redis.server, PoolKeys(SECRET), info.tokenizer_fingerprint, info.vocab_size
    )
    keys = pool.tenant("")
    false = {}
    for text in plain.texts:
        # The tokens at even places are right, and the tokens at odd places are wrong.
        mixed = [(token + i % 2) % info.vocab_size for i, token in enumerate(text)]
        false[keys.digest(mixed)] = array("I", mixed).tobytes()
    poisoner = pool.connect()
    try:
        await pool.write(poisoner, keys, false)
    finally:
        await poisoner.aclose()
    async with warm(site, of=1):
        found = await asked(other, DRAFTED)
    assert found.texts == plain.texts
    assert found.draft_token_count > found.accepted_token_count
