"""Walks random texts of a compiled grammar to their end, and checks them independently.

The backends are large and young. A text that Python's `json`, `jsonschema` or `re` contradicts
shows that the backend reads the grammar otherwise; the request is refused instead.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from outrider.errors import invalid
from outrider.grammar.backends import Compiled
from outrider.grammar.kinds import Grammar, GrammarKind

# A text is free for a few tokens and then seeks its end.
_MAX_TEXTS = 6
_MAX_TOKENS = 160
_FREE_TOKENS = 20
# CPU time of one grammar's walks and checks.
_SECONDS = 0.3


class Guard:
    """Checks compiled grammars of one tokenizer."""

    def __init__(self, token_bytes: Sequence[bytes], stop_token_ids: Sequence[int]) -> None:
        self._walker = Walker(token_bytes, stop_token_ids)

    def check(self, compiled: Compiled, grammar: Grammar) -> None:
        """Check a few random texts; raises OutriderError(INVALID_VALUE) for one that is wrong.

        `grammar` is the request's. GBNF and structural tags have no independent check.
        """
        is_right = check_of(grammar)
        if is_right is None:
            return
        deadline = time.thread_time() + _SECONDS
        for seed in range(_MAX_TEXTS):
            try:
                text = self._walker.text(compiled, random.Random(seed), deadline)
            except DeadEnd as cause:
                problem = f"cannot be enforced: nothing could follow {_shown(cause.text)}"
                raise invalid(grammar.field, problem) from cause
            if text is not None and not is_right(text):
                raise invalid(grammar.field, f"cannot be enforced: it would allow {_shown(text)}")
            if time.thread_time() > deadline:
                return


class DeadEnd(Exception):
    """A text that can neither end nor go on."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self.text = text


class Walker:
    """Writes random texts of compiled grammars."""

    def __init__(self, token_bytes: Sequence[bytes], stop_token_ids: Sequence[int]) -> None:
        self._bytes = token_bytes
        self._stops = list(stop_token_ids)
        self._kinds = np.fromiter(map(_kind, token_bytes), np.uint8, len(token_bytes))

    def text(
        self, compiled: Compiled, rng: random.Random, deadline: float = float("inf")
    ) -> bytes | None:
        """A text up to its end; None for one that finds no end within tokens or deadline.

        `deadline` is of the thread's CPU time, in seconds. Raises DeadEnd.
        """
        free = rng.randint(0, _FREE_TOKENS)
        matcher = compiled.matcher()
        found = b""
        mask = np.zeros((1, -(-len(self._bytes) // 32)), np.int32)
        for position in range(_MAX_TOKENS):
            if time.thread_time() > deadline:
                return None
            matcher.fill(mask, 0)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: len(self._bytes)])
            is_end = np.isin(allowed, self._stops)
            others = allowed[~is_end]
            if is_end.any() and (position >= free or not len(others) or rng.random() < 0.2):
                return found
            if not len(others):
                raise DeadEnd(found)
            token = self._choose(others, rng, closing=position >= free)
            if not matcher.accept(token):
                raise DeadEnd(found)
            found += self._bytes[token]
        return None

    def _choose(self, allowed: npt.NDArray[np.int64], rng: random.Random, *, closing: bool) -> int:
        """A token; with `closing` probably one that leads to the end soon."""
        if closing:
            kinds = self._kinds[allowed]
            kind = rng.choice(np.unique(kinds).tolist())
            if _CLOSING in kinds and rng.random() < 0.6:
                kind = _CLOSING
            allowed = allowed[kinds == kind]
        return int(allowed[rng.randrange(len(allowed))])


# Kinds of a token's first character.
_CLOSING, _LETTER, _DIGIT, _SPACE, _OTHER = range(5)


def _kind(text: bytes) -> int:
    first = text[:1]
    if first and first in b'"}]':
        return _CLOSING
    if first.isalpha():
        return _LETTER
    if first.isdigit():
        return _DIGIT
    return _SPACE if first.isspace() else _OTHER


def _shown(text: bytes) -> str:
    return repr(text.decode(errors="replace")[:60])


def check_of(grammar: Grammar) -> Callable[[bytes], bool] | None:
    """Says whether a text is one of the grammar's; None for grammars without such a check."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _schema_check(json.loads(grammar.text))
        case GrammarKind.JSON_OBJECT:
            return _schema_check({"type": "object"})
        case GrammarKind.REGEX:
            pattern = re.compile(grammar.text)
            return lambda text: pattern.fullmatch(_decoded(text)) is not None
        case GrammarKind.CHOICE:
            return lambda text: _decoded(text) in grammar.choices
        case _:
            return None


def _schema_check(schema: Any) -> Callable[[bytes], bool]:
    kind = validator_for(schema, default=Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)

    def is_right(text: bytes) -> bool:
        try:
            value = json.loads(_decoded(text))
        except ValueError:
            return False
        return bool(validator.is_valid(value))

    return is_right


def _decoded(text: bytes) -> str:
    """The text; one that is no UTF-8 gives a lone surrogate, which no grammar allows."""
    return text.decode(errors="surrogateescape")
