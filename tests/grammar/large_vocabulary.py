"""Writes a tokenizer with 128 thousand tokens, as many as large models have.

The tokenizer is byte-level BPE. Its tokens are all bytes, numbers, white space, punctuation, words
of syllables with and without a space in front, and characters of two and three bytes. The other
tokens are random merges. A seed decides the tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Llama 3 has this many tokens; the last 256 are special.
TOKENS = 128_256
SPECIAL = 256
END = TOKENS - SPECIAL
_WORDS = 7_000
_MIXED = 16_000
_CHARACTERS = 12_000
_LONGEST = 16
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_COMMON = """
the of and to in is that for it as with on be at by this from or an are not have was but you
name type value id true false null string number object array items properties title text
date time user email address city country price count total status error message data list
"""


def write(folder: Path, seed: int = 0) -> None:
    """Write the tokenizer's files; the end of text is the token END."""
    vocabulary = _Vocabulary()
    rng = random.Random(seed)
    _add_text(vocabulary, rng)
    _add_merges(vocabulary, rng)
    named = _names()

    def name(token: bytes) -> str:
        return "".join(named[byte] for byte in token)

    ids = {name(token): number for number, token in enumerate(vocabulary.tokens)}
    pairs = [(name(left), name(right)) for left, right in vocabulary.merges]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = [f"<|special_{number}|>" for number in range(SPECIAL)]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ends])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class _Vocabulary:
    """The tokens in the order of their ids, and the merge that makes each token."""

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.merges: list[tuple[bytes, bytes]] = []
        self._known = set(self.tokens)

    def add(self, text: str) -> None:
        """Add a text byte by byte, so that its beginnings are tokens too."""
        token = text.encode()
        for end in range(2, len(token) + 1):
            self.merge(token[: end - 1], token[end - 1 : end])

    def merge(self, left: bytes, right: bytes) -> None:
        """Add a token made of two others, unless it is there or the vocabulary is full."""
        token = left + right
        if token not in self._known and len(self.tokens) < END and len(token) <= _LONGEST:
            self._known.add(token)
            self.tokens.append(token)
            self.merges.append((left, right))


def _add_text(vocabulary: _Vocabulary, rng: random.Random) -> None:
    for number in range(1000):
        vocabulary.add(f"{number:03}")
        vocabulary.add(str(number))
    for space in (" ", "\t", "\n", "\r\n"):
        vocabulary.add(space * _LONGEST)
        vocabulary.add("\n" + space * _LONGEST)
    for word in [*_COMMON.split(), *_distinct(_WORDS, lambda: _word(rng))]:
        for text in (" " + word, word, word.capitalize(), " " + word.capitalize()):
            if rng.random() < 0.6:
                vocabulary.add(text)
    for _ in range(_MIXED):
        marks = "".join(rng.choices(_PUNCTUATION, k=rng.randint(1, 4)))
        vocabulary.add(rng.choice(("", " ")) + marks + rng.choice(("", "", "\n", "\t", " ")))
    for _ in range(_CHARACTERS):
        first = rng.choice((0xC0, 0x400, 0x600, 0x900, 0x3040, 0x4E00, 0x4E00, 0xAC00))
        vocabulary.add("".join(chr(first + rng.randrange(200)) for _ in range(rng.randint(1, 3))))


def _add_merges(vocabulary: _Vocabulary, rng: random.Random) -> None:
    while len(vocabulary.tokens) < END:
        vocabulary.merge(rng.choice(vocabulary.tokens), rng.choice(vocabulary.tokens))


def _distinct(count: int, make: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make()] = None
    return list(found)


def _word(rng: random.Random) -> str:
    return "".join(
        rng.choice(
            ("b", "br", "c", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "st", "t", "w")
        )
        + rng.choice("aeiou")
        + rng.choice(("", "", "n", "r", "s", "ng"))
        for _ in range(rng.choices((1, 2, 3, 4), (1, 4, 3, 1))[0])
    )


def _names() -> dict[int, str]:
    """Return the printable character that stands for each byte, as in GPT-2."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    found: dict[int, str] = {}
    for byte in range(256):
        found[byte] = (
            chr(byte) if byte in printable else chr(256 + byte - len(printable & {*range(byte)}))
        )
    return found
