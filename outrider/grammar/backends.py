"""The libraries that compile grammars and compute masks, behind one small interface."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from outrider.errors import OutriderError, invalid
from outrider.grammar.kinds import Backend, Grammar, GrammarKind

Mask = npt.NDArray[np.int32]
# Most whitespace characters between two JSON tokens. Without a bound a model can indent for ever.
_MAX_WHITESPACE = 16
# LLGuidance does not report a grammar's size. Measured with malloc, hardly any grammar of up to
# 64,000 characters took more than this.
_LL_BYTES = 128 * 1024
_LL_BYTES_PER_CHARACTER = 128
# Beyond these the mask of one token is an error, which ends that request. 1,000 items take 50 us,
# 1,000 units of fuel 70 us, and a state 1 to 2 kB.
_LL_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
_LL_JSON: Any = {
    # A space, or one line break with an indentation: a model that likes line breaks goes on.
    "whitespace_pattern": rf"\x20|\x0D?\x0A[\x20\x09]{{0,{_MAX_WHITESPACE}}}",
    # Without \u: {"\u0061": 1} would pass as a property other than "a".
    "json_allowed_escapes": 'nrbtf\\"',
}


class MaskLimit(Exception):
    """A mask would be beyond the limits of its backend. No more masks can be had of the text."""


def too_expensive(grammar: Grammar) -> OutriderError:
    """The error for a grammar whose backend gives up on a mask."""
    problem = "its masks became too expensive for the backend"
    return invalid(grammar.field, f"can be read in too many ways: {problem}")


class Matcher(Protocol):
    """The state of one text in its grammar."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token; returns False and changes nothing when the grammar forbids it."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""

    def fill(self, mask_RW: Mask, row: int) -> None:
        """Write the allowed tokens to a row of int32 [R, ceil(V / 32)], lowest bit first.

        Raises MaskLimit.
        """

    @property
    def ended(self) -> bool:
        """Whether an end token has closed the text."""


class TextMatcher(Matcher, Protocol):
    """A matcher that also tells which text must follow."""

    def jump_forward(self) -> bytes:
        """The bytes that must follow, as far as there is no choice; none once the text has ended.

        They may be thousands, and may end within a character.
        """

    def fork(self) -> TextMatcher:
        """A copy, which goes its own way."""

    def accept_bytes(self, text: bytes) -> bool:
        """Advance by `text`; where the grammar forbids it, returns False and advances by nothing.

        `rollback` counts tokens, so it must not go back beyond this.
        """


class Compiled(Protocol):
    """A compiled grammar."""

    @property
    def size_bytes(self) -> int:
        """Its memory, in bytes; an estimate with LLGuidance."""

    def matcher(self) -> TextMatcher:
        """A matcher at the start of a text."""


class Library(Protocol):
    """A library with the tokenizer loaded."""

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile; raises the library's exceptions for a grammar that it refuses."""


class Libraries:
    """Both libraries with the tokenizer loaded. Each grammar goes to the library that serves it."""

    def __init__(
        self, tokenizer_path: str, vocab_size: int, stop_token_ids: tuple[int, ...]
    ) -> None:
        """Load the tokenizer."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        xgrammar = XGrammar(tokenizer, vocab_size, stop_token_ids)
        self._libraries: dict[Backend, Library] = {
            "xgrammar": xgrammar,
            "llguidance": LLGuidance(tokenizer, vocab_size, stop_token_ids),
        }
        self.token_bytes = xgrammar.token_bytes

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a translated grammar; raises the library's exceptions if it refuses it."""
        return self._libraries[grammar.backend].compile(grammar)


def token_bytes(model: str) -> list[bytes]:
    """The bytes that each token of a model's tokenizer stands for, by id; a special token's name.

    `model` is a directory or a hub id. An id without a token has no bytes.
    """
    import xgrammar
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    decoded: list[bytes] = xgrammar.TokenizerInfo.from_huggingface(tokenizer).decoded_vocab
    return decoded


class XGrammar:
    """Compiles GBNF and structural tags with XGrammar (Dong et al., arXiv 2411.15100)."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: tuple[int, ...]) -> None:
        import xgrammar

        self._library = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_token_ids)
        )
        self.token_bytes: list[bytes] = info.decoded_vocab
        self._without_controls = np.full(-(-vocab_size // 32), -1, np.int32)
        words = self._without_controls.view(np.uint32)
        for token_id, text in enumerate(self.token_bytes):
            if any(byte < 0x20 and byte not in b"\r\n" for byte in text):
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        # GrammarCache caches instead of the library.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile; raises the library's exceptions for a grammar that it refuses."""
        if grammar.kind is GrammarKind.STRUCTURAL_TAG:
            compiled = self._compiler.compile_structural_tag(grammar.text)
        else:
            compiled = self._compiler.compile_grammar(grammar.text)
        only = self._without_controls if _has_lengths(grammar) else None
        return _XCompiled(self._library, compiled, only)


def _has_lengths(grammar: Grammar) -> bool:
    """Whether the grammar may hold JSON strings of bounded length.

    XGrammar lets these hold raw control characters, which is not JSON. So no text of such a grammar
    gets a token with a raw control character other than a line break.
    """
    is_tag = grammar.kind is GrammarKind.STRUCTURAL_TAG
    return is_tag and re.search('"m(in|ax)Length"', grammar.text) is not None


class _XCompiled:
    def __init__(self, library: Any, compiled: Any, only: Mask | None) -> None:
        """`only` is a mask (int32 [ceil(V / 32)]) of the tokens that may be used; None for all."""
        self._library = library
        self._compiled = compiled
        self._only = only

    @property
    def size_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def matcher(self) -> TextMatcher:
        return _XMatcher(self._library.GrammarMatcher(self._compiled), self._only)


class _XMatcher:
    def __init__(self, matcher: Any, only: Mask | None) -> None:
        self._matcher, self._only = matcher, only

    def accept(self, token_id: int) -> bool:
        if self.ended:
            return False
        if self._only is not None and not self._only[token_id // 32] >> token_id % 32 & 1:
            return False
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def fill(self, mask_RW: Mask, row: int) -> None:
        if self.ended:
            mask_RW[row] = 0
            return
        self._matcher.fill_next_token_bitmask(mask_RW, row)
        if self._only is not None:
            mask_RW[row] &= self._only

    def jump_forward(self) -> bytes:
        if self.ended:
            return b""
        try:
            return str(self._matcher.find_jump_forward_string()).encode()
        # Within a character, the library cannot give the rest of it as a string.
        except UnicodeDecodeError:
            return b""

    def fork(self) -> TextMatcher:
        return _XMatcher(self._matcher.fork(), self._only)

    def accept_bytes(self, text: bytes) -> bool:
        return not self.ended and bool(self._matcher.accept_string(text))

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_terminated())


class LLGuidance:
    """Compiles JSON schemas, regular expressions and choices with LLGuidance.

    It derives masks lazily, and so compiles in almost no time.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: tuple[int, ...]) -> None:
        import llguidance.hf
        import llguidance.numpy

        self._library = llguidance
        self._stops = stop_token_ids
        self._tokenizer = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=list(stop_token_ids) or None
        )

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile; raises ValueError for a grammar that the library refuses."""
        matcher = self._library.LLMatcher
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                text = matcher.grammar_from_json_schema(grammar.text, overrides=_LL_JSON)
            case GrammarKind.JSON_OBJECT:
                text = matcher.grammar_from_json_schema('{"type": "object"}', overrides=_LL_JSON)
            case GrammarKind.REGEX:
                text = matcher.grammar_from_regex(grammar.text)
            case GrammarKind.CHOICE:
                text = matcher.grammar_from_lark("start: " + _alternatives(grammar.choices))
            case _:
                raise AssertionError(f"XGrammar serves {grammar.kind}")
        return _LLCompiled(self._library, self._tokenizer, text, self._stops)


def _alternatives(choices: tuple[str, ...]) -> str:
    """The right side of a rule that matches one of these texts, escaped as in JSON."""
    texts = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    # LLGuidance's lexer takes no raw DEL, which JSON does not escape.
    return " | ".join(texts).replace("\x7f", r"\u007f")


class _LLCompiled:
    def __init__(
        self, library: Any, tokenizer: Any, text: str, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._library = library
        self._stops = stop_token_ids
        limits = library.LLParserLimits(**_LL_LIMITS)
        self._tokenizer = tokenizer
        self._first = library.LLMatcher(tokenizer, text, limits=limits)
        if self._first.is_error():
            raise ValueError(self._first.get_error())
        self.size_bytes = _LL_BYTES + _LL_BYTES_PER_CHARACTER * len(text)

    def matcher(self) -> TextMatcher:
        copy = self._first.deep_copy()
        return _LLMatcher(self._library, self._tokenizer, copy, self._stops)


class _LLMatcher:
    """Requires an end token after every text.

    The library stops by itself where nothing can follow.
    """

    def __init__(
        self, library: Any, tokenizer: Any, matcher: Any, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._library = library
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._stops = stop_token_ids
        self.ended = False

    @property
    def _complete(self) -> bool:
        # The library also stops on an error, which does not end a text.
        if self._matcher.is_error():
            return False
        return bool(self._matcher.is_stopped() or self._matcher.is_accepting())

    def accept(self, token_id: int) -> bool:
        if self.ended:
            return False
        if token_id in self._stops:
            self.ended = self._complete
            return self.ended
        # `consume_token` of a forbidden token would leave the matcher in an error state.
        if self._matcher.is_stopped() or self._matcher.validate_tokens([token_id]) != 1:
            return False
        return bool(self._matcher.consume_token(token_id))

    def rollback(self, count: int) -> None:
        if self.ended and count:
            self.ended = False
            count -= 1
        if count:
            self._matcher.rollback(count)

    def jump_forward(self) -> bytes:
        if self.ended or self._matcher.is_stopped():
            return b""
        return bytes(self._matcher.compute_ff_bytes())

    def fork(self) -> TextMatcher:
        copy = _LLMatcher(self._library, self._tokenizer, self._matcher.deep_copy(), self._stops)
        copy.ended = self.ended
        return copy

    def accept_bytes(self, text: bytes) -> bool:
        if self.ended or self._matcher.is_stopped():
            return False
        tokens = self._tokenizer.tokenize_bytes(text)
        if self._matcher.validate_tokens(tokens) < len(tokens):
            return False
        return bool(self._matcher.consume_tokens(tokens))

    def fill(self, mask_RW: Mask, row: int) -> None:
        mask_RW[row] = 0
        if self.ended:
            return
        if not self._matcher.is_stopped():
            self._library.numpy.fill_next_token_bitmask(self._matcher, mask_RW, row)
        if self._matcher.is_error():
            raise MaskLimit
        words = mask_RW[row].view(np.uint32)
        for token in self._stops:
            bit = np.uint32(1 << token % 32)
            if self._complete:
                words[token // 32] |= bit
            else:
                words[token // 32] &= ~bit
