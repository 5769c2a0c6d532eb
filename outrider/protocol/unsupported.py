"""Kinds of requests that an engine cannot serve. GetModel names them, and gateways refuse them.

The verifier checks requests too, because callers other than gateways may send them unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from typing import NamedTuple

from outrider.errors import OutriderError, Reason
from outrider.protocol.messages import Acceptance, TokenRequest


class _Refusal(NamedTuple):
    """The field that the error names, and the reason; `asks` tells whether to refuse a request."""

    field: str
    reason: str
    asks: Callable[[TokenRequest], bool]


class Unsupported(Enum):
    """A kind of request that an engine cannot serve, by its name in GetModel."""

    LOSSY_ACCEPTANCE = "lossy_acceptance"
    GRAMMAR_CONTINUATION = "grammar_continuation"
    GRAMMAR_WITHOUT_END = "grammar_without_end"
    GRAMMAR_LOGPROBS = "grammar_logprobs"
    GRAMMAR_STOP_TOKENS = "grammar_stop_tokens"
    NO_TOKENS = "no_tokens"


_REFUSALS = {
    Unsupported.LOSSY_ACCEPTANCE: _Refusal(
        "speculation.acceptance",
        "this model's engine verifies exactly, and has no lossy acceptance",
        lambda request: request.speculation.acceptance is not Acceptance.EXACT,
    ),
    Unsupported.GRAMMAR_CONTINUATION: _Refusal(
        "grammar",
        "this model's engine cannot go on with an answer in the middle of a grammar",
        lambda request: request.grammar is not None and bool(request.committed),
    ),
    Unsupported.GRAMMAR_WITHOUT_END: _Refusal(
        "ignore_eos",
        "this model's engine would go on without the grammar after the grammar's end",
        lambda request: request.grammar is not None and request.ignore_eos,
    ),
    Unsupported.GRAMMAR_LOGPROBS: _Refusal(
        "logprobs",
        "this model's engine measures log probabilities after the grammar's mask, so it has none"
        " for an answer with a grammar",
        lambda request: request.grammar is not None and request.top_logprobs is not None,
    ),
    Unsupported.GRAMMAR_STOP_TOKENS: _Refusal(
        "stop_token_ids",
        "this model's engine would forbid them in the middle of the grammar's text",
        lambda request: request.grammar is not None and bool(request.stop_token_ids),
    ),
    Unsupported.NO_TOKENS: _Refusal(
        "max_tokens",
        "must be at least 1, since this model's engine scores no prompt without an answer",
        lambda request: request.max_tokens == 0,
    ),
}


def check_supported(
    request: TokenRequest, unsupported: Collection[str], grammar_field: str = ""
) -> None:
    """Raise OutriderError(UNSUPPORTED_PARAMETER) for a request that an engine does not support.

    `unsupported` has the names from GetModel. A name that this version does not know is ignored:
    the verifier itself refuses the requests that the name means. `grammar_field` replaces `grammar`
    in the error.
    """
    if not unsupported:
        return
    for kind, refusal in _REFUSALS.items():
        if kind.value in unsupported and refusal.asks(request):
            is_grammar = refusal.field == "grammar" and grammar_field
            field = grammar_field if is_grammar else refusal.field
            raise OutriderError(Reason.UNSUPPORTED_PARAMETER, f"{field}: {refusal.reason}", field)
