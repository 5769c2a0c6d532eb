"""Compiles grammars within a time limit and caches them.

An untrusted grammar is first checked and compiled in a worker process, which is killed if it takes
too long. This module works with token ids and grammars, not with sequences, streams or logits.
"""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from outrider.errors import OutriderError, Reason, invalid
from outrider.grammar import worker
from outrider.grammar.backends import Compiled, Libraries, TextMatcher
from outrider.grammar.cache import GrammarCache
from outrider.grammar.dialect import translate
from outrider.grammar.guard import GUARD_SECONDS, has_check
from outrider.grammar.kinds import Grammar
from outrider.grammar.trial import compile_only
from outrider.process.workers.pool import OutOfTime, Worker, WorkerError, WorkerLost, WorkerSource
from outrider.process.workers.tenant_threads import TenantThreads
from outrider.process.workers.worker import STACK_BYTES

_Result = TypeVar("_Result")

# A tenant uses at most one of the threads. Tenants whose grammars take long use at most half of the
# threads, all together.
_THREAD_COUNT = 4
_SPARE_THREADS = 2
# A priority below the engine's, so that compiling takes little of a forward's time.
_NICE = 5


class GrammarCompiler:
    """Compiles grammars for one tokenizer and caches them.

    `vocab_size` is the logits' width; masks never allow ids without a token. `compile_seconds`
    bounds how long a request waits for its turn, and how much processor time its grammar may take.
    `cache_bytes` bounds the cache.

    A compiled grammar cannot be copied from another process, so a grammar that a worker process
    compiled in time is compiled again here, which takes equally long.
    """

    def __init__(
        self,
        tokenizer_path: str,
        vocab_size: int,
        stop_token_ids: tuple[int, ...],
        *,
        compile_seconds: float = 5.0,
        cache_bytes: int = 512 * 2**20,
        trusted: bool = False,
    ) -> None:
        """Load the tokenizer; raise ImportError when LLGuidance is not installed.

        `trusted` grammars have been checked by somebody else. Trusted grammars are compiled only in
        this process, and no worker processes are started.
        """
        self.mask_width = -(-vocab_size // 32)
        self.cache = GrammarCache(cache_bytes)
        self._seconds = compile_seconds
        self._workers: queue.SimpleQueue[Worker] | None = None
        if not trusted:
            arguments = {
                "tokenizer": tokenizer_path,
                "vocab_size": vocab_size,
                "stop_token_ids": list(stop_token_ids),
            }
            source = WorkerSource(worker.HANDLER, arguments, nice=_NICE)
            self._workers = queue.SimpleQueue()
            for _ in range(_THREAD_COUNT):
                self._workers.put(Worker(source))
        self._libraries = Libraries(tokenizer_path, vocab_size, stop_token_ids)
        self.token_bytes: Sequence[bytes] = self._libraries.token_bytes
        """The bytes of each token; the index is the token's id."""
        self._threads = TenantThreads(
            _THREAD_COUNT, "grammar", each=1, spare=_SPARE_THREADS, stack_bytes=STACK_BYTES
        )
        weakref.finalize(self, self._threads.close)

    def start_workers(self) -> None:
        """Wait until the worker processes run, so that the first grammars need not wait."""
        if self._workers is not None:
            for _ in range(_THREAD_COUNT):
                own = self._workers.get()
                own.start()
                self._workers.put(own)

    def compile(self, grammar: Grammar, tenant: str = "") -> Compiled:
        """Compile a grammar, or take it from the cache.

        The wait for a free thread has no time limit.

        Raises OutriderError(INVALID_VALUE) that names the field for a grammar that is invalid,
        cannot be enforced, allows no text, or takes too much memory or more processor time than
        `compile_seconds`. Raises OutriderError(NOT_READY) if two workers in succession were killed,
        or none could be started.
        """
        cached = self.cache.get(grammar)
        if cached is not None:
            return cached
        return self._threads.submit(tenant, partial(self._compile_once, grammar)).result()

    async def compile_async(self, grammar: Grammar, tenant: str = "") -> Compiled:
        """Compile a grammar as `compile` does, off the event loop.

        Raises OutriderError(OVERLOADED) too, if the tenant gets no turn within `compile_seconds`.
        """
        cached = self.cache.get(grammar)
        if cached is not None:
            return cached
        return await self._in_turn(tenant, grammar.field, partial(self._compile_once, grammar))

    async def matcher_async(
        self, grammar: Grammar, committed: Sequence[int], tenant: str = ""
    ) -> TextMatcher:
        """Compile a grammar as `compile_async` does, and advance a matcher past committed tokens.

        Raises OutriderError as `compile_async` and `advanced` do.
        """
        compiled = await self.compile_async(grammar, tenant)
        if not committed:
            return compiled.matcher()
        # Thousands of tokens take as long as several steps of the engine, so a thread reads them.
        return await self._in_turn(tenant, grammar.field, partial(advanced, compiled, committed))

    async def _in_turn(self, tenant: str, field: str, work: Callable[[], _Result]) -> _Result:
        """Run `work` on a thread when it is the tenant's turn, within `compile_seconds`."""
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def run() -> _Result:
            loop.call_soon_threadsafe(begun.set)
            return work()

        future = self._threads.submit(tenant, run)
        try:
            async with asyncio.timeout(self._seconds):
                await begun.wait()
        except TimeoutError as cause:
            if future.cancel():
                message = f"{field}: not compiled, because other grammars took {self._seconds:g} s"
                raise OutriderError(Reason.OVERLOADED, message, field) from cause
        finally:
            if not begun.is_set():
                # Work of cancelled callers is not started. Work in progress is finished and cached.
                future.cancel()
        return await asyncio.wrap_future(future)

    def _compile_once(self, grammar: Grammar) -> Compiled:
        """Compile a grammar on this thread of the pool, unless another thread has compiled it."""
        cached = self.cache.get(grammar)
        if cached is not None:
            return cached
        if self._workers is None:
            translated = translate(grammar, self._libraries.specials)
        else:
            translated = self._checked(self._workers, grammar)
        return self.cache.add(grammar, compile_only(self._libraries, translated))

    def _checked(self, workers: queue.SimpleQueue[Worker], grammar: Grammar) -> Grammar:
        """Have a worker process translate, compile and check the grammar; raise OutriderError."""
        own = workers.get()
        try:
            answer = own.call(worker.request_for(grammar), self._seconds)
            translated = worker.translated_by(answer, grammar)
            if has_check(grammar):
                _check_texts(own, grammar)
            return translated
        except OutOfTime as cause:
            limit = f"{self._seconds:g} s"
            raise invalid(grammar.field, f"takes longer than {limit} to compile") from cause
        except WorkerLost as cause:
            message = f"{grammar.field}: not compiled, because its compiler {cause}"
            raise OutriderError(Reason.NOT_READY, message, grammar.field) from cause
        except WorkerError as cause:
            raise invalid(grammar.field, f"cannot be compiled: it {cause}") from cause
        finally:
            workers.put(own)


def _check_texts(own: Worker, grammar: Grammar) -> None:
    """Have the worker check random texts of a compiled grammar, for at most GUARD_SECONDS."""
    with suppress(OutOfTime):
        worker.raise_from(own.call(worker.texts_request_for(grammar), GUARD_SECONDS))


def advanced(compiled: Compiled, committed: Sequence[int]) -> TextMatcher:
    """Return a matcher that has read the output that is committed already.

    Raises OutriderError(INVALID_VALUE) for a token that the grammar forbids or that ends the text.
    """
    matcher = compiled.matcher()
    for i, token in enumerate(committed):
        if not matcher.accept(token):
            problem = f"must be a token that the grammar allows here, not {token}"
            raise invalid(f"committed_token_ids[{i}]", problem)
        if matcher.ended:
            problem = f"must not end the sequence, but {token} does"
            raise invalid(f"committed_token_ids[{i}]", problem)
    return matcher
