"""Compiles grammars within a time limit and caches them.

Refuses grammars that are invalid, that no backend can enforce, and whose masks take too long. Knows
token ids and grammars; not sequences, streams or logits.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from outrider.errors import OutriderError, Reason, invalid
from outrider.grammar.backends import Backend, Compiled, LLGuidance, Matcher, XGrammar
from outrider.grammar.cache import GrammarCache
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.repetition import check_ebnf, check_pattern, check_times
from outrider.grammar.schema import check_schema

_Result = TypeVar("_Result")

_THREAD_COUNT = 2
# LLGuidance recurses along rules and references, and a stack overflow ends the process. The longest
# chains that 65,536 characters allow overflow 32 MiB and fit in 128 MiB. Only compiling recurses so
# deep, and untouched stack costs no memory.
_STACK_BYTES = 256 * 2**20
# A trial computes masks along a text of this many tokens, within this CPU time. An ambiguous
# grammar compiles at once but may take seconds for a mask, and the whole batch would wait for it.
_TRIAL_TOKENS = 16
_TRIAL_SECONDS = 0.8


class GrammarCompiler:
    """Compiles grammars for one tokenizer and caches them.

    `vocab_size` is the logits' width; masks never allow ids without a token. `compile_seconds`
    bounds how long a request waits for its grammar. Work in progress cannot be cancelled: it
    continues on one of two threads, and the cache keeps its result. Another request waits for it
    only if both threads are busy with such work. `cache_bytes` bounds the cache.
    """

    def __init__(
        self,
        tokenizer_path: str,
        vocab_size: int,
        stop_token_ids: tuple[int, ...],
        *,
        backend: Backend = "xgrammar",
        compile_seconds: float = 5.0,
        cache_bytes: int = 512 * 2**20,
    ) -> None:
        """Load the tokenizer; raises ImportError when the backend is not installed."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        self.mask_width = -(-vocab_size // 32)
        self.cache = GrammarCache(cache_bytes)
        make = XGrammar if backend == "xgrammar" else LLGuidance
        self._backend = make(tokenizer, vocab_size, stop_token_ids)
        self._stops = list(stop_token_ids)
        self._seconds = compile_seconds
        self._pool = _threads()

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar or take it from the cache.

        Raises OutriderError(INVALID_VALUE) that names the field for a grammar that is invalid or
        allows no text.
        """
        return self.cache.get(grammar) or self._pool.submit(self._compile_once, grammar).result()

    async def compile_async(self, grammar: Grammar) -> Compiled:
        """Do the same off the event loop, within `compile_seconds`.

        Raises OutriderError(OVERLOADED) too, if other grammars kept the threads busy all the time.
        """
        cached = self.cache.get(grammar)
        if cached is not None:
            return cached
        return await self._on_thread(_field(grammar), self._compile_once, grammar)

    async def matcher_async(self, grammar: Grammar, committed: Sequence[int]) -> Matcher:
        """Compile a grammar as above, and advance a matcher behind these tokens of its text.

        Raises OutriderError as above, and INVALID_VALUE for a token that may not be there.
        """
        compiled = await self.compile_async(grammar)
        if not committed:
            return compiled.matcher()
        # Thousands of tokens take as long as several steps of the engine.
        return await self._on_thread(_field(grammar), advanced, compiled, committed)

    async def _on_thread(
        self, field: str, function: Callable[..., _Result], *given: object
    ) -> _Result:
        """Run a function on a thread of the pool, within `compile_seconds`."""
        work = self._pool.submit(function, *given)
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.wrap_future(work)
        except TimeoutError as cause:
            limit = f"{self._seconds:g} s"
            if work.cancel():
                message = f"{field}: not compiled, because other grammars took {limit}"
                raise OutriderError(Reason.OVERLOADED, message, field) from cause
            raise invalid(field, f"takes longer than {limit} to compile") from cause
        finally:
            # Cancelled callers' work does not start. Work in progress ends, and is cached.
            work.cancel()

    def _compile_once(self, grammar: Grammar) -> Compiled:
        """Compile on a thread of the pool, unless another thread has done so in the meantime."""
        return self.cache.get(grammar) or self.cache.add(grammar, self._compile(grammar))

    def _compile(self, grammar: Grammar) -> Compiled:
        field = _field(grammar)
        try:
            _check(grammar, field)
            compiled = self._backend.compile(grammar)
            self._try_out(compiled.matcher(), field)
        except OutriderError:
            raise
        # Each library has its own exceptions, and all of them are about the grammar.
        except Exception as cause:
            raise invalid(field, f"cannot be compiled: {_readable(cause)}") from cause
        return compiled

    def _try_out(self, matcher: Matcher, field: str) -> None:
        """Write a short random text.

        Raises OutriderError(INVALID_VALUE) if the grammar allows none or its masks take too long.
        """
        mask = np.zeros((1, self.mask_width), np.int32)
        choose = np.random.default_rng(0)
        seconds = 0.0
        for position in range(_TRIAL_TOKENS):
            # The thread's CPU time, so that a busy machine makes no difference.
            started = time.thread_time()
            matcher.fill(mask, 0)
            seconds += time.thread_time() - started
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if position == 0 and not len(allowed):
                raise invalid(field, "allows no text at all")
            if seconds > _TRIAL_SECONDS:
                limit = 1000 * _TRIAL_SECONDS / _TRIAL_TOKENS
                slow = f"masks for its tokens take longer than {limit:.0f} ms each"
                raise invalid(field, f"can be read in too many ways: {slow}")
            allowed = allowed[~np.isin(allowed, self._stops)]
            if not len(allowed) or not matcher.accept(int(choose.choice(allowed))):
                return


def advanced(compiled: Compiled, committed: Sequence[int]) -> Matcher:
    """A matcher behind output that was committed before.

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


def _threads() -> ThreadPoolExecutor:
    """A pool with large stacks. All its threads start here, where the stack size is set."""
    pool = ThreadPoolExecutor(_THREAD_COUNT, thread_name_prefix="grammar")
    started = threading.Barrier(_THREAD_COUNT + 1)
    usual = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(_THREAD_COUNT):
            pool.submit(started.wait)
        started.wait()
    finally:
        threading.stack_size(usual)
    return pool


def _field(grammar: Grammar) -> str:
    return f"grammar.{grammar.kind.value}"


def _readable(cause: Exception) -> str:
    """The first line of a library's message, without time stamp and file."""
    line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", line)[:300]


def _check(grammar: Grammar, field: str) -> None:
    """Refuse grammars that the backends accept without enforcing, and those with slow masks."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        check_schema(_json(grammar.text, field), field)
    elif grammar.kind is GrammarKind.STRUCTURAL_TAG:
        _check_tag(_json(grammar.text, field), field)
    elif grammar.kind is GrammarKind.REGEX:
        check_pattern(grammar.text, field)
    elif grammar.kind is GrammarKind.EBNF:
        check_ebnf(grammar.text, field)


def _check_tag(tag: Any, field: str, repeated: int = 1) -> None:
    """Check all schemas, patterns, grammars and repetitions within a structural tag."""
    if isinstance(tag, list):
        for part in tag:
            _check_tag(part, field, repeated)
    if not isinstance(tag, dict):
        return
    if tag.get("type") == "repeat":
        counts = [tag[name] for name in ("min", "max") if isinstance(tag.get(name), int)]
        repeated *= max([1, *counts])
        check_times(repeated, field)
    for key, value in tag.items():
        if key == "json_schema":
            check_schema(value, field)
        elif key == "pattern" and isinstance(value, str):
            check_pattern(value, field)
        elif key == "grammar" and isinstance(value, str):
            check_ebnf(value, field)
        else:
            _check_tag(value, field, repeated)


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise invalid(field, f"is not JSON: {cause}") from cause
