"""The gateway refuses requests that the verifiers' engine cannot serve, and sends them nothing."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import OutriderError, Reason
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.protocol.messages import Acceptance, SpeculationOptions, TokenRequest
from outrider.protocol.unsupported import Unsupported, check_supported
from tests.gateway.gateway_rig import Rig
from tests.waiting import until

ALL = tuple(kind.value for kind in Unsupported)
GRAMMAR = Grammar(GrammarKind.REGEX, "a+")
ASKS: dict[Unsupported, dict[str, Any]] = {
    Unsupported.LOSSY_ACCEPTANCE: {
        "speculation": SpeculationOptions(acceptance=Acceptance.TYPICAL)
    },
    Unsupported.GRAMMAR_CONTINUATION: {"grammar": GRAMMAR, "committed": [1]},
    Unsupported.GRAMMAR_WITHOUT_END: {"grammar": GRAMMAR, "ignore_eos": True},
    Unsupported.GRAMMAR_LOGPROBS: {"grammar": GRAMMAR, "top_logprobs": 0},
    Unsupported.GRAMMAR_STOP_TOKENS: {"grammar": GRAMMAR, "stop_token_ids": frozenset([5])},
    Unsupported.NO_TOKENS: {"max_tokens": 0},
}


@pytest.mark.parametrize("kind", Unsupported)
def test_each_unsupported_kind_refuses_its_requests_and_no_other(kind: Unsupported) -> None:
    request = TokenRequest([1], **{"max_tokens": 4, **ASKS[kind]})
    with pytest.raises(OutriderError) as caught:
        check_supported(request, [kind.value])
    assert caught.value.reason is Reason.UNSUPPORTED_PARAMETER
    assert caught.value.field is not None
    assert caught.value.field in caught.value.message
    check_supported(request, [other for other in ALL if other != kind.value])
    check_supported(TokenRequest([1], 4), ALL)


def test_an_unsupported_kind_of_a_later_version_refuses_nothing_here() -> None:
    check_supported(TokenRequest([1], 4), ["telepathy"])


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"speculation": {"acceptance": "typical"}}, "speculation.acceptance"),
        ({"response_format": {"type": "json_object"}, "logprobs": True}, "logprobs"),
    ],
)
async def test_a_request_that_the_engine_cannot_serve_is_not_sent(
    rig: Rig, body: dict[str, Any], field: str
) -> None:
    rig.script.info = replace(rig.script.info, unsupported=ALL)
    [replica] = rig.gateway.router.replicas
    await until(lambda: replica.info == rig.script.info)
    messages = [{"role": "user", "content": "x"}]
    answer = await rig.http.post("/v1/chat/completions", json={"messages": messages, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)
    assert not rig.script.requests
