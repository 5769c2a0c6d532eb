"""What an engine cannot do: it says so in GetModel, and gateways refuse such requests themselves.

The verifier checks them too, because another caller may not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from typing import NamedTuple

from outrider.errors import OutriderError, Reason
from outrider.protocol.messages import Acceptance, TokenRequest


class _Lack(NamedTuple):
    """The field of a request that asks for too much, the reason, and which requests do."""

    field: str
    reason: str
    asks: Callable[[TokenRequest], bool]


class Lack(Enum):
    """Something that an engine cannot do, by its name in GetModel."""

    LOSSY_ACCEPTANCE = "lossy_acceptance"
    GRAMMAR_CONTINUATION = "grammar_continuation"
    GRAMMAR_WITHOUT_END = "grammar_without_end"
    GRAMMAR_LOGPROBS = "grammar_logprobs"
    GRAMMAR_STOP_TOKENS = "grammar_stop_tokens"
    NO_TOKENS = "no_tokens"


_LACKS = {
    Lack.LOSSY_ACCEPTANCE: _Lack(
        "speculation.acceptance",
        "this model's engine verifies exactly, and has no lossy acceptance",
        lambda request: request.speculation.acceptance is not Acceptance.EXACT,
    ),
    Lack.GRAMMAR_CONTINUATION: _Lack(
        "grammar",
        "this model's engine cannot go on with an answer in the middle of a grammar",
        lambda request: request.grammar is not None and bool(request.committed),
    ),
    Lack.GRAMMAR_WITHOUT_END: _Lack(
        "ignore_eos",
        "this model's engine would go on without the grammar after the grammar's end",
        lambda request: request.grammar is not None and request.ignore_eos,
    ),
    Lack.GRAMMAR_LOGPROBS: _Lack(
        "logprobs",
        "this model's engine measures log probabilities after the grammar's mask, so it has none"
        " for an answer with a grammar",
        lambda request: request.grammar is not None and request.top_logprobs is not None,
    ),
    Lack.GRAMMAR_STOP_TOKENS: _Lack(
        "stop_token_ids",
        "this model's engine would forbid them in the middle of the grammar's text",
        lambda request: request.grammar is not None and bool(request.stop_token_ids),
    ),
    Lack.NO_TOKENS: _Lack(
        "max_tokens",
        "must be at least 1, since this model's engine scores no prompt without an answer",
        lambda request: request.max_tokens == 0,
    ),
}


def check_lacks(request: TokenRequest, lacks: Collection[str], grammar_field: str = "") -> None:
    """Raise OutriderError(UNSUPPORTED_PARAMETER) for a request that needs what an engine lacks.

    `lacks` has the names of GetModel; unknown ones are left to the verifier. `grammar_field` is the
    caller's name of the grammar.
    """
    if not lacks:
        return
    for kind, lack in _LACKS.items():
        if kind.value in lacks and lack.asks(request):
            field = grammar_field if lack.field == "grammar" and grammar_field else lack.field
            raise OutriderError(Reason.UNSUPPORTED_PARAMETER, f"{field}: {lack.reason}", field)
