"""Maps a tokenizer's tokens to texts and bytes, alone or within a text."""

from __future__ import annotations

import codecs
import re
import string
from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
"""Decoders show this in place of bytes that are not a character."""
# Tokenizers have two ways to name a byte that is no text: a special name (the byte fallback of
# sentencepiece), or a letter (byte-level tokenizers). The letters are GPT-2's: a printable byte is
# its own letter, and the other bytes are the code points from 256 on.
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_PRINTED = [
    *range(ord("!"), ord("~") + 1),
    *range(ord("¡"), ord("¬") + 1),
    *range(ord("®"), ord("ÿ") + 1),
]
_UNPRINTED = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTED}
_BYTE_OF_LETTER |= {chr(256 + i): byte for i, byte in enumerate(_UNPRINTED)}
# An unfinished last character, and the character before it, begin within the last 8 tokens of a
# text.
_CHARACTER_TOKENS = 8
# The number of tokens among which a word is sought if no token is a single letter or digit.
_SEARCHED = 4096


class TokenTable:
    """A tokenizer for decoding, with a list of its special tokens.

    Many decoders (sentencepiece's) strip a space from the start of a text, so a token's text at the
    start differs from its text within a text. Tokens within a text are decoded after a plain word.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        # Keyed by the argument of `hidden_ids`; a gateway has few different values.
        self._hidden: dict[tuple[str, ...], frozenset[int]] = {}
        # A list of log probabilities names thousands of tokens, mostly the same tokens each time.
        self._known: dict[int, tuple[str, bytes]] = {}
        self._before = self._plain_word()
        self._before_length = len(self.decode(self._before))

    def _plain_word(self) -> list[int]:
        """Return a list with one token of only letters or digits; empty if the tokenizer has none.

        The text of such a token does not depend on the token after it.
        """
        letters = map(self._tokenizer.token_to_id, string.ascii_letters + string.digits)
        for index in (*letters, *range(min(_SEARCHED, self._tokenizer.get_vocab_size()))):
            if index is None or index in self._special:
                continue
            is_byte = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(index) or "")
            text = self.token_text(index)
            if not is_byte and text.isascii() and text.isalnum():
                return [index]
        return []

    def hidden_ids(self, shown: Sequence[str] = ()) -> frozenset[int]:
        """Return the special tokens without text: tokens whose name is in no text of `shown`."""
        known = self._hidden.get(tuple(shown))
        if known is None:
            names = {index: self.token_text(index) for index in self._special}
            known = frozenset(
                index for index, name in names.items() if not any(name in text for text in shown)
            )
            self._hidden[tuple(shown)] = known
        return known

    def is_special(self, token_id: int) -> bool:
        """True if the token is special, such as an end-of-sequence token; see also `hidden_ids`."""
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        """Return a token's text: for a special token its name, for part of a character U+FFFD."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def text_and_bytes(self, token_id: int) -> tuple[str, bytes]:
        """Return a token's text within a text, and its bytes, which may be part of a character.

        Joined, the bytes of a text's tokens are the text's bytes, except for a first token; see
        `first_text_and_bytes`.
        """
        known = self._known.get(token_id)
        if known is None:
            special = self.is_special(token_id)
            text = self.token_text(token_id) if special else self.decode_within([token_id])
            known = self._known[token_id] = text, self._bytes(token_id, text)
        return known

    def first_text_and_bytes(self, before: Sequence[int], token_id: int) -> tuple[str, bytes]:
        """Return `text_and_bytes` at a text's start, where the tokens `before` have no text."""
        text = self.decode([*before, token_id], skip_special_tokens=False)
        return text, self._bytes(token_id, text)

    def _bytes(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token.

        If `text`, the token's text, has incomplete characters, the bytes come from the token's
        name.
        """
        if REPLACEMENT not in text:
            return text.encode()
        name: str = self._tokenizer.id_to_token(token_id) or ""
        if _BYTE_TOKEN.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        letters = [_BYTE_OF_LETTER.get(letter) for letter in name]
        known = [byte for byte in letters if byte is not None]
        if name and len(known) == len(letters):
            return bytes(known)
        return text.encode()

    def whole_characters(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens come before the tokens of an unfinished last character."""
        last = [self.text_and_bytes(token_id)[1] for token_id in token_ids[-_CHARACTER_TOKENS:]]
        count = len(token_ids)
        # A token may end one character and begin the next.
        while last and _ends_within(b"".join(last)):
            del last[-1]
            count -= 1
        return count

    def begins_character(self, token_id: int) -> bool:
        """True if a character begins at the token's first byte."""
        first = self.text_and_bytes(token_id)[1][:1]
        return not b"\x80" <= first < b"\xc0"

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the ids' text, without special tokens unless `skip_special_tokens` is false."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_within(self, token_ids: Sequence[int]) -> str:
        """Return the text that the ids add after other text, with the names of special tokens."""
        text: str = self._tokenizer.decode([*self._before, *token_ids], skip_special_tokens=False)
        return text[self._before_length :]


def _ends_within(text: bytes) -> bool:
    """Return whether the text ends within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return bool(decoder.getstate()[0])
