"""Unknown enum values are interpreted as the protos say, or refused with the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import OutriderError, Reason
from outrider.protocol import draft_messages as d
from outrider.protocol import messages as m
from outrider.protocol.model_info import Stage
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire import model as wire_model
from outrider.protocol.wire import requests as wire_requests
from outrider.protocol.wire import settings as wire_settings
from outrider.v1 import common_pb2, drafts_pb2, verifier_pb2

VOCAB = 1000
OPENED = drafts_pb2.Opened(token_ids=[1], window=drafts_pb2.Window(token_count=1, depth=1))
HELLO = drafts_pb2.Hello(drafter_id="d", family="f", tokenizer_fingerprint="t", max_draft_tokens=1)
UNKNOWN = (0, 99, -1, 2**31 - 1)


@pytest.mark.parametrize("value", UNKNOWN)
def test_unknown_values_are_read_as_the_protos_say(value: Any) -> None:
    step = drafts_pb2.StepBatch(
        opened=[drafts_pb2.Opened(token_ids=[1], window=OPENED.window, distribution=value)],
        closed=[drafts_pb2.Closed(reason=value)],
    )
    read = wire_drafts.step_from_proto(step, VOCAB)
    assert read.opened[0].distribution is m.DraftDistribution.ONE_HOT
    assert read.closed == [d.Closed(0)]
    info = wire_model.model_from_proto(verifier_pb2.GetModelResponse(stage=value))
    assert info.stage is Stage.LOADING
    hello = drafts_pb2.Hello(
        distributions=[value, drafts_pb2.DRAFT_DISTRIBUTION_COUPLED], capabilities=[value]
    )
    hello.MergeFrom(HELLO)
    assert wire_drafts.hello_from_proto(hello).distributions == {
        m.DraftDistribution.ONE_HOT,
        m.DraftDistribution.COUPLED,
    }
    rules = [value, common_pb2.ACCEPTANCE_RULE_BLOCK]
    response = verifier_pb2.GenerateTokensResponse(
        token_ids=[1, 2],
        sources=[value, common_pb2.TOKEN_SOURCE_BONUS],
        finish_reason=value,
        stats=common_pb2.SpeculationStats(rules=rules),
    )
    chunk = wire_requests.chunk_from_proto(response)
    assert chunk.sources == [m.TokenSource.PLAIN, m.TokenSource.BONUS]
    assert chunk.finish_reason is (m.FinishReason.STOP if value else None)
    assert chunk.stats is not None
    assert chunk.stats.rules == [m.AcceptanceRule.BLOCK]


@pytest.mark.parametrize(
    ("dtype", "is_asked"), [(0, True), (drafts_pb2.FEATURE_DTYPE_FLOAT32, True), (99, False)]
)
def test_a_drafter_gets_no_features_of_an_unknown_type(dtype: Any, is_asked: bool) -> None:
    request = drafts_pb2.FeatureRequest(final_state=True, dtype=dtype)
    hello = drafts_pb2.Hello(capabilities=[drafts_pb2.CAPABILITY_FEATURES], feature_request=request)
    hello.MergeFrom(HELLO)
    assert (wire_drafts.hello_from_proto(hello).feature_request is not None) is is_asked


@pytest.mark.parametrize("value", UNKNOWN[1:])
def test_an_unknown_rule_of_acceptance_is_refused_by_field(value: Any) -> None:
    """An unknown value is an error only in a request, which asks for something unknown."""
    with pytest.raises(OutriderError) as caught:
        wire_settings.speculation_from_proto(common_pb2.SpeculationOptions(acceptance=value))
    assert caught.value.reason is Reason.INVALID_VALUE
    assert caught.value.field == "speculation.acceptance"


@pytest.mark.parametrize(
    ("data", "field", "message"),
    [
        (
            b"",
            "grammar",
            "must have one of json_schema, json_object, regex, ebnf, choice, structural_tag;",
        ),
        (b"\x42\x02hi", "grammar.8", "a field with the number 8, which this version does not know"),
    ],
)
def test_requests_refuse_an_unknown_grammar_and_drafters_ignore_it(
    data: bytes, field: str, message: str
) -> None:
    """A request without its grammar would get free text where the caller asked for a form."""
    grammar = common_pb2.Grammar.FromString(data)
    request = verifier_pb2.GenerateTokensRequest(
        prompt_token_ids=[1], max_tokens=1, grammar=grammar
    )
    with pytest.raises(OutriderError, match=message) as caught:
        wire_requests.request_from_proto(request, vocab_size=VOCAB, context_length=100)
    assert caught.value.field == field
    step = drafts_pb2.StepBatch(
        opened=[drafts_pb2.Opened(token_ids=[1], window=OPENED.window, grammar=grammar)]
    )
    assert wire_drafts.step_from_proto(step, VOCAB).opened[0].grammar is None


@pytest.mark.parametrize("field", ["drafter_id", "drafter_family"])
def test_a_drafters_name_that_is_set_is_not_empty(field: str) -> None:
    """The reader would interpret an empty name as no restriction."""
    options = common_pb2.SpeculationOptions(**{field: ""})
    with pytest.raises(OutriderError, match=f"speculation.{field} must have at least 1 character"):
        wire_settings.speculation_from_proto(options)
