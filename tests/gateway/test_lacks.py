"""What the verifiers' engine cannot do is refused by the gateway, before anything is sent."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import OutriderError, Reason
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.protocol.lacks import Lack, check_lacks
from outrider.protocol.messages import Acceptance, SpeculationOptions, TokenRequest
from tests.gateway.gateway_rig import Rig
from tests.waiting import until

ALL = tuple(lack.value for lack in Lack)
GRAMMAR = Grammar(GrammarKind.REGEX, "a+")
ASKS: dict[Lack, dict[str, Any]] = {
    Lack.LOSSY_ACCEPTANCE: {"speculation": SpeculationOptions(acceptance=Acceptance.TYPICAL)},
    Lack.GRAMMAR_CONTINUATION: {"grammar": GRAMMAR, "committed": [1]},
    Lack.GRAMMAR_WITHOUT_END: {"grammar": GRAMMAR, "ignore_eos": True},
    Lack.GRAMMAR_LOGPROBS: {"grammar": GRAMMAR, "top_logprobs": 0},
    Lack.GRAMMAR_STOP_TOKENS: {"grammar": GRAMMAR, "stop_token_ids": frozenset([5])},
    Lack.NO_TOKENS: {"max_tokens": 0},
}


@pytest.mark.parametrize("lack", Lack)
def test_each_lack_refuses_its_requests_and_no_other(lack: Lack) -> None:
    request = TokenRequest([1], **{"max_tokens": 4, **ASKS[lack]})
    with pytest.raises(OutriderError) as caught:
        check_lacks(request, [lack.value])
    assert caught.value.reason is Reason.UNSUPPORTED_PARAMETER
    assert caught.value.field is not None
    assert caught.value.field in caught.value.message
    check_lacks(request, [other for other in ALL if other != lack.value])
    check_lacks(TokenRequest([1], 4), ALL)


def test_a_lack_of_a_later_version_refuses_nothing_here() -> None:
    check_lacks(TokenRequest([1], 4), ["telepathy"])


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
    rig.script.info = replace(rig.script.info, lacks=ALL)
    [replica] = rig.gateway.router.replicas
    await until(lambda: replica.info == rig.script.info)
    messages = [{"role": "user", "content": "x"}]
    answer = await rig.http.post("/v1/chat/completions", json={"messages": messages, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)
    assert not rig.script.requests
