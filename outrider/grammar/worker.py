"""Compiles grammars and computes masks in a worker process of `outrider.process.workers.pool`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, replace

from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import Libraries
from outrider.grammar.kinds import FreeThought, Grammar, GrammarKind
from outrider.grammar.trial import Trial

HANDLER = f"{__name__}:checker"


def checker(tokenizer: str, vocab_size: int, stop_token_ids: list[int]) -> Callable[[bytes], bytes]:
    """Return a handler that answers with the translated grammar, or with an error.

    A request for random texts gets the answer `null` if the texts are right.
    """
    stops = tuple(stop_token_ids)
    trial = Trial(Libraries(tokenizer, vocab_size, stops), vocab_size, stops)

    def handle(request: bytes) -> bytes:
        grammar = grammar_from(request)
        try:
            if is_for_texts(request):
                trial.check_texts(grammar)
                return b"null"
            return json.dumps(trial.translated(grammar).text).encode()
        except OutriderError as error:
            return json.dumps([error.reason.name, error.message, error.field]).encode()

    return handle


def request_for(grammar: Grammar) -> bytes:
    """Return the request to a worker to translate, compile and try out a grammar."""
    return _request(grammar, is_for_texts=False)


def texts_request_for(grammar: Grammar) -> bytes:
    """Return the request to check random texts of a grammar.

    A worker is quickest for the grammar that it compiled last.
    """
    return _request(grammar, is_for_texts=True)


def _request(grammar: Grammar, *, is_for_texts: bool) -> bytes:
    thought = None if grammar.thought is None else astuple(grammar.thought)
    parts = [grammar.kind.value, grammar.text, grammar.choices, thought, is_for_texts]
    return json.dumps(parts).encode()


def grammar_from(request: bytes) -> Grammar:
    """Return the grammar of a request."""
    kind, text, choices, thought, _ = json.loads(request)
    free = None if thought is None else FreeThought(*thought)
    return Grammar(GrammarKind(kind), text, tuple(choices), free)


def is_for_texts(request: bytes) -> bool:
    """Return whether the request is about random texts of the grammar."""
    return bool(json.loads(request)[-1])


def raise_from(answer: bytes) -> None:
    """Raise the OutriderError that the worker's answer holds, if it holds one."""
    found = json.loads(answer)
    if isinstance(found, list):
        reason, message, field = found
        raise OutriderError(Reason[reason], message, field)


def translated_by(answer: bytes, grammar: Grammar) -> Grammar:
    """Return the translated grammar that the worker's answer holds.

    Raises the OutriderError in it.
    """
    raise_from(answer)
    return replace(grammar, text=json.loads(answer))
