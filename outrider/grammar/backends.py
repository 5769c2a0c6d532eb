"""The libraries that compile grammars and compute masks, behind one small interface."""

from __future__ import annotations

import json
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from outrider.errors import invalid
from outrider.messages import Grammar, GrammarKind

Backend = Literal["xgrammar", "llguidance"]
Mask = npt.NDArray[np.int32]
# Of a text's whitespace no more than this stands between two JSON tokens: without a bound a model can go on indenting for ever.
_MOST_WHITESPACE = 16
# LLGuidance does not say what a grammar holds. By malloc's count hardly any grammar of up to 64,000 characters held more than this.
_LL_BYTES, _LL_BYTES_PER_CHARACTER = 128 * 1024, 128


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

    @property
    def size_bytes(self) -> int:
        """The memory that it takes."""

    def matcher(self) -> Matcher:
        """At its beginning."""


def _alternatives(choices: tuple[str, ...]) -> str:
    """A grammar of one of these texts; JSON's escapes are the grammar's."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


class XGrammar:
    """XGrammar (Dong et al., arXiv 2411.15100)."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: tuple[int, ...]) -> None:
        import xgrammar

        self._library = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_token_ids)
        )
        # In JSON a control character has to be escaped, which the library forgets for strings of bounded length and for patterns.
        raw = [
            i
            for i, text in enumerate(info.decoded_vocab)
            if any(byte < 0x20 and byte not in b"\r\n" for byte in text)
        ]
        self._raw = frozenset(raw)
        # What was compiled is remembered by our own compiler.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Compiled:
        compiler = self._compiler
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                compiled = compiler.compile_json_schema(
                    grammar.text, max_whitespace_cnt=_MOST_WHITESPACE
                )
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

    @property
    def size_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def matcher(self) -> Matcher:
        return _XMatcher(self._library.GrammarMatcher(self._compiled), self._forbidden)


class _XMatcher:
    def __init__(self, matcher: Any, forbidden: frozenset[int]) -> None:
        self._matcher, self._forbidden = matcher, forbidden

    def accept(self, token_id: int) -> bool:
        return (
            token_id not in self._forbidden
            and not self.ended
            and bool(self._matcher.accept_token(token_id))
        )

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


class LLGuidance:
    """LLGuidance, which derives masks as it goes and so compiles in next to no time."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: tuple[int, ...]) -> None:
        import llguidance.hf
        import llguidance.numpy

        self._library, self._stops = llguidance, stop_token_ids
        self._tokenizer = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=list(stop_token_ids) or None
        )

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
                text = matcher.grammar_from_lark(
                    self._library.gbnf_to_lark.gbnf_to_lark(grammar.text)
                )
            case GrammarKind.CHOICE:
                text = matcher.grammar_from_lark(
                    "start: "
                    + " | ".join(
                        json.dumps(choice, ensure_ascii=False) for choice in grammar.choices
                    )
                )
            case GrammarKind.STRUCTURAL_TAG:
                raise invalid(
                    f"grammar.{grammar.kind.value}", "is not known to the backend llguidance"
                )
        return _LLCompiled(self._library, self._tokenizer, text, self._stops)


class _LLCompiled:
    def __init__(
        self, library: Any, tokenizer: Any, text: str, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._library, self._stops = library, stop_token_ids
        self._first = library.LLMatcher(tokenizer, text)
        if self._first.is_error():
            raise ValueError(self._first.get_error())
        self.size_bytes = _LL_BYTES + _LL_BYTES_PER_CHARACTER * len(text)

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
        return not self._matcher.is_error() and bool(
            self._matcher.is_stopped() or self._matcher.is_accepting()
        )

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
            words[token // 32] = (
                words[token // 32] | bit if self._complete else words[token // 32] & ~bit
            )
