"""Suffix drafters of two verifiers share one Redis: acceptance cold, warm and erased; texts stay.

`pytest -s` prints what acceptance the pool brings on SmolLM2.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from drafter_svc.erase import main as erase
from drafter_svc.families.settings import SuffixSettings
from drafter_svc.families.suffix import SuffixFamily
from drafter_svc.pools.corpora import Corpora
from drafter_svc.pools.keys import PoolKeys, is_index
from drafter_svc.pools.texts import TextPool
from outrider.process.network.ports import free_port
from outrider.protocol.draft_messages import Window
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from tests.family_rig import Rig, opened_sequence
from tests.redis_servers import Standalone
from tests.smollm2_texts import answers, smollm2, tokens_of
from tests.stack import ROOT, Answers, Client, Process, Stack, prompts, running
from tests.waiting import until, wait_until

pytestmark = pytest.mark.slow  # Two verifiers, and 200 texts of SmolLM2.
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
    """Return a counter of a drafter, by its name and labels."""
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
            # The drafter learns from a first request which tenant there is.
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
        # Each even token is true, and each odd token is false.
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


@dataclass
class Counts:
    """Counts of a drafter's drafts, and of the steps and tokens of the texts."""

    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        return (
            f"{self.accepted / max(1, self.drafts):.2f} accepted a draft,"
            f" {self.drafts / self.steps:.3f} of steps with a draft,"
            f" {self.accepted / max(1, self.drafted):.3f} of drafted tokens accepted,"
            f" {self.tokens / self.steps:.2f} tokens a step"
        )


Text = tuple[list[int], list[int]]
"""A prompt and its answer."""


async def replayed(rig: Rig, texts: Sequence[Text]) -> Counts:
    """Draft for one text after the other as a verifier asks that takes 8 tokens a step."""
    counts = Counts()
    for number, (prompt, output) in enumerate(texts):
        more = {"tenant": "team", "prompt_length": len(prompt)}
        rig.open(opened_sequence(number, prompt, Window(64, 16), 8, **more))
        at = 0
        while at < len(output):
            await rig.draft()
            # A verifier's step lasts long enough for other tasks.
            await asyncio.sleep(0.001)
            guesses = rig.guesses(number)[:8]
            right = 0
            while right < min(len(guesses), len(output) - at - 1):
                if guesses[right] != output[at + right]:
                    break
                right += 1
            rig.commit(number, *output[at : at + right + 1])
            at += right + 1
            counts.steps += 1
            counts.drafts += bool(guesses)
            counts.drafted += len(guesses)
            counts.accepted += right
        counts.tokens += len(output)
        rig.close(number)
    return counts


@asynccontextmanager
async def suffix_drafter(redis: Standalone) -> AsyncIterator[tuple[Rig, TextPool]]:
    """Yield a suffix drafter that shares its texts."""
    pool = TextPool(redis.server, PoolKeys(SECRET), "fingerprint", 49_152)
    family = SuffixFamily(SuffixSettings(), Corpora(1000, pool=pool))
    try:
        yield Rig(family), pool
    finally:
        await family.aclose()


def table_prompts() -> list[list[int]]:
    """Return SmolLM2's tokens of the 54 prompts of `outrider lab table`."""
    lines = (ROOT / "bench/traffic/smollm2-table-texts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_ids"] for line in lines]


async def sampled(stack: Stack, asked: Sequence[list[int]], first_seed: int) -> list[Text]:
    """Return an answer to each prompt, with a seed of its own."""
    requests = [
        TokenRequest(prompt, 64, SamplingParams(0.8, seed=first_seed + i), speculation=PLAIN)
        for i, prompt in enumerate(asked)
    ]
    async with Client(stack.address) as client:
        found = [tokens_of(chunks) for chunks in await answers(client, requests)]
    return list(zip(asked, found, strict=True))


async def written(redis: Standalone, rig: Rig, history: list[Text]) -> None:
    """Draft for the history, and wait until Redis has it."""
    await replayed(rig, history)
    different = {tuple(output) for _, output in history}
    await until(lambda: sum(not is_index(key) for key in redis.all_keys()) == len(different))


async def compared(redis: Standalone, history: list[Text], texts: list[Text]) -> dict[str, Counts]:
    """Return the counts of the texts: cold, of a drafter that wrote the history, and warm."""
    redis.each("FLUSHALL")
    async with suffix_drafter(redis) as (rig, _):
        cold = await replayed(rig, texts)
    redis.each("FLUSHALL")
    async with suffix_drafter(redis) as (rig, _):
        await written(redis, rig, history)
        local = await replayed(rig, texts)
    redis.each("FLUSHALL")
    async with suffix_drafter(redis) as (rig, _):
        await written(redis, rig, history)
    async with suffix_drafter(redis) as (rig, pool):
        # The new drafter reads the history from Redis while it drafts for the first text.
        warm = await replayed(rig, texts)
        assert pool.counters.found >= len({tuple(output) for _, output in history})
    return {"cold": cold, "local": local, "warm": warm}


async def test_a_warm_pool_is_as_good_as_having_written_it(site: Site) -> None:
    stack = Stack("--max-sequences", "8", target=smollm2(), dtype="bfloat16")
    asked = (2 * table_prompts())[:100]
    with running(stack):
        history, texts = await sampled(stack, asked, 0), await sampled(stack, asked, 1000)
    kinds = {
        "the same prompts with other seeds": (history, texts),
        "other prompts": (history[0::2], texts[1::2]),
    }
    for name, (earlier, later) in kinds.items():
        found = await compared(site.redis, earlier, later)
        for way, counts in found.items():
            print(f"{name}, {len(later)} texts, {way}: {counts}")
        assert found["warm"].accepted >= 0.97 * found["local"].accepted
        assert found["warm"].accepted > found["cold"].accepted
