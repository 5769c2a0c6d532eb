"""What a worker process does for grammars: see `outrider.process.workers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import Libraries
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.trial import Trial

HANDLER = f"{__name__}:checker"


def checker(tokenizer: str, vocab_size: int, stop_token_ids: list[int]) -> Callable[[bytes], bytes]:
    """A handler that answers with the translated grammar, or with an error."""
    stops = tuple(stop_token_ids)
    trial = Trial(Libraries(tokenizer, vocab_size, stops), vocab_size, stops)

    def handle(request: bytes) -> bytes:
        try:
            translated = trial.translated(grammar_from(request))
        except OutriderError as error:
            return json.dumps([error.reason.name, error.message, error.field]).encode()
        return json.dumps(translated.text).encode()

    return handle


def request_for(grammar: Grammar) -> bytes:
    """The request that asks a worker to check a grammar."""
    return json.dumps([grammar.kind.value, grammar.text, grammar.choices]).encode()


def grammar_from(request: bytes) -> Grammar:
    """The grammar of a request."""
    kind, text, choices = json.loads(request)
    return Grammar(GrammarKind(kind), text, tuple(choices))


def translated_by(answer: bytes, grammar: Grammar) -> Grammar:
    """The translated grammar that the worker's answer holds; raises the OutriderError in it."""
    found = json.loads(answer)
    if isinstance(found, str):
        return replace(grammar, text=found)
    reason, message, field = found
    raise OutriderError(Reason[reason], message, field)
