"""Checks and compiles a grammar, and tries it out. Runs in a worker process for untrusted ones."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import numpy as np

from outrider.errors import OutriderError, invalid
from outrider.grammar.backends import Compiled, Library, Matcher
from outrider.grammar.checks import check
from outrider.grammar.kinds import Grammar

# A trial computes masks along a text of this many tokens, within this CPU time. An ambiguous
# grammar compiles at once but may take seconds for a mask.
_TRIAL_TOKENS = 16
_TRIAL_SECONDS = 0.8


def compile_checked(
    library: Library, grammar: Grammar, vocab_size: int, stop_token_ids: Sequence[int]
) -> Compiled:
    """Check, compile and try out a grammar.

    Raises OutriderError(INVALID_VALUE) that names the field for a grammar that is invalid, that
    cannot be enforced, that allows no text, or whose masks take too long.
    """
    check(grammar)
    compiled = compile_only(library, grammar)
    try:
        _try_out(compiled.matcher(), grammar.field, vocab_size, stop_token_ids)
    except OutriderError:
        raise
    # Each library has its own exceptions, and all of them are about the grammar.
    except Exception as cause:
        raise _refused(grammar, cause) from cause
    return compiled


def compile_only(library: Library, grammar: Grammar) -> Compiled:
    """Compile a grammar that was checked; raises OutriderError(INVALID_VALUE) if that fails."""
    try:
        return library.compile(grammar)
    except (OutriderError, MemoryError):
        raise
    except Exception as cause:
        raise _refused(grammar, cause) from cause


def _refused(grammar: Grammar, cause: Exception) -> OutriderError:
    return invalid(grammar.field, f"cannot be compiled: {_readable(cause)}")


def _readable(cause: Exception) -> str:
    """The first line of a library's message, without time stamp and file."""
    line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", line)[:300]


def _try_out(matcher: Matcher, field: str, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
    """Write a short random text.

    Raises OutriderError(INVALID_VALUE) if the grammar allows none or its masks take too long.
    """
    mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
    choose = np.random.default_rng(0)
    seconds = 0.0
    for position in range(_TRIAL_TOKENS):
        # The thread's CPU time, so that a busy machine makes no difference.
        started = time.thread_time()
        matcher.fill(mask, 0)
        seconds += time.thread_time() - started
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if position == 0 and not len(allowed):
            raise invalid(field, "allows no text at all")
        if seconds > _TRIAL_SECONDS:
            limit = 1000 * _TRIAL_SECONDS / _TRIAL_TOKENS
            slow = f"masks for its tokens take longer than {limit:.0f} ms each"
            raise invalid(field, f"can be read in too many ways: {slow}")
        allowed = allowed[~np.isin(allowed, list(stop_token_ids))]
        if not len(allowed) or not matcher.accept(int(choose.choice(allowed))):
            return
