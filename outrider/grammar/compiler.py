"""Grammars, compiled once and remembered; refused by name where they have no meaning, cannot be kept to or would take too long.

Knows token ids and grammars; not sequences, streams or logits.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from outrider.errors import OutriderError, Reason, invalid
from outrider.grammar.backends import Backend, Compiled, LLGuidance, Matcher, XGrammar
from outrider.grammar.cache import GrammarCache
from outrider.grammar.repetition import check_ebnf, check_pattern, check_times
from outrider.grammar.schema import check_schema
from outrider.messages import Grammar, GrammarKind

_COMPILING = 2
# LLGuidance recurses along rules and references, and a stack that overflows ends the process. Chains as long as a grammar's 65,536
# characters allow overflow 32 MiB and fit into 128. Only compiling goes so deep. What is not touched costs nothing.
_STACK_BYTES = 256 * 2**20
# Before a grammar is taken its masks are computed along a text of so many tokens, for no longer than this (CPU seconds). What can
# be read in many ways compiles at once, and then takes seconds a mask, for which all sequences of a batch would have to wait.
_TRIAL_TOKENS = 16
_TRIAL_SECONDS = 0.8


class GrammarCompiler:
    """Compiles for one tokenizer, and remembers. `vocab_size` is the logits' width; ids without a token are never allowed.

    `compile_seconds` bounds how long a request waits for its grammar. The work itself cannot be cut off: it goes on, on one of
    two threads, and what it finds is remembered; no other request waits for it unless both are busy with such work. `cache_bytes`
    bounds what is remembered.
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
        """Raises ImportError when the backend is not installed."""
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
        """Raises OutriderError(INVALID_VALUE) that names the field for what has no meaning, or what no text could satisfy."""
        return self.cache.get(grammar) or self._pool.submit(self._remembered, grammar).result()

    async def compile_async(self, grammar: Grammar) -> Compiled:
        """As `compile`, off the event loop and within the time allowed; raises OutriderError(OVERLOADED) if others took it all."""
        if (known := self.cache.get(grammar)) is not None:
            return known
        work = self._pool.submit(self._remembered, grammar)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), self._seconds)
        except TimeoutError as cause:
            if work.cancel():
                message = f"{_field(grammar)}: other grammars took {self._seconds:g} s to compile, so that this one was not begun"
                raise OutriderError(Reason.OVERLOADED, message, _field(grammar)) from cause
            raise invalid(
                _field(grammar), f"takes longer than {self._seconds:g} s to compile"
            ) from cause
        finally:
            # What nobody waits for any more is not begun; what was begun ends, and is remembered.
            work.cancel()

    def _remembered(self, grammar: Grammar) -> Compiled:
        """On a thread of the pool; the same may have been compiled while this waited."""
        return self.cache.get(grammar) or self.cache.add(grammar, self._compile(grammar))

    def _compile(self, grammar: Grammar) -> Compiled:
        field = _field(grammar)
        try:
            _check(grammar, field)
            compiled = self._backend.compile(grammar)
            self._try_out(compiled.matcher(), field)
        except OutriderError:
            raise
        # Each library has its own exceptions, all of them about the grammar it was given.
        except Exception as cause:
            raise invalid(field, f"cannot be compiled: {_readable(cause)}") from cause
        return compiled

    def _try_out(self, matcher: Matcher, field: str) -> None:
        """Write a short text at random; raises OutriderError(INVALID_VALUE) if there is none, or its masks take too long."""
        mask, choose = np.zeros((1, self.mask_width), np.int32), np.random.default_rng(0)
        seconds = 0.0
        for position in range(_TRIAL_TOKENS):
            # Of this thread alone, so that a busy machine makes no difference.
            started = time.thread_time()
            matcher.fill(mask, 0)
            seconds += time.thread_time() - started
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if position == 0 and not len(allowed):
                raise invalid(field, "allows no text at all")
            if seconds > _TRIAL_SECONDS:
                limit = 1000 * _TRIAL_SECONDS / _TRIAL_TOKENS
                message = f"can be read in too many ways: masks for its tokens take longer than {limit:.0f} ms each"
                raise invalid(field, message)
            allowed = allowed[~np.isin(allowed, self._stops)]
            if not len(allowed) or not matcher.accept(int(choose.choice(allowed))):
                return


def _threads() -> ThreadPoolExecutor:
    """Those that compile, all of them started here, since the size of a stack is set for the threads to come."""
    pool, started = (
        ThreadPoolExecutor(_COMPILING, thread_name_prefix="grammar"),
        threading.Barrier(_COMPILING + 1),
    )
    usual = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(_COMPILING):
            pool.submit(started.wait)
        started.wait()
    finally:
        threading.stack_size(usual)
    return pool


def _field(grammar: Grammar) -> str:
    return f"grammar.{grammar.kind.value}"


def _readable(cause: Exception) -> str:
    """The first line of a library's message, without its time stamp and file."""
    line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", line)[:300]


def _check(grammar: Grammar, field: str) -> None:
    """Refuse what the backends would take and not keep to, or choke on while masks are computed."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        check_schema(_json(grammar.text, field), field)
    elif grammar.kind is GrammarKind.STRUCTURAL_TAG:
        _check_tag(_json(grammar.text, field), field)
    elif grammar.kind is GrammarKind.REGEX:
        check_pattern(grammar.text, field)
    elif grammar.kind is GrammarKind.EBNF:
        check_ebnf(grammar.text, field)


def _check_tag(tag: Any, field: str, repeated: int = 1) -> None:
    """Every schema, pattern and grammar within a structural tag, and how often its parts are repeated."""
    if isinstance(tag, list):
        for part in tag:
            _check_tag(part, field, repeated)
    if not isinstance(tag, dict):
        return
    if tag.get("type") == "repeat":
        repeated *= max(
            [1, *(tag[name] for name in ("min", "max") if isinstance(tag.get(name), int))]
        )
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
