"""The compiler caches grammars within its bytes, and bounds how long a request waits."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise, product
from string import ascii_lowercase

import numpy as np
import pytest

from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import Compiled
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.worker import grammar_from, is_for_texts
from outrider.process.workers.pool import OutOfTime, Worker, WorkerLost
from tests.shared.grammar_texts import ENDS, TARGET, TOKENIZER, VOCAB, WAYS, Way, compiler, schema


def test_the_cache_keeps_recent_grammars_within_its_bytes() -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS, cache_bytes=1_000_000, trusted=True)
    first, second = (Grammar(GrammarKind.REGEX, text) for text in ("first", "second"))
    compiled = own.compile(first)
    own.compile(second)
    for i in range(50):
        own.compile(Grammar(GrammarKind.REGEX, f"a{i}"))
        # Each use of the first grammar keeps it in the cache; the second is dropped.
        assert own.compile(first) is compiled
        assert 0 < own.cache.size_bytes <= 1_000_000
    assert own.cache.get(second) is None


async def test_concurrent_requests_compile_a_grammar_once(held: Held) -> None:
    held.release.set()
    same = Grammar(GrammarKind.REGEX, "same")
    found = await asyncio.gather(*(held.own.compile_async(same) for _ in range(4)))
    assert [*found, await held.own.compile_async(same), held.own.compile(same)] == [found[0]] * 6
    assert held.begun == ["same"]


class Held:
    """A compiler whose workers wait for `release` or are killed; it lists the workers' grammars."""

    def __init__(self, seconds: float) -> None:
        self.begun: list[str] = []
        self.release = threading.Event()
        self.kill = threading.Event()
        self.own = GrammarCompiler(TARGET, VOCAB, ENDS, compile_seconds=seconds, trusted=True)
        self.own._workers = queue.SimpleQueue()
        for _ in range(4):
            self.own._workers.put(self)

    def call(self, request: bytes, seconds: float) -> bytes:
        """Stand in for `Worker.call`."""
        text = grammar_from(request).text
        if is_for_texts(request):
            return b"null"
        self.begun.append(text)
        if text.startswith("bomb"):
            assert self.kill.wait(60)
            raise OutOfTime(f"took longer than {seconds:g} s")
        assert self.release.wait(60)
        return json.dumps(f"start: {json.dumps(text)}").encode()


class Lost:
    """A worker that is killed, and whose successor is killed too."""

    def call(self, request: bytes, seconds: float) -> bytes:
        """Stand in for `Worker.call`."""
        raise WorkerLost("lost its process, which was killed")


@pytest.fixture
def held() -> Iterator[Held]:
    found = Held(60.0)
    yield found
    found.release.set()
    found.kill.set()


def asked(held: Held, tenant: str, *texts: str) -> list[asyncio.Task[Compiled]]:
    """Request grammars, and let the requests reach the threads."""
    return [
        asyncio.create_task(held.own.compile_async(Grammar(GrammarKind.REGEX, text), tenant))
        for text in texts
    ]


def wait_for_beginnings(held: Held, count: int) -> None:
    """Wait until the workers have started `count` grammars."""
    deadline = time.monotonic() + 60
    while len(held.begun) < count and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("attackers", ["a", "ac"])
async def test_slow_grammars_of_tenants_leave_threads_to_the_others(
    attackers: str, held: Held
) -> None:
    bombs = [
        bomb
        for name in attackers
        for bomb in asked(held, name, *(f"bomb {name}{i}" for i in range(1, 4)))
    ]
    await asyncio.to_thread(wait_for_beginnings, held, len(attackers))
    held.release.set()
    [fast] = await asyncio.gather(*asked(held, "b", "fast"))
    assert fast.matcher()
    begun = sorted(text for text in held.begun if text.startswith("bomb"))
    assert begun == [f"bomb {name}1" for name in attackers]
    held.kill.set()
    for result in await asyncio.gather(*bombs, return_exceptions=True):
        assert isinstance(result, OutriderError)
        assert result.reason is Reason.INVALID_VALUE
        assert result.field == "grammar.regex"
        assert "longer than 60 s to compile" in result.message


async def test_a_grammar_that_gets_no_turn_in_time_may_be_retried() -> None:
    held = Held(0.2)
    one, *others = asked(held, "a", "bomb1", "bomb2", "good")
    results = await asyncio.gather(*others, return_exceptions=True)
    reasons = [result.reason for result in results if isinstance(result, OutriderError)]
    assert reasons == [Reason.OVERLOADED] * 2
    held.kill.set()
    with pytest.raises(OutriderError, match="longer than"):
        await one
    assert held.begun == ["bomb1"]


async def test_a_cancelled_requests_grammar_is_not_compiled(held: Held) -> None:
    first, gone, stays = asked(held, "a", "first", "gone", "stays")
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait({gone})
    held.release.set()
    await asyncio.gather(first, stays)
    assert held.begun == ["first", "stays"]


# A chain of rules: the time that its translation takes grows with the square of its length, to 2 s
# on a quick processor. Short names make room for more rules in the 64 KiB of a grammar.
_NAMES = ["".join(letters) for letters in product(ascii_lowercase, repeat=3)][:6400]
BOMB = "\n".join(
    [f"root::={_NAMES[0]}", *map("::=".join, pairwise(_NAMES)), f'{_NAMES[-1]}::="x"', "#"]
)


async def test_bombs_of_one_tenant_are_killed_beside_another_tenants_grammar() -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS, compile_seconds=0.5)
    own.start_workers()
    texts = [BOMB, f"{BOMB}#"]
    requests = [own.compile_async(Grammar(GrammarKind.EBNF, text), "a") for text in texts]
    # The results are gathered here, so that each exception is retrieved even if the test fails
    # later.
    bombs = asyncio.gather(*requests, return_exceptions=True)
    await asyncio.sleep(0)
    assert await own.compile_async(Grammar(GrammarKind.REGEX, "b+"), "b")
    first, second = await bombs
    assert isinstance(first, OutriderError)
    assert "takes longer than 0.5 s to compile" in first.message
    assert isinstance(second, OutriderError)
    # If a bomb had not been killed, this would take minutes.
    assert await own.compile_async(Grammar(GrammarKind.REGEX, "c+"), "a")


# Python's `re` tries 2^29 ways to match some texts of the pattern.
BACKTRACKING = "(?:a?){29}a{29}|x"


@pytest.fixture(scope="module")
def real() -> GrammarCompiler:
    """Return a compiler with real worker processes and the usual limits."""
    own = GrammarCompiler(TARGET, VOCAB, ENDS)
    own.start_workers()
    return own


BOMBS = (
    lambda i: Grammar(GrammarKind.REGEX, f"{BACKTRACKING}{i}"),
    lambda i: schema({"type": "string", "pattern": f"^(?:{BACKTRACKING}{i})$"}),
)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_grammar_holds_whose_check_never_ends(
    bomb: Callable[[int], Grammar], real: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check has a separate, short time limit. When this time is over, the grammar passes."""
    given: list[float] = []

    def call(own: Worker, request: bytes, seconds: float) -> bytes:
        given.append(seconds)
        return usual(own, request, seconds)

    usual = Worker.call
    monkeypatch.setattr(Worker, "call", call)
    compiled = real.compile(bomb(0))
    assert given.pop(0) == 5.0
    assert sum(given) <= 0.5
    assert compiled.matcher().accept(TOKENIZER.token_to_id('"' if bomb is BOMBS[1] else "a"))


async def test_attackers_delay_no_victims_new_grammars(real: GrammarCompiler) -> None:
    over = asyncio.Event()

    async def attack(tenant: str, count: int = 0) -> int:
        while not over.is_set():
            grammar = BOMBS[count % 2](f"{tenant}{count}")
            with suppress(OutriderError):
                await real.compile_async(grammar, tenant)
            count += 1
        return count

    # Each of the three attacking tenants has one grammar that compiles and one that waits.
    attacks = [asyncio.create_task(attack(f"a{i % 3}", i * 10**6)) for i in range(6)]
    await asyncio.sleep(1.0)
    for i in range(8):
        # Without fairness, each of these grammars would wait for 5 s and be refused.
        assert await real.compile_async(Grammar(GrammarKind.REGEX, f"victim{i}+"), f"b{i % 2}")
    over.set()
    assert all(count % 10**6 for count in await asyncio.gather(*attacks))


async def test_requests_do_not_notice_that_workers_were_killed(real: GrammarCompiler) -> None:
    assert real._workers is not None
    for _ in range(4):
        own = real._workers.get()
        own.start()
        os.kill(own._forked[0], signal.SIGKILL)
        real._workers.put(own)
    for i in range(5):
        assert await real.compile_async(Grammar(GrammarKind.REGEX, f"innocent{i}"), "a")


async def test_a_request_whose_workers_are_all_killed_may_be_retried(held: Held) -> None:
    held.own._workers = queue.SimpleQueue()
    held.own._workers.put(Lost())
    with pytest.raises(OutriderError, match=r"grammar\.regex: not compiled.*killed") as lost:
        await held.own.compile_async(Grammar(GrammarKind.REGEX, "a"), "a")
    assert lost.value.reason is Reason.NOT_READY
    assert lost.value.reason.kind.http == 503


@pytest.mark.parametrize("way", WAYS)
async def test_a_matcher_begins_behind_the_tokens_that_are_there(way: Way) -> None:
    own = compiler()
    grammar = way(Grammar(GrammarKind.CHOICE, choices=("one two three", "one four")))
    ids = TOKENIZER.encode("one two three").ids
    stepped = own.compile(grammar).matcher()
    masks = np.zeros((2, own.mask_width), np.int32)
    for count in range(len(ids)):
        stepped.fill(masks, 0)
        (await own.matcher_async(grammar, ids[:count])).fill(masks, 1)
        assert (masks[0] == masks[1]).all()
        assert stepped.accept(ids[count])
    for wrong, problem in (([ids[0], ids[0]], "allows here"), ([*ids, ENDS[0]], "must not end")):
        with pytest.raises(OutriderError, match=problem) as caught:
            await own.matcher_async(grammar, wrong)
        assert caught.value.field == f"committed_token_ids[{len(wrong) - 1}]"


async def test_neither_the_loop_nor_the_engine_follows_a_long_text() -> None:
    """Each token takes some 10 us, and all answers of a lost verifier arrive at once."""
    threads: set[str] = set()

    class Recorded:
        ended = False

        def accept(self, _: int) -> bool:
            threads.add(threading.current_thread().name)
            return True

    own = GrammarCompiler(TARGET, VOCAB, ENDS, trusted=True)
    grammar = Grammar(GrammarKind.REGEX, "a+")
    compiled = own.compile(grammar)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(compiled), "matcher", lambda _: Recorded())
        await own.matcher_async(grammar, [1] * 100)
    assert len(threads) == 1
    assert threads.pop().startswith("grammar")
