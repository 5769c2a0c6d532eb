"""LLGuidance, which compiles grammars and computes masks, behind one small interface."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from outrider.errors import OutriderError, invalid
from outrider.grammar.kinds import Grammar
from outrider.grammar.lark import SpecialTokens
from outrider.grammar.tokens import bytes_of, for_llguidance
from outrider.tokenizer import load_tokenizer

Mask = npt.NDArray[np.int32]
# LLGuidance does not report a grammar's size, so this module estimates it. By our measurements with
# malloc, hardly any grammar of up to 64,000 characters took more than this estimate.
_LL_BYTES = 128 * 1024
_LL_BYTES_PER_CHARACTER = 128
# If the work for a mask exceeds one of these limits, LLGuidance reports an error in place of the
# mask, and the request ends. 1,000 items take 50 us, 1,000 units of fuel take 70 us, and a lexer
# state takes 1 to 2 kB.
_LL_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}


class MaskLimit(Exception):
    """A mask would exceed the limits of its backend. The output can get no more masks."""


def too_expensive(grammar: Grammar) -> OutriderError:
    """Return the error for a grammar with a mask that exceeds the backend's limits."""
    problem = "its masks became too expensive for the backend"
    return invalid(grammar.field, f"can be read in too many ways: {problem}")


class Matcher(Protocol):
    """The state of one output in its grammar."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token; return False and change nothing when the grammar forbids it."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""

    def fill(self, mask_RW: Mask, row: int) -> None:
        """Write the allowed tokens to a row of int32 [R, ceil(V / 32)], lowest bit first.

        Raises MaskLimit.
        """

    @property
    def ended(self) -> bool:
        """True if an end token has ended the output."""


class TextMatcher(Matcher, Protocol):
    """A matcher that also says which bytes must follow."""

    @property
    def lark(self) -> str:
        """The grammar as LLGuidance reads it."""

    def jump_forward(self) -> bytes:
        """Return the bytes that must follow, up to the first choice; none after the output's end.

        There may be thousands of bytes, and they may end within a character.
        """

    def fork(self) -> TextMatcher:
        """Return a copy, which advances independently."""

    def accept_bytes(self, text: bytes) -> bool:
        """Advance by `text`; if the grammar forbids it, return False and change nothing.

        `rollback` counts tokens, so a later `rollback` must not undo this call.
        """


class Compiled(Protocol):
    """A compiled grammar."""

    @property
    def size_bytes(self) -> int:
        """An estimate of the memory that the grammar takes, in bytes."""

    def matcher(self) -> TextMatcher:
        """Return a matcher at the start of an output."""


class Libraries:
    """LLGuidance with the tokenizer loaded.

    LLGuidance derives masks lazily, so it compiles fast.
    """

    def __init__(
        self, tokenizer_path: str, vocab_size: int, stop_token_ids: tuple[int, ...]
    ) -> None:
        """Load the tokenizer; `tokenizer_path` is a model directory or hub id."""
        import llguidance.numpy

        tokenizer = load_tokenizer(tokenizer_path)
        self._library = llguidance
        self._stops = stop_token_ids
        self._tokenizer = for_llguidance(tokenizer, vocab_size, stop_token_ids)
        self.token_bytes = bytes_of(self._tokenizer, tokenizer, vocab_size)
        special = self._tokenizer.is_special_token
        names = {each.content: i for i, each in tokenizer.get_added_tokens_decoder().items()}
        self.specials = SpecialTokens({name: i for name, i in names.items() if special(i)})

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a translated grammar; raise ValueError if the library refuses it."""
        return _LLCompiled(self._library, self._tokenizer, grammar.text, self._stops)


class _Lexer:
    """The lexer that the library's copies of a matcher share.

    Once the work for one mask has exceeded a limit, the lexer allows no token in any output.
    """

    has_failed = False


class _LLCompiled:
    """A compiled grammar, whose matchers share a lexer until it fails."""

    def __init__(
        self, library: Any, tokenizer: Any, text: str, stop_token_ids: tuple[int, ...]
    ) -> None:
        self.library = library
        self.tokenizer = tokenizer
        self.stops = stop_token_ids
        self.lark = text
        self._grammar = library.LLMatcher.grammar_from_lark(text)
        self._limits = library.LLParserLimits(**_LL_LIMITS)
        self._first = self.alone()
        first, _ = self._first
        if first.is_error():
            raise ValueError(first.get_error())
        self.size_bytes = _LL_BYTES + _LL_BYTES_PER_CHARACTER * len(text)

    def alone(self) -> tuple[Any, _Lexer]:
        """Return the library's matcher at the start of an output, with a lexer of its own."""
        matcher = self.library.LLMatcher(self.tokenizer, self._grammar, limits=self._limits)
        return matcher, _Lexer()

    def begin(self) -> tuple[Any, _Lexer]:
        """Return the library's matcher at the start of an output, and its lexer."""
        first, lexer = self._first
        if lexer.has_failed:
            first, lexer = self._first = self.alone()
        return first.deep_copy(), lexer

    def matcher(self) -> TextMatcher:
        return _LLMatcher(self)


class _LLMatcher:
    """A matcher that requires an end token after every output.

    Where nothing can follow, the library itself stops without an end token. The accepted tokens are
    kept, so that a failure in another output, or in a draft that is rolled back, does not end this
    output.
    """

    def __init__(self, compiled: _LLCompiled) -> None:
        self._compiled = compiled
        self.lark = compiled.lark
        self._matcher, self._lexer = compiled.begin()
        self._accepted: list[int] = []
        self.ended = False

    def _restore(self) -> bool:
        """If the lexer has failed, restore this state with a new lexer.

        Return True if the lexer had failed.
        """
        if self._matcher.is_error():
            self._lexer.has_failed = True
        if not self._lexer.has_failed:
            return False
        self._matcher, self._lexer = self._compiled.alone()
        self._matcher.consume_tokens(self._accepted)
        return True

    @property
    def _complete(self) -> bool:
        # The library also stops on an error, but an error does not end the output.
        if self._matcher.is_error():
            return False
        return bool(self._matcher.is_stopped() or self._matcher.is_accepting())

    def accept(self, token_id: int) -> bool:
        if self.ended:
            return False
        if token_id in self._compiled.stops:
            self._restore()
            self.ended = self._complete
            return self.ended
        return self._accept([token_id])

    def _accept(self, token_ids: list[int]) -> bool:
        """Advance by all tokens or none."""
        if not self._advance(token_ids) and not (self._restore() and self._advance(token_ids)):
            return False
        self._accepted += token_ids
        return True

    def _advance(self, token_ids: list[int]) -> bool:
        # `consume_tokens` of a forbidden token would leave the matcher in an error state.
        if self._matcher.is_stopped():
            return False
        if self._matcher.validate_tokens(token_ids) < len(token_ids):
            return False
        return bool(self._matcher.consume_tokens(token_ids))

    def rollback(self, count: int) -> None:
        if self.ended and count:
            self.ended = False
            count -= 1
        if count:
            del self._accepted[-count:]
        if not self._restore() and count:
            self._matcher.rollback(count)

    def jump_forward(self) -> bytes:
        self._restore()
        if self.ended or self._matcher.is_stopped():
            return b""
        return bytes(self._matcher.compute_ff_bytes())

    def fork(self) -> TextMatcher:
        self._restore()
        copy = _LLMatcher(self._compiled)
        copy._matcher, copy._lexer = self._matcher.deep_copy(), self._lexer
        copy._accepted = self._accepted.copy()
        copy.ended = self.ended
        return copy

    def accept_bytes(self, text: bytes) -> bool:
        return not self.ended and self._accept(self._compiled.tokenizer.tokenize_bytes(text))

    def fill(self, mask_RW: Mask, row: int) -> None:
        mask_RW[row] = 0
        if self.ended:
            return
        self._fill(mask_RW, row)
        if self._restore():
            self._fill(mask_RW, row)
        if self._matcher.is_error():
            raise MaskLimit
        words = mask_RW[row].view(np.uint32)
        is_complete = self._complete
        for token in self._compiled.stops:
            bit = np.uint32(1 << token % 32)
            if is_complete:
                words[token // 32] |= bit
            else:
                words[token // 32] &= ~bit

    def _fill(self, mask_RW: Mask, row: int) -> None:
        if not self._matcher.is_stopped():
            fill = self._compiled.library.numpy.fill_next_token_bitmask
            fill(self._matcher, mask_RW, row)
