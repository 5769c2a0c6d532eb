"""Messages survive a round trip over the wire, and invalid ones are refused."""

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import OutriderError, Reason
from outrider.grammar.kinds import FreeThought, Grammar, GrammarKind
from outrider.protocol import draft_messages as d
from outrider.protocol import messages as m
from outrider.protocol.limits import MAX_DRAFT_SECONDS
from outrider.protocol.model_info import DrafterInfo, Load, ModelInfo, Placement, Stage
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire import model as wire_model
from outrider.protocol.wire import requests as wire_requests
from outrider.v1 import common_pb2, drafts_pb2

VOCAB = 1000
ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
lists = st.lists(st.integers(0, VOCAB - 1), max_size=4, unique=True)
samplings = st.builds(
    m.SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, VOCAB),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.none() | st.integers(0, 2**64 - 1),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0, 1, exclude_min=True),
    repetition_penalty=st.floats(0.01, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=lists.map(lambda found: tuple((token, 0.5) for token in sorted(found))),
    min_tokens=st.integers(0, 1),
    banned_token_ids=lists.map(tuple),
)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
filled = st.text(min_size=1, max_size=9)
thoughts = st.none() | st.builds(FreeThought, st.text(max_size=9), filled, st.text(max_size=9))
grammars = (
    st.builds(Grammar, st.just(GrammarKind.REGEX), filled, thought=thoughts)
    | st.builds(Grammar, st.just(GrammarKind.JSON_OBJECT), thought=thoughts)
    | st.builds(
        Grammar,
        st.just(GrammarKind.CHOICE),
        choices=st.lists(filled, min_size=1, max_size=3).map(tuple),
        thought=thoughts,
    )
)


@pytest.mark.parametrize(
    ("plain", "proto"),
    [
        (m.SamplingParams, common_pb2.SamplingParams),
        (m.SpeculationOptions, common_pb2.SpeculationOptions),
    ],
)
def test_every_setting_of_a_request_is_on_the_wire(plain: Any, proto: Any) -> None:
    assert {field.name for field in fields(plain) if field.init} == set(
        proto.DESCRIPTOR.fields_by_name
    )


@given(
    prompt=ids,
    max_tokens=st.integers(1, 100),
    sampling=samplings,
    stop=st.frozensets(st.integers(0, VOCAB - 1), max_size=5),
    ignore_eos=st.booleans(),
    speculation=st.builds(
        m.SpeculationOptions,
        st.booleans(),
        drafter_id=names,
        draft_tokens=st.none() | st.integers(0, 64),
        always_draft=st.booleans(),
    )
    | st.builds(m.SpeculationOptions, drafter_family=names),
    tenant=names,
    chunk=st.integers(1, 100),
    likeliest=st.none() | st.integers(0, 20),
    grammar=st.none() | grammars,
)
def test_a_request_survives_a_round_trip(
    prompt: list[int],
    max_tokens: int,
    sampling: m.SamplingParams,
    stop: frozenset[int],
    ignore_eos: bool,
    speculation: m.SpeculationOptions,
    tenant: str,
    chunk: int,
    likeliest: int | None,
    grammar: Grammar | None,
) -> None:
    request = m.TokenRequest(
        prompt, max_tokens, sampling, stop, ignore_eos, speculation, tenant, min_chunk_tokens=chunk
    )
    if likeliest is not None:
        max_tokens = max(max_tokens - 1, sampling.min_tokens)
        request = replace(request, prompt_logprobs=likeliest, max_tokens=max_tokens)
    else:
        request = replace(request, committed=prompt[: max_tokens - 1], noise_seed=max_tokens)
    request = replace(request, grammar=grammar)
    proto = wire_requests.request_to_proto(request)
    assert wire_requests.request_from_proto(proto, vocab_size=VOCAB, context_length=1000) == request


@pytest.mark.parametrize(
    ("thought", "problem"),
    [
        (FreeThought("a", ""), "end must not be empty"),
        (FreeThought("a" * 257, "b"), "begin must have at most 256 characters, not 257"),
        (FreeThought("", "b" * 257), "end must have at most 256 characters, not 257"),
        (FreeThought("", "b", "c" * 257), "after must have at most 256 characters, not 257"),
    ],
)
def test_the_error_of_a_bad_thought_names_its_text_and_the_limit(
    thought: FreeThought, problem: str
) -> None:
    grammar = Grammar(GrammarKind.JSON_OBJECT, thought=thought)
    proto = wire_requests.request_to_proto(m.TokenRequest([1], 2, grammar=grammar))
    with pytest.raises(OutriderError, match=f"^grammar.thought.{problem}$"):
        wire_requests.request_from_proto(proto, vocab_size=VOCAB, context_length=1000)


@pytest.mark.parametrize(
    ("request_", "field", "problem"),
    [
        (
            m.TokenRequest([VOCAB], 5),
            "prompt_token_ids",
            r"must be in \[0, 1000\), not 1000",
        ),
        (
            m.TokenRequest([1], 2, committed=[1, 2]),
            "committed_token_ids",
            "must hold fewer ids than max_tokens, which is 2, not 2",
        ),
        (
            m.TokenRequest([1], 5, committed=[1, VOCAB]),
            "committed_token_ids",
            r"must be in \[0, 1000\), not 1000",
        ),
        (
            m.TokenRequest([1], 5, committed=[1], prompt_logprobs=0),
            "committed_token_ids",
            "must be empty with prompt_logprob_count",
        ),
    ],
)
def test_the_error_of_impossible_tokens_states_the_limit(
    request_: m.TokenRequest, field: str, problem: str
) -> None:
    proto = wire_requests.request_to_proto(request_)
    with pytest.raises(OutriderError, match=f"{field} {problem}") as caught:
        wire_requests.request_from_proto(proto, vocab_size=VOCAB, context_length=1000)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_VALUE, field)


@given(
    sequence_id=st.integers(0, 2**64 - 1),
    length=st.integers(0, 2**31 - 1),
    tokens=ids,
    sampling=samplings,
    window=st.builds(d.Window, st.integers(1, 4096), st.integers(1, 128)),
    accepted=st.integers(0, 64),
    tree=st.integers(0, 1024),
    share=st.floats(0, 1),
)
def test_a_step_survives_a_round_trip(
    sequence_id: int,
    length: int,
    tokens: list[int],
    sampling: m.SamplingParams,
    window: d.Window,
    accepted: int,
    tree: int,
    share: float,
) -> None:
    sparse = m.DraftDistribution.SPARSE
    wanted = int(share * window.depth)
    opened = d.Opened(sequence_id, tokens, sampling, sparse, window, wanted, "tenant", "trace")
    step = d.StepBatch(
        [replace(opened, tree_tokens=tree)],
        [d.Features(sequence_id, length, bytes(4 * len(tokens)))],
        [d.Verdict(sequence_id, length, tokens, accepted, wanted, window, "trace", tree)],
        [d.Closed(sequence_id)],
    )
    assert wire_drafts.step_from_proto(wire_drafts.step_to_proto(step), VOCAB) == step


@pytest.mark.parametrize(("limit", "last"), [(None, None), (1, 0), (7, 3)])
def test_a_hello_survives_a_round_trip(limit: int | None, last: int | None) -> None:
    request = d.FeatureRequest((1, 2), last_prompt_token_count=last, projection="p")
    hello = d.Hello("d", "f", "t", 8, max_sequence_count=limit, feature_request=request)
    assert wire_drafts.hello_from_proto(wire_drafts.hello_to_proto(hello)) == hello


@pytest.mark.parametrize("limit", [0, -1])
def test_a_drafter_that_takes_no_sequence_is_refused(limit: int) -> None:
    """A limit of 0 once meant no limit; now a drafter without a limit leaves it unset."""
    hello = d.Hello("d", "f", "t", 8, max_sequence_count=limit)
    with pytest.raises(OutriderError) as caught:
        wire_drafts.hello_from_proto(wire_drafts.hello_to_proto(hello))
    assert caught.value.field == "hello.max_sequence_count"
    assert caught.value.message.endswith(f"must be at least 1, not {limit}")


@given(st.lists(st.floats(0, 1, exclude_min=True, width=32), min_size=1, max_size=32))
def test_confidences_survive_a_round_trip(confidences: list[float]) -> None:
    tokens = [5] * len(confidences)
    batch = d.DraftBatch([d.Proposal(1, 5, tokens, confidences=confidences)])
    assert wire_drafts.drafts_from_proto(wire_drafts.drafts_to_proto(batch), VOCAB) == batch


@given(st.lists(st.floats(2**-20, 1, width=32), min_size=1, max_size=32))
def test_drafter_and_verifier_use_the_same_distribution(weights: list[float]) -> None:
    """The drafter draws from float32 weights over their sum; the verifier divides the same way."""
    drawn_from = (np.array(weights) / sum(weights)).astype(np.float32).astype(np.float64)
    sent = d.SparseDistribution(np.arange(len(weights)), drawn_from)
    batch = d.DraftBatch([d.Proposal(1, 5, [0], [], [sent])])
    read = wire_drafts.drafts_from_proto(wire_drafts.drafts_to_proto(batch), VOCAB)
    received = read.proposals[0].distributions[0]
    assert received is not None
    assert (received.probabilities == drawn_from / drawn_from.sum()).all()


def test_statistics_and_model_info_survive_a_round_trip() -> None:
    pause = m.SpeculationPause(m.PauseReason.TOO_SLOW, 3, 0.25, None)
    stats = m.SpeculationStats(5, 3, 9, 4, [1, 0, 2], 4, paused=pause)
    sources = [m.TokenSource.ACCEPTED, m.TokenSource.BONUS]
    chunk = m.TokenChunk([1, 2], sources, "d", m.FinishReason.LENGTH, stats, 16, 1)
    assert wire_requests.chunk_from_proto(wire_requests.chunk_to_proto(chunk)) == chunk
    place = Placement("cpu", "host", "cpu", (0, 1), 0, "aarch64")
    drafter = DrafterInfo("d", "ngram", place, True, 2, 0.5, 0.25, 0.125)
    info = ModelInfo(
        "model", Stage.READY, "serving", "f", 10, 20, (1, 2), "float32", "cpu", (drafter,), 4
    )
    info = replace(info, load=Load(64, 7, 64, 1024, 2.5, 0.75))
    assert wire_model.model_from_proto(wire_model.model_to_proto(info)) == info


PROPOSAL = {"sequence_id": 1, "base_length": 3, "token_ids": [5]}


@pytest.mark.parametrize(
    ("reported", "expected"), [(0, 0.0), (3, 3.0), (2**63 - 1, MAX_DRAFT_SECONDS)]
)
def test_reported_durations_are_clamped(reported: int, expected: float) -> None:
    sent = drafts_pb2.Proposal(**PROPOSAL, draft_duration=Duration(seconds=reported))
    batch = drafts_pb2.DraftBatch(proposals=[sent])
    [proposal] = wire_drafts.drafts_from_proto(batch, VOCAB).proposals
    assert proposal.draft_seconds == expected
    drafter = DrafterInfo("d", "f", Placement(), True, 0, token_s=expected)
    info = ModelInfo("", Stage.READY, "", drafters=(drafter,))
    read = wire_model.model_from_proto(wire_model.model_to_proto(info))
    assert read.drafters[0].token_s == expected


def sparse(ids: list[int], probabilities: list[float]) -> dict[str, Any]:
    """Return the fields of a proposal with this distribution."""
    distribution = drafts_pb2.SparseDistribution(token_ids=ids, probabilities=probabilities)
    return {**PROPOSAL, "distributions": [distribution]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**PROPOSAL, "token_ids": [VOCAB]}, r"must be in \[0, 1000\), not 1000"),
        (
            {**PROPOSAL, "parents": [1]},
            "must name a token before its child: at most 0 at place 0, not 1",
        ),
        ({**PROPOSAL, "parents": [0, 1]}, "must be empty or one for each of 1 tokens, not 2"),
        (
            {**PROPOSAL, "confidences": [0.5, 0.5]},
            "must be empty or one for each of 1 tokens, not 2",
        ),
        ({**PROPOSAL, "confidences": [math.nan]}, r"must be in \(0, 1\], not nan"),
        (
            {**PROPOSAL, "draft_duration": Duration(nanos=-1)},
            r"draft_duration must be at least 0 s, not -1e-09 s",
        ),
        (sparse([5], []), "must hold 1 to 256 ids and as many probabilities, not 1 and 0"),
        (sparse([5, 6], [1.5, -0.5]), "must be finite and not negative"),
        (sparse([5], [math.nan]), "must be finite and not negative"),
        (sparse([5], [math.inf]), "must be finite and not negative"),
        (sparse([5, 6], [0.5, 0.4]), "must sum to 1 within 0.001"),
        (sparse([5, 5], [0.5, 0.5]), "must hold distinct ids"),
        (sparse([5, VOCAB], [0.5, 0.5]), r"must hold distinct ids in \[0, 1000\)"),
        (sparse([5, 6], [0.0, 1.0]), "must give the proposed token 5 a probability above 0"),
        (sparse([6], [1.0]), "must give the proposed token 5 a probability above 0"),
    ],
)
def test_the_error_of_a_malformed_proposal_states_the_limit(
    fields: dict[str, Any], message: str
) -> None:
    good = drafts_pb2.Proposal(**PROPOSAL)
    batch = drafts_pb2.DraftBatch(proposals=[good, drafts_pb2.Proposal(**fields), good])
    with pytest.raises(OutriderError, match=message) as caught:
        wire_drafts.drafts_from_proto(batch, VOCAB)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    assert caught.value.field is not None
    assert caught.value.field.startswith("drafts.proposals[1].")
    assert caught.value.message.startswith(caught.value.field)


def test_a_messages_tokens_have_a_limit_together() -> None:
    full = [d.Proposal(1, 5, [0] * 1024)] * 16
    batch = wire_drafts.drafts_to_proto(d.DraftBatch(full))
    assert len(wire_drafts.drafts_from_proto(batch, VOCAB).proposals) == 16
    batch.proposals.add(sequence_id=1, base_length=5, token_ids=[0])
    with pytest.raises(OutriderError) as caught:
        wire_drafts.drafts_from_proto(batch, VOCAB)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    assert caught.value.message == (
        "drafts.proposals must hold at most 16384 tokens together, not 16385"
    )
