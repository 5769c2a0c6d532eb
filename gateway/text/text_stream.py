"""Decodes token ids to text incrementally, in whole characters, and finds stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.token_table import REPLACEMENT, TokenTable
from gateway.tools.reader import AnswerReader, Content, Part, Reading

# An unfinished UTF-8 character has at most 3 bytes. A decoder shows each of these bytes as a
# replacement character.
_UNSURE_CHARACTERS = 3
# The maximum number of tokens that wait for the end of a character. Decoders of byte tokens show a
# whole run of byte tokens as replacement characters until the run's last character is complete.
_LONGEST_WAIT = 128
_BORDER_SEARCH = 8
# An answer's first token is decoded after at most this many of the prompt's last tokens that have
# text. The decoder looks for these tokens among the prompt's last `_PROMPT_SEARCH` tokens.
_PROMPT_CONTEXT = 8
_PROMPT_SEARCH = 1024


class Detokenizer:
    """Decodes a growing sequence of ids without splitting a character.

    A push decodes only the new tokens, the tokens that are held back and, as context, the last
    tokens whose text was returned. So its cost does not grow with the text.
    `tokenizers.decoders.DecodeStream` also decodes in this way, but raises on invalid UTF-8 and
    cannot return the text that it holds back.
    """

    def __init__(
        self,
        table: TokenTable,
        hidden: frozenset[int] | None = None,
        *,
        prompt: Sequence[int] = (),
        within: bool = False,
    ) -> None:
        """Start after the ids of a prompt. The prompt's text is not returned.

        If the prompt ends within a character, the first returned text has the whole character.
        `hidden` are the tokens without text; by default all special tokens. `within` keeps a first
        space, which the decoder would strip after a prompt without text.
        """
        self._table = table
        self._hidden = table.hidden_ids() if hidden is None else hidden
        recent = [index for index in prompt[-_PROMPT_SEARCH:] if index not in self._hidden]
        self._tail = recent[-_PROMPT_CONTEXT:]
        while self._tail and not table.begins_character(self._tail[0]):
            del self._tail[0]
        # True if there is text before the tail.
        self._within = within or len(recent) > len(self._tail) or len(prompt) > _PROMPT_SEARCH
        # The number of tokens at the tail's start whose text has been returned. They stay as the
        # context of the later tokens.
        self._context = table.whole_characters(self._tail)
        # The number of characters of the tail's text that have been returned.
        self._sent = len(self._decode(self._tail[: self._context]))

    def text_and_bytes(self, token_id: int) -> tuple[str, bytes]:
        """Return text and bytes of a token that comes next. Part of a character shows as U+FFFD."""
        if self._within or self._sent or self._decode(self._tail):
            return self._table.text_and_bytes(token_id)
        return self._table.first_text_and_bytes(self._tail, token_id)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the new text. Part of a character is held back."""
        added = [index for index in token_ids if index not in self._hidden]
        if not added:
            return ""
        self._tail += added
        text = self._decode(self._tail)
        if not text.endswith(REPLACEMENT):
            return self._release(text)
        if len(self._tail) - self._context <= _LONGEST_WAIT:
            return ""
        return self._release_most(text)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._decode(self._tail)[self._sent :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        # Hidden tokens have been left out before.
        if self._within:
            return self._table.decode_within(token_ids)
        return self._table.decode(token_ids, skip_special_tokens=False)

    def _release(self, text: str) -> str:
        """Return the rest of the tail's text. The tail's newest tokens stay as context."""
        new = text[self._sent :]
        if new:
            self._within = self._within or self._context > 0
            del self._tail[: self._context]
            self._context = len(self._tail)
            self._sent = len(self._decode(self._tail))
        return new

    def _release_most(self, text: str) -> str:
        """Return the text of a long run of invalid bytes without its end, and drop most tokens."""
        certain = max(self._sent, len(text.rstrip(REPLACEMENT)), len(text) - _UNSURE_CHARACTERS)
        new = text[self._sent : certain]
        self._sent = certain
        for cut in range(len(self._tail) - 1, len(self._tail) - _BORDER_SEARCH, -1):
            head = self._decode(self._tail[:cut])
            # If the two parts together decode to the whole text, the cut splits no character.
            if len(head) <= certain and head + self._table.decode_within(self._tail[cut:]) == text:
                del self._tail[:cut]
                self._within = True
                self._context = 0
                self._sent = certain - len(head)
                break
        return new


class TokenOffsets:
    """Finds where the tokens of a text begin, in characters.

    All tokens that are parts of one character begin where the character begins.
    """

    def __init__(
        self,
        table: TokenTable,
        at: int = 0,
        text: str = "",
        *,
        prompt: Sequence[int] = (),
        within: bool = False,
    ) -> None:
        """`at` is where the first token begins, after the ids of `prompt`; see `Detokenizer`.

        Special tokens have no length, except where `text`, if it is known, has their names.
        """
        self._table = table
        self._at = at
        self._text = text
        self._detokenizer = Detokenizer(table, prompt=prompt, within=within)

    def text_and_bytes(self, token_id: int) -> tuple[str, bytes]:
        """Return text and bytes of a token that comes next. Part of a character shows as U+FFFD."""
        return self._detokenizer.text_and_bytes(token_id)

    def push(self, token_id: int) -> int:
        """Return where the next token begins."""
        begin = self._at
        if not self._table.is_special(token_id):
            self._at += len(self._detokenizer.push([token_id]))
            return begin
        name = self._table.token_text(token_id)
        if self._text.startswith(name, begin):
            self._at += len(name)
            self._detokenizer = Detokenizer(self._table, within=True)
        return begin


class StopScanner:
    """Finds the first complete stop string. If several end at one place, it finds the longest.

    The result therefore does not depend on how the text is cut into chunks. Text that may begin a
    stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._starts = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        self._longest_start = max((len(stop) - 1 for stop in stops), default=0)
        self._held = ""
        # The number of held characters that are too early: no stop string may end in them.
        self._early = 0
        self.found = ""
        """The stop string that was found, after which nothing follows; "" before."""

    def push(self, text: str, *, early: bool = False) -> str:
        """Add text, and return the text in which no stop string can begin.

        No stop string ends in `early` text, but a stop string that begins there may end later.
        """
        text = self._held + text
        hits = [] if early else self._hits(text)
        if hits:
            end, begin = min(hits)
            self.found = text[begin:end]
            self._held = ""
            return text[:begin]
        longest = min(self._longest_start, len(text))
        lengths = (n for n in range(longest, 0, -1) if text[-n:] in self._starts)
        certain = len(text) - next(lengths, 0)
        self._held = text[certain:]
        self._early = len(self._held) if early else max(self._early - certain, 0)
        return text[:certain]

    def _hits(self, text: str) -> list[tuple[int, int]]:
        """Return (end, begin) of each stop string's first occurrence that ends after early text."""
        found = []
        for stop in self._stops:
            at = text.find(stop, max(self._early - len(stop) + 1, 0))
            if at >= 0:
                found.append((at + len(stop), at))
        return found

    def finish(self) -> str:
        """Return the text that was held back."""
        held = self._held
        self._held = ""
        return held


class TextStream:
    """The answer of one sequence, decoded and cut before the first stop string of its content.

    As in vLLM, the first `min_tokens` tokens complete no stop string.
    """

    def __init__(
        self,
        table: TokenTable,
        stops: Sequence[str],
        min_tokens: int = 0,
        reading: Reading | None = None,
        *,
        prompt: Sequence[int] = (),
        within: bool = False,
    ) -> None:
        """`reading` says what the answer may hold besides content; None if only content.

        The answer comes after the ids of `prompt`; `Detokenizer` explains `within`.
        """
        hidden = None if reading is None else table.hidden_ids(reading.literals)
        self._detokenizer = Detokenizer(table, hidden, prompt=prompt, within=within)
        self._reader = None if reading is None else AnswerReader(reading)
        self._min_tokens = min_tokens
        self._scanner = StopScanner(stops)
        self._by_token = bool(stops)
        self.token_count = 0
        """The number of tokens pushed, up to the token that completed a stop string."""

    @property
    def stop(self) -> str:
        """The stop string that was found; "" before."""
        return self._scanner.found

    @property
    def stopped(self) -> bool:
        """True if a stop string was found. Then nothing follows."""
        return bool(self.stop)

    @property
    def call_count(self) -> int:
        """The number of tool calls that have started."""
        return 0 if self._reader is None else self._reader.call_count

    def push(self, token_ids: Sequence[int]) -> list[Part]:
        """Add tokens, and return the new parts of the answer.

        With stop strings, tokens are decoded one by one to know which token completes a stop
        string.
        """
        if not self._by_token:
            self.token_count += len(token_ids)
            return self._split(self._detokenizer.push(token_ids))
        parts: list[Part] = []
        for token_id in token_ids:
            self.token_count += 1
            parts += self._scan(self._split(self._detokenizer.push([token_id])))
            if self.stopped:
                break
        return parts

    def finish(self) -> list[Part]:
        """Return the parts that were held back.

        Call it once, after the last token, unless `stopped`.
        """
        parts = self._split(self._detokenizer.finish())
        if self._reader is not None:
            parts += self._reader.finish()
        parts = self._scan(parts)
        held = "" if self.stopped else self._scanner.finish()
        return [*parts, Content(held)] if held else parts

    def _split(self, text: str) -> list[Part]:
        if self._reader is not None:
            return self._reader.push(text)
        return [Content(text)] if text else []

    def _scan(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts before the first stop string in content.

        A stop string does not go on across another part, such as a call.
        """
        early = self.token_count <= self._min_tokens
        scanned: list[Part] = []
        for part in parts:
            if isinstance(part, Content):
                text = self._scanner.push(part.text, early=early)
            else:
                text = self._scanner.finish()
            if text:
                scanned.append(Content(text))
            if self.stopped:
                break
            if not isinstance(part, Content):
                scanned.append(part)
        return scanned
