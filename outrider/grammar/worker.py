"""What a worker process does for grammars: see `outrider.process.workers`."""

from __future__ import annotations

import json
from collections.abc import Callable

from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import Backend, load_library
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.trial import compile_checked

HANDLER = f"{__name__}:checker"


def checker(
    tokenizer: str, vocab_size: int, stop_token_ids: list[int], backend: Backend
) -> Callable[[bytes], bytes]:
    """A handler that checks grammars: it answers with nothing, or with an error as JSON."""
    stops = tuple(stop_token_ids)
    library = load_library(backend, tokenizer, vocab_size, stops)

    def handle(request: bytes) -> bytes:
        try:
            compile_checked(library, grammar_from(request), vocab_size, stops)
        except OutriderError as error:
            return json.dumps([error.reason.name, error.message, error.field]).encode()
        return b""

    return handle


def request_for(grammar: Grammar) -> bytes:
    """The request that asks a worker to check a grammar."""
    return json.dumps([grammar.kind.value, grammar.text, grammar.choices]).encode()


def grammar_from(request: bytes) -> Grammar:
    """The grammar of a request."""
    kind, text, choices = json.loads(request)
    return Grammar(GrammarKind(kind), text, tuple(choices))


def raise_error(answer: bytes) -> None:
    """Raise the OutriderError that the worker's answer holds, if it holds one."""
    if answer:
        reason, message, field = json.loads(answer)
        raise OutriderError(Reason[reason], message, field)
