"""Translates, compiles and tries out a grammar.

For the grammars of requests, a worker process does this.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.errors import OutriderError, invalid
from outrider.grammar.backends import Compiled, Libraries, MaskLimit, Matcher, too_expensive
from outrider.grammar.dialect import translate
from outrider.grammar.guard import Guard
from outrider.grammar.kinds import Grammar

# A trial computes masks along a text of at most `_TRIAL_TOKENS` tokens. The masks together may take
# `_TRIAL_SECONDS` of CPU time. An ambiguous grammar compiles at once but may take seconds for a
# mask.
_TRIAL_TOKENS = 16
_TRIAL_SECONDS = 0.8
# Maps the beginnings of some of LLGuidance's messages to our words. These messages do not spell out
# the keyword at fault, or they recommend an option of LLGuidance that a caller cannot set.
_PROBLEMS = {
    "oneOf constraints": "it has oneOf whose schemas may overlap; use anyOf",
    "patternProperty regexes": "it has patternProperties that may match the same name",
    "min/maxProperties": "it has minProperties or maxProperties beside optional properties",
    "circular references": "it has $ref beside other keywords in a circle of references",
}


class Trial:
    """Tries grammars for one tokenizer; `vocab_size` is the logits' width."""

    def __init__(
        self, libraries: Libraries, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> None:
        self._libraries = libraries
        self._vocab_size = vocab_size
        self._stops = stop_token_ids
        self._guard = Guard(libraries.token_bytes, stop_token_ids)
        self._last: tuple[Grammar, Compiled] | None = None

    def translated(self, grammar: Grammar) -> Grammar:
        """Translate, compile and try out a grammar; return the translated grammar.

        Raises OutriderError(INVALID_VALUE) that names the field for a grammar that is invalid, that
        cannot be enforced, that allows no text, or whose masks take too long.
        """
        found = translate(grammar, self._libraries.specials)
        compiled = compile_only(self._libraries, found)
        if grammar.thought is not None:
            compiled = self._answer(grammar)
        try:
            _try_out(compiled.matcher(), grammar.field, self._vocab_size, self._stops)
        except OutriderError:
            raise
        except MaskLimit as cause:
            raise too_expensive(grammar) from cause
        # All other exceptions come from LLGuidance, and are caused by the grammar.
        except Exception as cause:
            raise _refused(grammar, cause) from cause
        self._last = grammar, compiled
        return found

    def check_texts(self, grammar: Grammar) -> None:
        """Check random texts of a grammar that `translated` has accepted.

        A pattern may make the check of one text endless: run the check in a process that can be
        killed. Raises OutriderError(INVALID_VALUE) that names the field.
        """
        last, self._last = self._last, None
        is_known = last is not None and last[0] == grammar
        compiled = last[1] if last is not None and is_known else self._answer(grammar)
        try:
            self._guard.check(compiled, grammar)
        except OutriderError:
            raise
        except MaskLimit as cause:
            raise too_expensive(grammar) from cause
        # jsonschema's messages quote what a reference leads to, so none of them is passed on.
        except Exception as cause:
            problem = f"cannot be enforced: its texts cannot be checked ({type(cause).__name__})"
            raise invalid(grammar.field, problem) from cause

    def _answer(self, grammar: Grammar) -> Compiled:
        """Compile the grammar without its thought: random tokens would hardly ever end it."""
        alone = replace(grammar, thought=None)
        return compile_only(self._libraries, translate(alone, self._libraries.specials))


def compile_only(libraries: Libraries, grammar: Grammar) -> Compiled:
    """Compile a translated grammar; raise OutriderError(INVALID_VALUE) if that fails."""
    try:
        return libraries.compile(grammar)
    except (OutriderError, MemoryError):
        raise
    except Exception as cause:
        raise _refused(grammar, cause) from cause


def _refused(grammar: Grammar, cause: Exception) -> OutriderError:
    return invalid(grammar.field, f"cannot be compiled: {_readable(cause)}")


def _readable(cause: Exception) -> str:
    """Return the first line of LLGuidance's message, without its place in the translation."""
    line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    line = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", line)
    for begin, problem in _PROBLEMS.items():
        if line.startswith(begin):
            return problem
    return line[:300]


def _try_out(matcher: Matcher, field: str, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
    """Write a short random text.

    Raises OutriderError(INVALID_VALUE) if the grammar allows no text or its masks take too long.
    """
    mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
    choose = np.random.default_rng(0)
    seconds = 0.0
    for position in range(_TRIAL_TOKENS):
        # The CPU time of the thread counts, so that a busy machine makes no difference.
        started = time.thread_time()
        matcher.fill(mask, 0)
        seconds += time.thread_time() - started
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if position == 0 and not len(allowed):
            raise invalid(field, "allows no text at all")
        # LLGuidance aborts a mask that would take far too long. An aborted mask allows no token.
        if seconds > _TRIAL_SECONDS or not len(allowed):
            limit = 1000 * _TRIAL_SECONDS / _TRIAL_TOKENS
            slow = f"masks for its tokens take longer than {limit:.0f} ms each"
            raise invalid(field, f"can be read in too many ways: {slow}")
        allowed = allowed[~np.isin(allowed, list(stop_token_ids))]
        if not len(allowed) or not matcher.accept(int(choose.choice(allowed))):
            return
