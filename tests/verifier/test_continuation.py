"""A request that moves to another verifier goes on with the tokens that it would have got."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import Matcher
from outrider.grammar.compiler import advanced
from outrider.protocol.draft_messages import Proposal, SparseDistribution
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import (
    Acceptance,
    AcceptanceRule,
    DraftDistribution,
    FinishReason,
    SamplingParams,
    SpeculationOptions,
    TokenLogprob,
    TokenRequest,
)
from tests.toy_grammars import NoRepeats
from tests.verifier.fake_model import (
    EOS,
    GREEDY,
    VOCAB,
    Client,
    ScriptedDrafter,
    TableModel,
    finish,
    make_engine,
)
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.state.sequence import Sequence
from verifier_svc.verification.batch import DraftVerifier

THINKING = (5, 6)
EOS_BIAS = -4.0
REQUEST = TokenRequest([1, 2, 3], 24, SamplingParams(), top_logprobs=2, noise_seed=2**63 + 5)


class Compiled:
    """A compiled grammar of texts without two equal tokens in a row."""

    size_bytes = 1

    def matcher(self) -> Matcher:
        return NoRepeats()


def matcher(request: TokenRequest) -> Matcher:
    """Return the state of the grammar after the request's committed tokens."""
    return advanced(Compiled(), request.committed)


@dataclass
class Answer:
    """The chunks that a client got, and the reason why the answer ended."""

    chunks: list[list[int]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    accepted: int = 0
    rules: list[AcceptanceRule] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]


def guess(model: TableModel, sequence: Sequence, *, sampled: bool) -> Proposal:
    """Return a draft of three tokens, which depends only on the committed tokens."""
    length = len(sequence.tokens)
    rng = np.random.default_rng(length)
    text = list(sequence.tokens)
    distributions: list[SparseDistribution | None] = []
    for _ in range(3):
        logits = model.table[text[max(len(text) - 2, 0)], text[-1]].numpy()
        weights = np.exp(logits + rng.normal(size=VOCAB))
        probs = (weights / weights.sum()).astype(np.float32).astype(np.float64)
        distributions.append(SparseDistribution(np.arange(VOCAB), probs / probs.sum()))
        drawn = probs.cumsum().searchsorted(rng.random() * probs.sum(), "right")
        text.append(int(drawn if sampled else probs.argmax()))
    return Proposal(
        sequence.id, length, text[length:], distributions=distributions if sampled else []
    )


def answer(
    request: TokenRequest,
    *,
    grammar: bool = False,
    drafts: bool = True,
    sampled_rule: AcceptanceRule | None = None,
) -> Answer:
    """Return the answer of a fresh engine, whose drafter guesses before each step."""
    verifier = DraftVerifier(sampled_rule or AcceptanceRule.BLOCK, thinking_ids=THINKING)
    engine, model = make_engine(
        config=EngineConfig(DraftTokensPolicy("fixed", 3)),
        trust=sampled_rule is not None,
        always_draft=True,
        eos_bias=EOS_BIAS,
        draft_verifier=verifier,
    )
    offers = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE})
    drafter = ScriptedDrafter(engine, distributions=offers) if drafts else None
    client = Client()
    sequence = engine.submit(request, client, matcher=matcher(request) if grammar else None)
    engine.drain_inbox()
    while engine.sequences:
        if drafter is not None:
            drafter.send(guess(model, sequence, sampled=sampled_rule is not None))
        engine.step()
    finish_quietly(engine)
    assert client.error is None
    stats = client.chunks[-1].stats
    assert stats is not None
    return Answer(
        [chunk.token_ids for chunk in client.chunks],
        [each for chunk in client.chunks for each in chunk.logprobs],
        client.finish_reason,
        stats.accepted_token_count,
        stats.rules,
    )


def finish_quietly(engine: Engine) -> None:
    engine.outbox.send_to_clients()
    engine.pool.check_integrity()
    assert engine.pool.used_count == 0


def must_equal_the_rest(found: Answer, whole: Answer, cut: int) -> None:
    assert found.tokens == whole.tokens[cut:]
    assert found.reason is whole.reason
    for one, other in zip(found.logprobs, whole.logprobs[cut:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
        assert (one.rank, one.top_token_ids) == (other.rank, other.top_token_ids)


SETTINGS = {
    "greedy": GREEDY,
    "no seed": SamplingParams(),
    "penalties": SamplingParams(
        seed=3, repetition_penalty=1.4, presence_penalty=0.8, frequency_penalty=0.7
    ),
    "min_tokens": SamplingParams(seed=4, min_tokens=13, logit_bias=((EOS, 6.0),)),
    "banned and truncated": SamplingParams(
        seed=2**64 - 3, top_k=4, top_p=0.9, banned_token_ids=(2, 5), logit_bias=((1, 1.0),)
    ),
}


@pytest.mark.parametrize("grammar", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_rest_is_the_same_behind_any_number_of_tokens(name: str, grammar: bool) -> None:
    request = replace(REQUEST, sampling=SETTINGS[name])
    whole = answer(request, grammar=grammar)
    assert whole.tokens == answer(request, grammar=grammar, drafts=False).tokens
    assert len(whole.tokens) > 5
    for cut in range(1, len(whole.tokens)):
        committed = whole.tokens[:cut]
        rest = answer(replace(request, committed=committed), grammar=grammar)
        must_equal_the_rest(rest, whole, cut)


def lossy(acceptance: Acceptance) -> TokenRequest:
    return replace(REQUEST, speculation=SpeculationOptions(acceptance=acceptance))


RULES: dict[AcceptanceRule, TokenRequest] = {
    AcceptanceRule.GREEDY: replace(REQUEST, sampling=GREEDY),
    AcceptanceRule.COUPLED: REQUEST,
    AcceptanceRule.BLOCK: REQUEST,
    AcceptanceRule.TOKEN_WISE: REQUEST,
    AcceptanceRule.TYPICAL: lossy(Acceptance.TYPICAL),
    # The prompt begins the thinking phase.
    AcceptanceRule.RELAXED: replace(lossy(Acceptance.RELAXED), prompt=[1, THINKING[0], 3]),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.label)
def test_with_the_same_drafts_each_rule_goes_on_as_before(rule: AcceptanceRule) -> None:
    """Coins depend on the committed length, so a step draws equal coins at any verifier."""
    sampled_rule = rule if rule in (AcceptanceRule.BLOCK, AcceptanceRule.TOKEN_WISE) else None
    for number in range(2):
        request = replace(RULES[rule], noise_seed=number)
        whole = answer(request, sampled_rule=sampled_rule)
        assert whole.rules == [rule]
        cut = 0
        for chunk in whole.chunks[:-1]:
            cut += len(chunk)
            committed = whole.tokens[:cut]
            rest = answer(replace(request, committed=committed), sampled_rule=sampled_rule)
            must_equal_the_rest(rest, whole, cut)


def refused(request: TokenRequest, *, grammar: bool = False) -> OutriderError:
    engine, _ = make_engine(eos_bias=-99)
    with pytest.raises(OutriderError) as caught:
        engine.submit(request, Client(), matcher=matcher(request) if grammar else None)
    assert not engine.sequences
    assert engine.pool.used_count == 0
    return caught.value


def test_committed_tokens_that_end_the_text_are_refused() -> None:
    error = refused(replace(REQUEST, committed=[1, EOS]))
    assert (error.reason, error.field) == (Reason.INVALID_VALUE, "committed_token_ids[1]")
    assert "must not end the sequence, but 7 does" in error.message
    stopped = refused(replace(REQUEST, committed=[1, 4], stop_token_ids=frozenset({4})))
    assert stopped.field == "committed_token_ids[1]"
    # A grammar's text ends with its end token, even if the request ignores end tokens.
    ended = refused(replace(REQUEST, committed=[1, EOS], ignore_eos=True), grammar=True)
    assert ended.field == "committed_token_ids[1]"


def test_committed_tokens_that_the_grammar_forbids_are_refused() -> None:
    error = refused(replace(REQUEST, committed=[1, 2, 2]), grammar=True)
    assert (error.reason, error.field) == (Reason.INVALID_VALUE, "committed_token_ids[2]")
    assert "the grammar allows" in error.message


def test_a_request_that_goes_on_is_taken_though_the_queue_is_full() -> None:
    engine, _ = make_engine(config=EngineConfig(max_sequences=1, max_waiting=1), eos_bias=-99)
    for _ in range(2):
        engine.submit(REQUEST, Client())
    with pytest.raises(OutriderError, match="waiting already"):
        engine.submit(REQUEST, Client())
    goes_on = Client()
    engine.submit(replace(REQUEST, committed=[1, 2]), goes_on)
    with pytest.raises(OutriderError, match="2 requests are waiting already"):
        engine.submit(replace(REQUEST, committed=[1, 2]), Client())
    finish(engine)
    assert len(goes_on.tokens) == REQUEST.max_tokens - 2


def test_a_drafter_that_only_the_lost_verifier_had_is_done_without() -> None:
    options = SpeculationOptions(drafter_id="elsewhere")
    request = replace(REQUEST, speculation=options, ignore_eos=True)
    assert refused(request).reason is Reason.DRAFTER_NOT_FOUND
    engine, _ = make_engine(eos_bias=EOS_BIAS)
    client = Client()
    whole = answer(replace(REQUEST, ignore_eos=True), drafts=False)
    engine.submit(replace(request, committed=whole.tokens[:4]), client)
    finish(engine)
    assert client.tokens == whole.tokens[4:]


def test_drafters_get_the_prompt_and_the_committed_tokens_apart() -> None:
    engine, _ = make_engine()
    drafter = ScriptedDrafter(engine)
    engine.submit(replace(REQUEST, committed=[4, 5]), Client())
    engine.drain_inbox()
    [opened] = [opened for message in drafter.received for opened in message.opened]
    assert (opened.token_ids, opened.prompt_length) == ([1, 2, 3, 4, 5], 3)
