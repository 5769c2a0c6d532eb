"""Translates between the target's tokens and the tokens of a draft model with another tokenizer.

The draft stream carries token ids of the target. The draft model reads its own tokenizer's encoding
of the same bytes, and guesses only tokens that have the bytes of one of the target's tokens (TLI,
arXiv 2502.05202). Each guess therefore is a token of the target too, so coupled noise, penalties
and grammars apply to the target's ids. This module works with tokenizers and ids, not with models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer

from outrider.errors import OutriderError, Reason
from outrider.tokenizer import end_token_ids, load_tokenizer

# Both vocabularies must have at least this share of the smaller vocabulary's tokens in common.
_LEAST_SHARE = 0.05
# Later text may change where the last `_SURE_WORDS` words begin, but not where earlier words begin.
# A word pattern looks ahead by one character, but blanks may join with line ends after them.
_SURE_WORDS = 4
# The maximum number of the target's tokens at the end of a text that are encoded again for each
# commit, if no word begins where both tokenizers begin a token.
_LONGEST_TAIL = 128
# The number of the draft model's tokens that are encoded again after a cut within a word.
_SURE_TOKENS = 32
_SAMPLE = "x"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_Key = TypeVar("_Key")
# Bytes that are not UTF-8, or the first bytes of a character whose other bytes are not there yet.
_NO_TEXT = re.compile("([\udc80-\udcff]+)")


@dataclass(slots=True)
class _Encoding:
    """Tokens of a text.

    For each token, `starts` has the byte at which the token begins, or -1 if it begins within a
    character, and `are_words` says whether a word begins with the token. `length` counts the text's
    bytes.
    """

    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    are_words: list[bool] = field(default_factory=list)
    length: int = 0

    def add(self, token: int, start: int, *, is_word: bool) -> None:
        self.ids.append(token)
        self.starts.append(start)
        self.are_words.append(is_word)


class TokenTable:
    """Finds a tokenizer's tokens: ordinary tokens by their bytes, special tokens by their names."""

    def __init__(
        self, tokenizer: Tokenizer, token_bytes: Sequence[bytes], end_ids: tuple[int, ...]
    ) -> None:
        """`token_bytes[id]` has the bytes of each token that may be read or guessed.

        `end_ids` end a text, the most usual first.
        """
        self.token_bytes = token_bytes
        self.end_ids = end_ids
        added = tokenizer.get_added_tokens_decoder().items()
        names = {i: token.content for i, token in added if token.special and i < len(token_bytes)}
        self.special = {name: i for i, name in names.items()}
        # A token for a byte, such as <0x41>, may have the same bytes as an ordinary token. Then the
        # ordinary token is taken.
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        byte_ids = {i for name, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(name)}
        self.by_bytes: dict[bytes, int] = {}
        for i in sorted(range(len(token_bytes)), key=lambda i: (i in byte_ids, i)):
            if token_bytes[i] and i not in names:
                self.by_bytes.setdefault(token_bytes[i], i)
        self._tokenizer = _copy(tokenizer, post_processor=None)
        self._tokenizer.encode_special_tokens = True
        plain = self._tokenizer.encode(_SAMPLE).ids
        whole = _copy(tokenizer).encode(_SAMPLE).ids
        self.prefix = whole[: whole.index(plain[0])]
        """The ids that the tokenizer puts before a text, such as <s>."""
        self._puts_blank = b"".join(token_bytes[i] for i in plain) != _SAMPLE.encode()

    def encode(self, text: bytes, found: _Encoding, *, at_beginning: bool) -> None:
        """Append the tokens of a part of a text to `found`.

        The names of special tokens count as ordinary text. Bytes that are not UTF-8 become tokens
        of one byte; bytes without such a token are left out. Some tokenizers put a blank before the
        beginning of a text, but not before a later part.
        """
        for part in _NO_TEXT.split(text.decode(errors="surrogateescape")):
            if _NO_TEXT.fullmatch(part):
                self._encode_bytes(part.encode(errors="surrogateescape"), found)
            elif part:
                self._encode_text(part, found, lead=self._puts_blank and not at_beginning)
            at_beginning = False

    def _encode_bytes(self, text: bytes, found: _Encoding) -> None:
        for byte in text:
            if (token := self.by_bytes.get(bytes([byte]))) is not None:
                found.add(token, found.length, is_word=True)
            found.length += 1

    def _encode_text(self, text: str, found: _Encoding, *, lead: bool) -> None:
        """Encode a text. With `lead`, encode it after a character, whose tokens are left out."""
        skipped = 0
        if lead:
            # No token contains both this character and the beginning of the text, because one of
            # the two is a line end and the other is not.
            text = (_SAMPLE if text[0] == "\n" else "\n") + text
            skipped = 1
        encoding = self._tokenizer.encode(text)
        places = _places(text)
        begin = found.length - skipped
        last_start, last_word = -1, None
        rows = zip(encoding.ids, encoding.offsets, encoding.word_ids, strict=True)
        for token, (start, end), word in rows:
            if (lead and end <= skipped) or token >= len(self.token_bytes):
                continue
            if start == last_start:
                # If several tokens make up a character, each has the character's offsets.
                found.add(token, -1, is_word=False)
                continue
            found.add(token, begin + places[start], is_word=word != last_word)
            last_start, last_word = start, word
        found.length = begin + places[-1]


def _copy(tokenizer: Tokenizer, **changes: Any) -> Tokenizer:
    """Return a copy that neither pads nor truncates, with these parts changed."""
    parts = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps(parts | {"truncation": None, "padding": None} | changes))


def _places(text: str) -> Sequence[int]:
    """Return the byte offset of each character of the text, and the text's length in bytes."""
    if text.isascii():
        return range(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = np.ones(len(points), np.int64)
    for least in (0x80, 0x800, 0x10000):
        widths += points >= least
    return [0, *np.cumsum(widths).tolist()]


class Vocabulary:
    """Maps a target's tokens, and texts, to the tokens of a draft model.

    All sequences share one object. A token of the target maps to the draft model's token with the
    same bytes. A special token maps to the special token with the same name, and the target's token
    that ends a text maps to the draft model's token that ends a text.
    """

    def __init__(self, own: TokenTable, target: TokenTable) -> None:
        """Raises OutriderError(INVALID_VALUE) if the vocabularies have too little in common."""
        self.vocab_size = len(target.token_bytes)
        pairs = _pairs(target.by_bytes, own.by_bytes)
        sizes = len(own.by_bytes), len(target.by_bytes)
        if len(pairs) < _LEAST_SHARE * min(sizes):
            message = (
                f"of the draft model's {sizes[0]} tokens only {len(pairs)} are among the target's"
                f" {sizes[1]}: too few to draft for it"
            )
            raise OutriderError(Reason.INVALID_VALUE, message, "target")
        self._special = _pairs(target.special, own.special)
        ends = [i for i in target.end_ids if self._special.get(i) in own.end_ids]
        if target.end_ids and own.end_ids and not ends:
            self._special[target.end_ids[0]] = own.end_ids[0]
        self.own_of = np.full(self.vocab_size, -1)
        """The draft model's token for each token of the target, or -1."""
        for target_id, own_id in (pairs | self._special).items():
            self.own_of[target_id] = own_id
        self.end_ids = target.end_ids
        self._own, self._target = own, target

    def begin(self, tokens: Sequence[int]) -> OwnText:
        """Return the draft model's text for these first tokens of the target's text."""
        prefix = self._target.prefix
        if list(tokens[: len(prefix)]) == prefix:
            text = OwnText(self, self._own.prefix, len(prefix))
        else:
            text = OwnText(self, [], 0)
        text.follow(tokens)
        return text

    def encode(self, tokens: Sequence[int], *, at_beginning: bool) -> _Encoding:
        """Return the draft model's tokens for the target's tokens of a text, or of a part of it.

        Both tokenizers must begin a token at the part's beginning.
        """
        found = _Encoding()
        run: list[bytes] = []
        for token in tokens:
            own = self._special.get(token)
            if own is None:
                run.append(self._target.token_bytes[token])
                continue
            self._encode_run(run, found, at_beginning=at_beginning)
            found.add(own, found.length, is_word=True)
            found.length += len(self._target.token_bytes[token])
        self._encode_run(run, found, at_beginning=at_beginning)
        return found

    def _encode_run(self, run: list[bytes], found: _Encoding, *, at_beginning: bool) -> None:
        self._own.encode(b"".join(run), found, at_beginning=at_beginning and not found.ids)
        run.clear()

    def begins(self, tokens: Sequence[int]) -> dict[int, int]:
        """Map the byte at which each of the target's tokens begins to the token's index."""
        lengths = [len(self._target.token_bytes[token]) for token in tokens]
        return {start: i for i, start in enumerate(accumulate(lengths, initial=0))}


def _pairs(first: dict[_Key, int], second: dict[_Key, int]) -> dict[int, int]:
    """Map each id in `first` to the id that has the same key in `second`, if there is one."""
    return {i: second[key] for key, i in first.items() if key in second}


def load_vocabulary(
    model: str, vocab_size: int, end_ids: tuple[int, ...], target: str
) -> Vocabulary:
    """Load the vocabulary of a draft model for a target; both are directories or hub ids.

    The draft model has logits for ids below `vocab_size`. Raises OutriderError as `load_tokenizer`,
    `end_token_ids` and `Vocabulary` do.
    """
    from outrider.grammar.tokens import token_bytes

    own = TokenTable(load_tokenizer(model), token_bytes(model)[:vocab_size], end_ids)
    spellings = token_bytes(target)
    ends = end_token_ids(target, len(spellings))
    return Vocabulary(own, TokenTable(load_tokenizer(target), spellings, ends))


class OwnText:
    """The draft model's tokens, `ids`, of a sequence's committed text.

    When the text grows, its end is encoded again. That end begins at a place where both tokenizers
    begin a token, and `ids` before the place stay as they are.
    """

    def __init__(self, vocabulary: Vocabulary, prefix: Sequence[int], skipped: int) -> None:
        """`prefix` has the draft model's tokens for the first `skipped` tokens of the target."""
        self._vocabulary = vocabulary
        self.ids = list(prefix)
        self._sure = len(prefix)
        self._sure_tokens = self._skipped = skipped
        """The next call encodes the text again from a certain place.

        `_sure` counts the draft model's tokens before this place, and `_sure_tokens` the target's.
        """

    def follow(
        self, tokens: Sequence[int], held: Sequence[int] = (), guesses: Sequence[int] = ()
    ) -> int:
        """Encode the target's `tokens`, which begin with the tokens of the previous call.

        `held` are the guesses after the previous call's text that are still right. `guesses` are
        the guesses after the present text. Returns how many of the draft model's tokens stay as
        they were. This is the number of equal tokens at the beginning of two texts: the previous
        text with `held`, and the present text with `guesses`.
        """
        before = [*self.ids[self._sure :], *self.of_guesses(held)]
        begin, begin_tokens = self._sure, self._sure_tokens
        tail = tokens[begin_tokens:]
        found = self._vocabulary.encode(tail, at_beginning=begin_tokens == self._skipped)
        self.ids[begin:] = found.ids
        self._move_on(tail, found)
        after = [*found.ids, *self.of_guesses(guesses)]
        return begin + count_equal(before, after)

    def of_guesses(self, guesses: Sequence[int]) -> list[int]:
        """Return the draft model's token for each of these tokens of the target.

        A token that the draft model lacks can only be the first token of a branch, at a place where
        few other tokens are allowed. Any token then stands for it.
        """
        return [max(0, int(self._vocabulary.own_of[token])) for token in guesses]

    def _move_on(self, tail: Sequence[int], found: _Encoding) -> None:
        """Choose the place from which the text will be encoded again; `found` encodes `tail`."""
        begins = self._vocabulary.begins(tail)
        is_common = [start in begins for start in found.starts]
        place = words = 0
        for i in range(len(found.ids) - 1, 0, -1):
            words += found.are_words[i]
            if words >= _SURE_WORDS and found.are_words[i] and is_common[i]:
                place = i
                break
        if place == 0 and len(tail) > _LONGEST_TAIL:
            common = [i for i, both in enumerate(is_common[:-_SURE_TOKENS]) if both]
            place = common[-1] if common else 0
        if place > 0:
            self._sure += place
            self._sure_tokens += begins[found.starts[place]]
        elif len(tail) > _LONGEST_TAIL:
            self._sure, self._sure_tokens = len(self.ids), self._sure_tokens + len(tail)


def count_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens at the beginning of both are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
