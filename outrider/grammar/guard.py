"""Writes random texts of a compiled grammar up to their end, and checks them independently.

LLGuidance is large and young. If Python's `json`, `jsonschema` or `re` rejects a text that
LLGuidance allows, LLGuidance interprets the grammar differently, and the request is refused.
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

from outrider.errors import invalid
from outrider.grammar.backends import Compiled
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.schema_versions import draft_of, validator

# The first tokens of a text are chosen freely; later tokens are chosen to end it.
_MAX_TEXTS = 6
_MAX_TOKENS = 160
_FREE_TOKENS = 20
# CPU time of one grammar's walks and checks, after which the worker is killed. Texts that were not
# checked by then stay unchecked: the guard finds mistakes of the backends, and a grammar that keeps
# the guard busy harms only its own request.
GUARD_SECONDS = 0.3
# After this CPU time no text is begun or continued.
_SECONDS = 0.25


class Guard:
    """Checks compiled grammars of one tokenizer."""

    def __init__(self, token_bytes: Sequence[bytes], stop_token_ids: Sequence[int]) -> None:
        self._walker = Walker(token_bytes, stop_token_ids)

    def check(self, compiled: Compiled, grammar: Grammar) -> None:
        """Check a few random texts.

        Raises OutriderError(INVALID_VALUE) for a wrong text or a dead end. `grammar` is the
        request's grammar, not a translation. GBNF and structural tags have no independent check.
        After 0.25 s of CPU time no text is begun or continued, but the check of a single text may
        never end.
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
    """The random text can neither end nor go on."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self.text = text


class Walker:
    """Writes random texts of compiled grammars."""

    def __init__(self, token_bytes: Sequence[bytes], stop_token_ids: Sequence[int]) -> None:
        self._bytes = token_bytes
        kinds = np.fromiter(map(_kind, token_bytes), np.uint8, len(token_bytes))
        kinds[list(stop_token_ids)] = _END
        # Each kind has a bit for each token, as in a mask. To look at each token of a large
        # vocabulary by itself would take longer than to compute the mask.
        self._of_kind = [self._packed(kinds == kind) for kind in range(_END + 1)]
        self._rest = self._packed(kinds != _END)

    def _packed(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
        bits = np.zeros(-(-len(self._bytes) // 32) * 32, np.bool_)
        bits[: len(chosen)] = chosen
        return np.packbits(bits, bitorder="little")

    def text(
        self, compiled: Compiled, rng: random.Random, deadline: float = float("inf")
    ) -> bytes | None:
        """Return a text up to its end; None if it has no end within `_MAX_TOKENS` and `deadline`.

        `deadline` is a value of the thread's CPU time, in seconds. Raises DeadEnd.
        """
        free = rng.randint(0, _FREE_TOKENS)
        matcher = compiled.matcher()
        found = b""
        mask = np.zeros((1, -(-len(self._bytes) // 32)), np.int32)
        for position in range(_MAX_TOKENS):
            if time.thread_time() > deadline:
                return None
            matcher.fill(mask, 0)
            allowed = mask[0].view(np.uint8)
            may_go_on = (allowed & self._rest).any()
            may_end = (allowed & self._of_kind[_END]).any()
            if may_end and (position >= free or not may_go_on or rng.random() < 0.2):
                return found
            if not may_go_on:
                raise DeadEnd(found)
            token = self._choose(allowed, rng, closing=position >= free)
            if not matcher.accept(token):
                raise DeadEnd(found)
            found += self._bytes[token]
        return None

    def _choose(self, allowed: npt.NDArray[np.uint8], rng: random.Random, *, closing: bool) -> int:
        """Draw a token that does not end the text; `closing` prefers tokens such as brackets."""
        wanted = self._rest
        if closing:
            of_kind = self._of_kind[:_END]
            present = [kind for kind, bits in enumerate(of_kind) if (allowed & bits).any()]
            kind = rng.choice(present)
            if _CLOSING in present and rng.random() < 0.6:
                kind = _CLOSING
            wanted = of_kind[kind]
        bits = np.unpackbits(allowed & wanted, bitorder="little")
        # With booleans, `flatnonzero` is several times as fast as with bytes.
        tokens = np.flatnonzero(bits.view(np.bool_))
        return int(tokens[rng.randrange(len(tokens))])


# Kinds of tokens: by their first character, and tokens that end a text.
_CLOSING, _LETTER, _DIGIT, _SPACE, _OTHER, _END = range(6)


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


def has_check(grammar: Grammar) -> bool:
    """Return whether texts of the grammar can be checked independently."""
    return grammar.kind not in (GrammarKind.EBNF, GrammarKind.STRUCTURAL_TAG)


def check_of(grammar: Grammar) -> Callable[[bytes], bool] | None:
    """Return a function that says whether the grammar allows a text; None without such a check."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _schema_check(json.loads(grammar.text), grammar.field)
        case GrammarKind.JSON_OBJECT:
            return _schema_check({"type": "object"}, grammar.field)
        case GrammarKind.REGEX:
            pattern = re.compile(grammar.text)
            return lambda text: pattern.fullmatch(_decoded(text)) is not None
        case GrammarKind.CHOICE:
            return lambda text: _decoded(text) in grammar.choices
        case _:
            return None


def _schema_check(schema: Any, field: str) -> Callable[[bytes], bool]:
    checks = validator(schema, draft_of(schema, field))

    def is_right(text: bytes) -> bool:
        try:
            value = json.loads(_decoded(text))
        except ValueError:
            return False
        return bool(checks.is_valid(value))

    return is_right


def _decoded(text: bytes) -> str:
    """Return the decoded text. Invalid UTF-8 gives a lone surrogate, which no grammar allows."""
    return text.decode(errors="surrogateescape")
