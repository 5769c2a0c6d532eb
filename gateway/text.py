"""Token ids to text as they come: whole characters only, and stop strings found across chunk borders. Knows no request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# Of a UTF-8 character that lacks its end, at most 3 bytes can have come, and a decoder shows each as one replacement character.
_UNSURE_CHARACTERS = 3
# Tokens that may wait for the end of a character. A chunk can be long, and decoders of byte tokens show a whole run of them as
# replacement characters until the last character of the run is complete.
_LONGEST_WAIT = 128
_BORDER_SEARCH = 8
# How tokenizers write a byte that is no text: with a token of its own (sentencepiece's byte fallback), or, in byte-level ones, each
# byte as a letter. The letters are GPT-2's: a byte that prints stands for itself, the others for the letters from 256 on.
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_PRINTED = [
    *range(ord("!"), ord("~") + 1),
    *range(ord("¡"), ord("¬") + 1),
    *range(ord("®"), ord("ÿ") + 1),
]
_BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTED}
_BYTE_OF_LETTER |= {
    chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)
}


class TokenTable:
    """A tokenizer for decoding, with its special tokens, which are no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )

    def text_ids(self, token_ids: Sequence[int]) -> list[int]:
        """The ids that stand for text."""
        return [index for index in token_ids if index not in self._special]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def piece(self, token_id: int) -> str:
        """One token alone, special ones by their names; part of a character shows as a replacement character."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def piece_and_bytes(self, token_id: int) -> tuple[str, bytes]:
        """One token alone, and its bytes, which may be part of a character; those of byte-level tokenizers join to the text's."""
        text = self.piece(token_id)
        return text, self._partial(token_id, text) if _REPLACEMENT in text else text.encode()

    def _partial(self, token_id: int, text: str) -> bytes:
        """The bytes of a token whose text cannot show them, by its name."""
        name: str = self._tokenizer.id_to_token(token_id) or ""
        if _BYTE_TOKEN.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        letters = [_BYTE_OF_LETTER.get(letter) for letter in name]
        known = [byte for byte in letters if byte is not None]
        return bytes(known) if name and len(known) == len(letters) else text.encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


class Detokenizer:
    """Decodes a growing sequence of ids without ever splitting a character.

    Only the tokens since the last whole character but one are decoded again, so the cost of a push does not grow with the text.
    (`tokenizers.decoders.DecodeStream` does the same, but raises on bytes that are no UTF-8 and cannot give out its rest.)
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._tail: list[int] = []
        self._context = 0  # leading tokens of the tail that are there only to decode the others in their context
        self._sent = 0  # characters of the tail's text that were given out

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now; what may be half a character is held back."""
        added = self._table.text_ids(token_ids)
        if not added:
            return ""
        self._tail += added
        text = self._table.decode(self._tail)
        if not text.endswith(_REPLACEMENT):
            return self._release(text)
        if len(self._tail) - self._context <= _LONGEST_WAIT:
            return ""
        return self._release_most(text)

    def finish(self) -> str:
        """What was held back."""
        return self._table.decode(self._tail)[self._sent :]

    def _release(self, text: str) -> str:
        """All of the tail's text; its newest tokens stay as the context of the next."""
        piece = text[self._sent :]
        if piece:
            del self._tail[: self._context]
            self._context, self._sent = len(self._tail), len(self._table.decode(self._tail))
        return piece

    def _release_most(self, text: str) -> str:
        """A long run of bytes that form no characters: give out all but its end, and forget it up to a border near its end."""
        certain = max(self._sent, len(text.rstrip(_REPLACEMENT)), len(text) - _UNSURE_CHARACTERS)
        piece, self._sent = text[self._sent : certain], certain
        for cut in range(len(self._tail) - 1, len(self._tail) - _BORDER_SEARCH, -1):
            head = self._table.decode(self._tail[:cut])
            # Decoded apart both halves give the same text: the cut splits no character, now or later.
            if len(head) <= certain and head + self._table.decode(self._tail[cut:]) == text:
                del self._tail[:cut]
                self._context, self._sent = 0, certain - len(head)
                break
        return piece


class TokenOffsets:
    """Where in a text its tokens begin, in characters; those that form a character together all begin where it does."""

    def __init__(self, table: TokenTable, at: int = 0, text: str = "") -> None:
        """`at` is where the first begins. Special tokens take no room, but where `text`, if it is known, has their names."""
        self._table = table
        self._at = at
        self._text = text
        self._detokenizer = Detokenizer(table)

    def push(self, token_id: int) -> int:
        """Where the next token begins."""
        begin = self._at
        if not self._table.is_special(token_id):
            self._at += len(self._detokenizer.push([token_id]))
        elif self._text.startswith(name := self._table.piece(token_id), begin):
            self._at += len(name)
        return begin


class StopScanner:
    """Finds the stop string that is complete first; of those that end at the same character, the longest.

    So the result does not depend on how the text is cut into chunks. Text that may be the start of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._starts = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        self._longest_start = max((len(stop) - 1 for stop in stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string."""
        text = self._held + text
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self.stopped, self._held = True, ""
            return text[: min(hits)[1]]
        held = next(
            (
                n
                for n in range(min(self._longest_start, len(text)), 0, -1)
                if text[-n:] in self._starts
            ),
            0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one sequence: detokenised, and cut before the first stop string."""

    def __init__(self, table: TokenTable, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(table)
        self._scanner = StopScanner(stops)
        self._by_token = bool(stops)
        self.token_count = 0
        """Tokens taken in; when a stop string was found, up to the one that completed it."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; then no text follows."""
        return self._scanner.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now. With stop strings tokens are taken one by one, to know which of them completed one."""
        if not self._by_token:
            self.token_count += len(token_ids)
            return self._detokenizer.push(token_ids)
        pieces = []
        for token_id in token_ids:
            self.token_count += 1
            pieces.append(self._scanner.push(self._detokenizer.push([token_id])))
            if self.stopped:
                break
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back; call it once, when no token follows and no stop string was found."""
        text = self._scanner.push(self._detokenizer.finish())
        return text if self.stopped else text + self._scanner.finish()
