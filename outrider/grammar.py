"""What may come next under a grammar: compiled once, followed token by token, undone when a draft is rejected.

Knows token ids and grammars; not sequences, streams or logits. Two libraries do the work, behind one small interface.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from outrider.errors import OutriderError, invalid
from outrider.grammar_schema import check_repetition, check_schema
from outrider.messages import Grammar, GrammarKind

Backend = Literal["xgrammar", "llguidance"]
Mask = npt.NDArray[np.int32]
# Of a text's whitespace no more than this stands between two JSON tokens: without a bound a model can go on indenting for ever.
_MOST_WHITESPACE = 16
_CACHED = 256
_COMPILING = 2
# Before a grammar is taken its masks are computed along a text of so many tokens, for no longer than this (CPU seconds). What can
# be read in many ways compiles at once, and then takes seconds a mask, for which all sequences of a batch would have to wait.
_TRIAL_TOKENS = 16
_TRIAL_SECONDS = 0.8


class Matcher(Protocol):
    """Where one text stands in its grammar."""

    def accept(self, token_id: int) -> bool:
        """Go on behind a token; False, and nothing has changed, when the grammar forbids it."""

    def rollback(self, count: int) -> None:
        """Take back the last accepted tokens."""

    def fill(self, mask_RW: Mask, row: int) -> None:
        """Write which tokens may come next, a bit for each, the lowest first."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete and closed by an end token, so that nothing can follow."""


class Compiled(Protocol):
    """A grammar that was understood."""

    def matcher(self) -> Matcher:
        """At its beginning."""


class GrammarCompiler:
    """Compiles for one tokenizer, and remembers. `vocab_size` is the logits' width; ids without a token are never allowed.

    `compile_seconds` bounds how long a request waits for its grammar. The work itself cannot be cut off: it goes on, on one of
    two threads, and what it finds is remembered; no other request waits for it unless both are busy with such work.
    """

    def __init__(
        self,
        tokenizer_path: str,
        vocab_size: int,
        stop_token_ids: tuple[int, ...],
        *,
        backend: Backend = "xgrammar",
        compile_seconds: float = 5.0,
    ) -> None:
        """Raises ImportError when the backend is not installed."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        self.mask_width = -(-vocab_size // 32)
        make = _XGrammar if backend == "xgrammar" else _LLGuidance
        self._backend = make(tokenizer, vocab_size, stop_token_ids)
        self._stops = list(stop_token_ids)
        self._seconds = compile_seconds
        self._pool = ThreadPoolExecutor(_COMPILING, thread_name_prefix="grammar")
        self._known: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Compiled:
        """Raises OutriderError(INVALID_VALUE) that names the field for what has no meaning, or what no text could satisfy."""
        with self._lock:
            if (known := self._known.get(grammar)) is not None:
                self._known.move_to_end(grammar)
                return known
        compiled = self._compile(grammar)
        with self._lock:
            known = self._known.setdefault(grammar, compiled)
            while len(self._known) > _CACHED:
                self._known.popitem(last=False)
        return known

    async def compile_async(self, grammar: Grammar) -> Compiled:
        """As `compile`, off the event loop and within the time allowed."""
        with self._lock:
            known = self._known.get(grammar)
        if known is not None:
            return known
        work = asyncio.get_running_loop().run_in_executor(self._pool, self.compile, grammar)
        try:
            return await asyncio.wait_for(asyncio.shield(work), self._seconds)
        except TimeoutError as cause:
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise invalid(_field(grammar), f"takes longer than {self._seconds:g} s to compile") from cause

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
        for schema in _embedded_schemas(_json(grammar.text, field)):
            check_schema(schema, field)
    elif grammar.kind is GrammarKind.REGEX:
        check_repetition(grammar.text, field)


def _embedded_schemas(tag: Any) -> Iterator[Any]:
    if isinstance(tag, dict):
        for key, value in tag.items():
            if key == "json_schema":
                yield value
            else:
                yield from _embedded_schemas(value)
    elif isinstance(tag, list):
        for value in tag:
            yield from _embedded_schemas(value)


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise invalid(field, f"is not JSON: {cause}") from cause


def _alternatives(choices: tuple[str, ...]) -> str:
    """A grammar of one of these texts; JSON's escapes are the grammar's."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


class _XGrammar:
    """XGrammar (Dong et al., arXiv 2411.15100)."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: tuple[int, ...]) -> None:
        import xgrammar

        self._library = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_token_ids))
        # In JSON a control character has to be escaped, which the library forgets for strings of bounded length and for patterns.
        raw = [i for i, text in enumerate(info.decoded_vocab) if any(byte < 0x20 and byte not in b"\r\n" for byte in text)]
        self._raw = frozenset(raw)
        # What was compiled is remembered by our own compiler.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Compiled:
        compiler = self._compiler
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                compiled = compiler.compile_json_schema(grammar.text, max_whitespace_cnt=_MOST_WHITESPACE)
            case GrammarKind.JSON_OBJECT:
                compiled = compiler.compile_json_schema(
                    '{"type": "object"}', max_whitespace_cnt=_MOST_WHITESPACE, strict_mode=False
                )
            case GrammarKind.REGEX:
                compiled = compiler.compile_regex(grammar.text)
            case GrammarKind.EBNF:
                compiled = compiler.compile_grammar(grammar.text)
            case GrammarKind.CHOICE:
                compiled = compiler.compile_grammar(_alternatives(grammar.choices))
            case GrammarKind.STRUCTURAL_TAG:
                compiled = compiler.compile_structural_tag(grammar.text)
        is_json = grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
        return _XCompiled(self._library, compiled, self._raw if is_json else frozenset())


class _XCompiled:
    def __init__(self, library: Any, compiled: Any, forbidden: frozenset[int]) -> None:
        self._library, self._compiled, self._forbidden = library, compiled, forbidden

    def matcher(self) -> Matcher:
        return _XMatcher(self._library.GrammarMatcher(self._compiled), self._forbidden)


class _XMatcher:
    def __init__(self, matcher: Any, forbidden: frozenset[int]) -> None:
        self._matcher, self._forbidden = matcher, forbidden

    def accept(self, token_id: int) -> bool:
        return token_id not in self._forbidden and not self.ended and bool(self._matcher.accept_token(token_id))

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def fill(self, mask_RW: Mask, row: int) -> None:
        if self.ended:
            mask_RW[row] = 0
        else:
            self._matcher.fill_next_token_bitmask(mask_RW, row)
            words = mask_RW[row].view(np.uint32)
            for token in self._forbidden:
                words[token // 32] &= ~np.uint32(1 << token % 32)

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_terminated())


class _LLGuidance:
    """LLGuidance, which derives masks as it goes and so compiles in next to no time."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: tuple[int, ...]) -> None:
        import llguidance.hf
        import llguidance.numpy

        self._library, self._stops = llguidance, stop_token_ids
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(stop_token_ids) or None)

    def compile(self, grammar: Grammar) -> Compiled:
        matcher = self._library.LLMatcher
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                text = matcher.grammar_from_json_schema(grammar.text)
            case GrammarKind.JSON_OBJECT:
                text = matcher.grammar_from_json_schema('{"type": "object"}')
            case GrammarKind.REGEX:
                text = matcher.grammar_from_regex(grammar.text)
            case GrammarKind.EBNF:
                text = matcher.grammar_from_lark(self._library.gbnf_to_lark.gbnf_to_lark(grammar.text))
            case GrammarKind.CHOICE:
                text = matcher.grammar_from_lark(
                    "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in grammar.choices)
                )
            case GrammarKind.STRUCTURAL_TAG:
                raise invalid(_field(grammar), "is not known to the backend llguidance")
        return _LLCompiled(self._library, self._tokenizer, text, self._stops)


class _LLCompiled:
    def __init__(self, library: Any, tokenizer: Any, text: str, stop_token_ids: tuple[int, ...]) -> None:
        self._library, self._stops = library, stop_token_ids
        self._first = library.LLMatcher(tokenizer, text)
        if self._first.is_error():
            raise ValueError(self._first.get_error())

    def matcher(self) -> Matcher:
        return _LLMatcher(self._library, self._first.deep_copy(), self._stops)


class _LLMatcher:
    """The library stops by itself where nothing can follow; here an end token has to come, as after any other text."""

    def __init__(self, library: Any, matcher: Any, stop_token_ids: tuple[int, ...]) -> None:
        self._library, self._matcher, self._stops = library, matcher, stop_token_ids
        self.ended = False

    @property
    def _complete(self) -> bool:
        # It also stops when it gives up; that is no end of a text.
        return not self._matcher.is_error() and bool(self._matcher.is_stopped() or self._matcher.is_accepting())

    def accept(self, token_id: int) -> bool:
        if self.ended:
            return False
        if token_id in self._stops:
            self.ended = self._complete
            return self.ended
        # `consume_token` alone would leave the matcher in an error state.
        if self._matcher.is_stopped() or self._matcher.validate_tokens([token_id]) != 1:
            return False
        return bool(self._matcher.consume_token(token_id))

    def rollback(self, count: int) -> None:
        if self.ended and count:
            self.ended, count = False, count - 1
        if count:
            self._matcher.rollback(count)

    def fill(self, mask_RW: Mask, row: int) -> None:
        mask_RW[row] = 0
        if self.ended:
            return
        if not self._matcher.is_stopped():
            self._library.numpy.fill_next_token_bitmask(self._matcher, mask_RW, row)
        if self._matcher.is_error():
            mask_RW[row] = 0
            return
        words = mask_RW[row].view(np.uint32)
        for token in self._stops:
            bit = np.uint32(1 << token % 32)
            words[token // 32] = words[token // 32] | bit if self._complete else words[token // 32] & ~bit
