"""The compiler caches grammars within its bytes, and bounds how long a request waits."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from grammar_texts import BACKENDS, ENDS, TARGET, TOKENIZER, VOCAB, compiler

from outrider.errors import OutriderError, Reason
from outrider.grammar import compiler as compiler_module
from outrider.grammar.backends import Backend, Compiled, Matcher
from outrider.grammar.cache import GrammarCache
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.kinds import Grammar, GrammarKind


def test_the_cache_keeps_recent_grammars_within_its_bytes() -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS, cache_bytes=100_000)
    first, second = (Grammar(GrammarKind.REGEX, text) for text in ("first", "second"))
    compiled = own.compile(first)
    own.compile(second)
    for i in range(50):
        own.compile(Grammar(GrammarKind.REGEX, f"a{i}"))
        # Each use of the first keeps it in the cache, unlike the second.
        assert own.compile(first) is compiled
        assert 0 < own.cache.size_bytes <= 100_000
    assert own.cache.get(second) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_larger_grammar_has_a_larger_size(backend: Backend) -> None:
    sizes = [
        compiler(backend).compile(Grammar(GrammarKind.REGEX, "ab[c-e]" * n)).size_bytes
        for n in (1, 100, 1000)
    ]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] > 100_000


def test_a_grammar_beyond_the_capacity_evicts_nothing() -> None:
    class Large:
        size_bytes = 2_000_000

        def matcher(self) -> Matcher:
            raise NotImplementedError

    cache = GrammarCache(1_000_000)
    small = compiler("xgrammar").compile(Grammar(GrammarKind.REGEX, "small"))
    cache.add(Grammar(GrammarKind.REGEX, "small"), small)
    large = Large()
    assert cache.add(Grammar(GrammarKind.REGEX, "large"), large) is large
    assert cache.get(Grammar(GrammarKind.REGEX, "large")) is None
    assert cache.get(Grammar(GrammarKind.REGEX, "small")) is small


async def test_concurrent_requests_compile_a_grammar_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS)
    times = 0
    monkeypatch.setattr(compiler_module, "_THREAD_COUNT", 1)
    own._pool = compiler_module._threads()
    real = own._backend.compile

    def count(grammar: Grammar) -> Compiled:
        nonlocal times
        times += 1
        return real(grammar)

    monkeypatch.setattr(own._backend, "compile", count)
    same = Grammar(GrammarKind.REGEX, "same")
    found = await asyncio.gather(*(own.compile_async(same) for _ in range(4)))
    assert [*found, await own.compile_async(same), own.compile(same)] == [found[0]] * 6
    assert times == 1


async def test_a_slow_grammar_times_out_while_others_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS, compile_seconds=1.0)
    release = threading.Event()
    real = own._backend.compile

    def compile_slowly(grammar: Grammar) -> Compiled:
        if grammar.text == "slow":
            release.wait(10)
        return real(grammar)

    monkeypatch.setattr(own._backend, "compile", compile_slowly)
    slow = asyncio.create_task(own.compile_async(Grammar(GrammarKind.REGEX, "slow")))
    await asyncio.sleep(0)
    assert await own.compile_async(Grammar(GrammarKind.REGEX, "fast"))
    with pytest.raises(OutriderError, match="than 1 s"):
        await slow
    release.set()


class Held:
    """Replaces a backend's `compile` by one that waits for `release`, and lists the calls."""

    def __init__(self, own: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.release = threading.Event()
        self._real = own._backend.compile
        own._pool = compiler_module._threads()
        self.thread_count = own._pool._max_workers
        monkeypatch.setattr(own._backend, "compile", self._compile)

    def _compile(self, grammar: Grammar) -> Compiled:
        self.begun.append(grammar.text)
        self.release.wait(10)
        return self._real(grammar)


async def test_a_grammar_that_found_no_thread_in_time_may_be_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS, compile_seconds=1.0)
    held = Held(own, monkeypatch)
    asked = [Grammar(GrammarKind.REGEX, f"a{i}") for i in range(held.thread_count + 3)]
    failures = await asyncio.gather(
        *(own.compile_async(grammar) for grammar in asked), return_exceptions=True
    )
    reasons = [failure.reason for failure in failures if isinstance(failure, OutriderError)]
    assert reasons == [Reason.INVALID_VALUE] * held.thread_count + [Reason.OVERLOADED] * 3
    held.release.set()
    own._pool.shutdown()
    assert held.begun == [grammar.text for grammar in asked[: held.thread_count]]


async def test_a_cancelled_requests_grammar_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS, compile_seconds=60.0)
    held = Held(own, monkeypatch)
    texts = [*(f"a{i}" for i in range(held.thread_count)), "gone", "stays"]
    running = {
        text: asyncio.create_task(own.compile_async(Grammar(GrammarKind.REGEX, text)))
        for text in texts
    }
    await asyncio.sleep(0)
    gone = running.pop("gone")
    gone.cancel()
    await asyncio.wait({gone})
    held.release.set()
    await asyncio.gather(*running.values())
    own._pool.shutdown()
    assert sorted(held.begun) == sorted(set(texts) - {"gone"})


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_matcher_begins_behind_the_tokens_that_are_there(backend: Backend) -> None:
    own = compiler(backend)
    grammar = Grammar(GrammarKind.CHOICE, choices=("one two three", "one four"))
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
    """Each token takes some 10 us, and a lost verifier's texts all arrive at once."""
    threads: set[str] = set()

    class Recorded:
        ended = False

        def accept(self, _: int) -> bool:
            threads.add(threading.current_thread().name)
            return True

    own = GrammarCompiler(TARGET, VOCAB, ENDS)
    grammar = Grammar(GrammarKind.REGEX, "a+")
    compiled = own.compile(grammar)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(compiled), "matcher", lambda _: Recorded())
        await own.matcher_async(grammar, [1] * 100)
    assert len(threads) == 1
    assert threads.pop().startswith("grammar")
