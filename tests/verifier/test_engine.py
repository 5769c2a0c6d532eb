"""The engine commits what the target alone would, whatever drafters do, and gives everything back."""

import random
from dataclasses import replace

import pytest
from fake_model import EOS, VOCAB, Client, ScriptedDrafter, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import VirtualClock

from outrider.draft_tokens_policy import DraftTokensPolicy
from outrider.errors import OutriderError, Reason
from outrider.messages import (
    DraftDistribution,
    FinishReason,
    Proposal,
    SamplingParams,
    SpeculationOptions,
    TokenRequest,
    TokenSource,
)
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.target import Limits

GREEDY = SamplingParams(temperature=0.0)


def request(prompt: list[int], max_tokens: int = 20, **changes: object) -> TokenRequest:
    return replace(TokenRequest(prompt, max_tokens, GREEDY), **changes)  # type: ignore[arg-type]


def finish(engine: Engine, steps: int = 2000) -> None:
    """Step until nothing is left, and check that nothing is held any more."""
    for _ in range(steps):
        engine.step()
        if not engine.sequences:
            break
    assert not engine.sequences
    engine.pool.check_integrity()
    assert engine.pool.used_count == 0


def test_without_a_drafter_decoding_is_plain() -> None:
    engine, model = make_engine()
    client = Client()
    engine.submit(request([1, 2, 3]), client)
    finish(engine)
    assert client.tokens == model.greedy([1, 2, 3], 20)
    assert {source for chunk in client.chunks for source in chunk.sources} == {TokenSource.PLAIN}


def test_a_right_draft_is_committed_in_one_step_with_its_bonus_token() -> None:
    engine, model = make_engine(eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(request([1, 2, 3], 10), client)
    engine.drain_inbox()
    truth = model.greedy([1, 2, 3], 10)
    drafter.propose(sequence.id, truth[:3])
    finish(engine)
    assert client.chunks[0].token_ids == truth[:4]
    assert client.chunks[0].sources == [TokenSource.ACCEPTED] * 3 + [TokenSource.BONUS]
    assert client.chunks[0].drafter_id == "scripted"
    assert client.tokens == truth


def test_a_wrong_draft_costs_nothing_but_the_step() -> None:
    engine, model = make_engine(eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(request([1, 2, 3], 10), client)
    engine.drain_inbox()
    truth = model.greedy([1, 2, 3], 10)
    drafter.propose(sequence.id, [truth[0], (truth[1] + 1) % VOCAB, truth[2]])
    engine.step()
    verdict = drafter.told[-1].verdicts[0]
    assert (verdict.committed_length, verdict.accepted_count, verdict.new_token_ids) == (
        5,
        1,
        truth[:2],
    )
    finish(engine)
    assert client.chunks[0].token_ids == truth[:2]
    assert client.chunks[0].sources == [TokenSource.ACCEPTED, TokenSource.RECOVERED]
    assert client.tokens == truth


def test_pages_that_only_a_rejected_draft_needed_are_free_at_once() -> None:
    engine, model = make_engine(page_size=1, eos_bias=-99)
    drafter = ScriptedDrafter(engine)
    sequence = engine.submit(request([1, 2, 3], 10), Client())
    engine.drain_inbox()
    drafter.propose(sequence.id, [(token + 1) % VOCAB for token in model.greedy([1, 2, 3], 4)])
    engine.step()
    assert sequence.stats.draft_token_count == 4
    assert engine.pool.used_count == sequence.kv.num_computed_tokens == 3


def test_guesses_beyond_the_verified_depth_survive_the_step() -> None:
    engine, model = make_engine(limits=Limits(DraftTokensPolicy("fixed", 2)), eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(request([1, 2], 9), client)
    engine.drain_inbox()
    truth = model.greedy([1, 2], 9)
    drafter.propose(sequence.id, truth[:5])
    engine.step()
    engine.step()
    finish(engine)
    assert [chunk.token_ids for chunk in client.chunks[:2]] == [truth[:3], truth[3:6]]


def test_the_last_draft_token_stands_at_the_limit_and_tokens_after_it_are_never_sent() -> None:
    engine, model = make_engine(eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(request([1, 2], 3), client)
    engine.drain_inbox()
    drafter.propose(sequence.id, model.greedy([1, 2], 5)[:4])
    finish(engine)
    assert client.tokens == model.greedy([1, 2], 3)
    assert client.finish_reason is FinishReason.LENGTH


def test_an_end_token_inside_a_draft_ends_the_text_there() -> None:
    engine, model = make_engine(seed=3, eos_bias=1.5)
    truth = model.greedy([1, 2], 20)
    assert truth[-1] == EOS
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(request([1, 2], 20), client)
    engine.drain_inbox()
    drafter.propose(sequence.id, [*truth, 1, 1][:4])
    finish(engine)
    assert client.tokens == truth
    assert client.finish_reason is FinishReason.STOP


def test_stop_tokens_end_the_text_and_ignore_eos_does_not() -> None:
    engine, model = make_engine(seed=3, eos_bias=1.5)
    truth = model.greedy([1, 2], 20)
    stopped, unstopped = Client(), Client()
    engine.submit(request([1, 2], 20, stop_token_ids=frozenset({truth[0]})), stopped)
    engine.submit(request([1, 2], 20, ignore_eos=True), unstopped)
    finish(engine)
    assert stopped.tokens == truth[:1]
    assert len(unstopped.tokens) == 20


@given(data=st.data())
@settings(max_examples=60)
def test_greedy_output_is_plain_whatever_is_drafted_in_any_batch_with_any_number_of_pages(
    data: st.DataObject,
) -> None:
    policy = DraftTokensPolicy("fixed", data.draw(st.integers(0, 5)))
    limits = Limits(policy, max_batch_tokens=data.draw(st.integers(4, 40)), max_sequences=6)
    engine, model = make_engine(
        page_count=data.draw(st.integers(8, 40)), limits=limits, seed=data.draw(st.integers(0, 5))
    )
    drafters = [
        ScriptedDrafter(engine, f"d{i}", f"family{i}") for i in range(data.draw(st.integers(0, 2)))
    ]
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, EOS - 1), min_size=1, max_size=12), min_size=1, max_size=8)
    )
    clients = []
    for prompt in prompts:
        clients.append(Client())
        engine.submit(request(prompt, 16), clients[-1])
    engine.drain_inbox()
    # Not hypothesis' own randomness: how long drafting is paused depends on measured times, and so does how much is drawn.
    noise = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(3000):
        for drafter in drafters:
            for sequence in list(engine.sequences.values()):
                guess_randomly(
                    engine, drafter, sequence.id, noise, model.greedy(sequence.tokens, 6)
                )
        engine.step()
        if not engine.sequences:
            break
    finish(engine, 0) if not engine.sequences else finish(engine)
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.tokens == model.greedy(prompt, 16)


def guess_randomly(
    engine: Engine,
    drafter: ScriptedDrafter,
    sequence_id: int,
    noise: random.Random,
    truth: list[int],
) -> None:
    """Grow a chain at the root that is right for a while, wrong after that, or silent; never break the protocol."""
    assignment = engine.sequences[sequence_id].assignments.get(drafter.handle.id)
    if assignment is None or assignment.trie.node_count or noise.random() < 0.3:
        return
    if drafter.length[sequence_id] != len(engine.sequences[sequence_id].tokens):
        return  # paused, it has yet to hear of what was committed
    right = noise.randint(0, len(truth))
    tokens = [*truth[:right], *(noise.randrange(VOCAB) for _ in range(3))][
        : assignment.trie.window.depth
    ]
    if tokens:
        drafter.propose(sequence_id, tokens, anew=True)


def test_preemption_loses_nothing() -> None:
    engine, model = make_engine(page_count=8, page_size=4, eos_bias=-99)
    clients = [Client() for _ in range(4)]
    for i, client in enumerate(clients):
        engine.submit(request([i, 1, 2], 24), client)
    finish(engine)
    assert engine.scheduler.preemption_count > 0
    assert [client.tokens for client in clients] == [model.greedy([i, 1, 2], 24) for i in range(4)]


def test_a_prompt_longer_than_the_batch_is_taken_in_chunks_while_others_decode() -> None:
    engine, model = make_engine(limits=Limits(max_batch_tokens=8), eos_bias=-99)
    short, long = Client(), Client()
    decoding = engine.submit(request([1], 30), short)
    engine.step()
    prompt = [i % 7 for i in range(60)]
    engine.submit(request(prompt, 4), long)
    for _ in range(5):
        engine.step()
    assert len(decoding.tokens) == 1 + 6
    engine.step()
    assert not long.chunks
    finish(engine)
    assert long.tokens == model.greedy(prompt, 4)


def test_a_repeated_prompt_comes_from_the_prefix_cache_but_not_for_another_tenant() -> None:
    engine, _ = make_engine(eos_bias=-99)
    prompt = [i % 7 for i in range(22)]
    clients = {}
    for name, tenant in (("first", "a"), ("again", "a"), ("other", "b")):
        clients[name] = Client()
        engine.submit(request(prompt, 2, tenant=tenant), clients[name])
        finish(engine)
    cached = {name: client.chunks[-1].cached_token_count for name, client in clients.items()}
    assert cached == {"first": 0, "again": 20, "other": 0}
    assert clients["again"].tokens == clients["first"].tokens


def test_a_cancelled_sequence_is_freed_and_its_drafter_told() -> None:
    engine, _ = make_engine(eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(request([1, 2], 30), client)
    engine.drain_inbox()
    engine.step()
    engine.cancel(sequence)
    engine.drain_inbox()
    assert 'outrider:num_requests_running{model_name="fake"} 0.0' in exposition(engine)
    assert [closed.sequence_id for closed in drafter.told[-1].closed] == [sequence.id]
    assert engine.pool.used_count == 0
    engine.cancel(sequence)


def test_a_drafter_that_joins_late_is_handed_what_runs() -> None:
    engine, model = make_engine(eos_bias=-99)
    client = Client()
    sequence = engine.submit(request([1, 2], 10), client)
    engine.step()
    drafter = ScriptedDrafter(engine)
    engine.drain_inbox()
    [opened] = drafter.told[0].opened
    assert opened.token_ids == sequence.tokens
    drafter.propose(sequence.id, model.greedy(sequence.tokens, 3))
    engine.step()
    finish(engine)
    assert len(client.chunks[1].token_ids) == 4


def test_when_a_drafter_leaves_another_of_its_family_takes_over() -> None:
    engine, _ = make_engine(eos_bias=-99)
    first, second = ScriptedDrafter(engine, "one", "same"), ScriptedDrafter(engine, "two", "same")
    sequence = engine.submit(request([1, 2], 10), Client())
    engine.drain_inbox()
    assert [len(drafter.told) for drafter in (first, second)] == [1, 0]
    engine.drafting.leave(first.handle)
    engine.drain_inbox()
    assert second.told[0].opened[0].sequence_id == sequence.id
    infos = {info.drafter_id: info.connected for info in engine.drafting.roster.infos()}
    assert infos == {"two": True, "one": False}


def test_a_violation_ends_that_drafters_stream_and_no_other_sequence_suffers() -> None:
    engine, model = make_engine(eos_bias=-99)
    bad, good = ScriptedDrafter(engine, "bad", "bad"), ScriptedDrafter(engine, "good", "good")
    client = Client()
    sequence = engine.submit(request([1, 2], 10), client)
    engine.drain_inbox()
    bad.send(Proposal(sequence.id, 77, [1]))
    assert bad.error is not None
    assert bad.error.reason is Reason.PROTOCOL_VIOLATION
    good.propose(sequence.id, model.greedy([1, 2], 4))
    finish(engine)
    assert good.error is None
    assert client.tokens == model.greedy([1, 2], 10)


def test_a_drafter_that_keeps_breaking_the_protocol_is_quarantined() -> None:
    engine, _ = make_engine()
    sequence = engine.submit(request([1, 2], 10), Client())
    for _ in range(3):
        drafter = ScriptedDrafter(engine, "bad")
        drafter.send(Proposal(sequence.id, 5, [1]))
    with pytest.raises(OutriderError) as caught:
        ScriptedDrafter(engine, "bad")
    assert caught.value.reason is Reason.QUARANTINED
    ScriptedDrafter(engine, "another")


def test_a_quarantine_is_counted_from_the_third_violation_within_half_a_minute() -> None:
    clock = VirtualClock()
    clock.now = 0.0
    engine, _ = make_engine(clock=clock)
    sequence = engine.submit(request([1, 2], 10), Client())
    for clock.now in (0.0, 10.0, 31.0, 39.0):
        ScriptedDrafter(engine, "bad").send(Proposal(sequence.id, 5, [1]))
    clock.now = 68.9
    with pytest.raises(OutriderError, match="in quarantine for 1 s more") as caught:
        ScriptedDrafter(engine, "bad")
    assert caught.value.retry_after_s == pytest.approx(0.1)
    clock.now = 69.1
    ScriptedDrafter(engine, "bad")


def test_proposals_for_finished_sequences_are_ignored() -> None:
    engine, _ = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine)
    sequence = engine.submit(request([1, 2], 2), Client())
    while engine.sequences:
        engine.step()
    drafter.send(Proposal(sequence.id, 2, [1]))
    assert drafter.error is None
    assert 'outrider:stale_tokens_total{drafter="scripted"' in exposition(engine)


def exposition(engine: Engine) -> str:
    from prometheus_client import generate_latest

    return generate_latest(engine._metrics.registry).decode()


def test_metrics_of_drafters_that_are_gone_are_forgotten_and_those_of_others_stay() -> None:
    clock = VirtualClock()
    clock.now = 0.0
    engine, model = make_engine(eos_bias=-99, clock=clock)
    stays, goes, comes_back = (
        ScriptedDrafter(engine, name, name) for name in ("stays", "goes", "comes-back")
    )
    sequence = engine.submit(request([1, 2], 40), Client())
    engine.drain_inbox()
    for drafter in (stays, goes, comes_back):
        drafter.propose(sequence.id, model.greedy([1, 2], 4))
        engine.step()
    for drafter in (goes, comes_back):
        engine.drafting.leave(drafter.handle)
    engine.drain_inbox()
    assert all(
        f'drafter="{name}"' in exposition(engine) for name in ("stays", "goes", "comes-back")
    )
    ScriptedDrafter(engine, "comes-back", "comes-back")
    clock.now = 601.0
    engine.drafting.leave(ScriptedDrafter(engine, "last").handle)
    assert 'drafter="goes"' not in exposition(engine)
    assert all(f'drafter="{name}"' in exposition(engine) for name in ("stays", "comes-back"))


def test_what_is_remembered_of_lost_drafters_is_bounded() -> None:
    engine, _ = make_engine()
    for i in range(300):
        engine.drafting.leave(ScriptedDrafter(engine, f"d{i}").handle)
    infos = engine.drafting.roster.infos()
    assert len(infos) == 256
    assert infos[-1].drafter_id == "d299"


def test_two_drafters_of_one_name_cannot_be_connected() -> None:
    engine, _ = make_engine()
    ScriptedDrafter(engine, "one")
    with pytest.raises(OutriderError) as caught:
        ScriptedDrafter(engine, "one")
    assert caught.value.reason is Reason.DRAFTER_ID_TAKEN


def test_a_request_chooses_its_drafter_by_id_or_family_or_none() -> None:
    engine, _ = make_engine()
    drafters = [ScriptedDrafter(engine, "a", "x"), ScriptedDrafter(engine, "b", "y")]
    for options, expected in (
        (SpeculationOptions(), {"a", "b"}),
        (SpeculationOptions(drafter="y"), {"b"}),
        (SpeculationOptions(drafter="a"), {"a"}),
        (SpeculationOptions(enabled=False), set()),
        (SpeculationOptions(draft_tokens=0), set()),
    ):
        sequence = engine.submit(request([1], 5, speculation=options), Client())
        assert set(sequence.assignments) == expected
    assert len(drafters) == 2
    with pytest.raises(
        OutriderError, match=r"speculation.drafter must be one of a, b, x, y, not nobody"
    ):
        engine.submit(request([1], 5, speculation=SpeculationOptions(drafter="nobody")), Client())


def test_a_distribution_counts_only_from_trusted_drafters_and_only_when_sampling() -> None:
    for trust, sampling, rule in (
        (False, SamplingParams(), DraftDistribution.ONE_HOT),
        (True, SamplingParams(), DraftDistribution.SPARSE),
        (True, GREEDY, DraftDistribution.ONE_HOT),
    ):
        engine, _ = make_engine(trust=trust)
        drafter = ScriptedDrafter(
            engine, distributions=frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE})
        )
        engine.submit(request([1], 5, sampling=sampling), Client())
        engine.drain_inbox()
        assert drafter.told[0].opened[0].distribution is rule


def test_a_request_that_can_never_fit_or_comes_to_a_full_queue_is_refused() -> None:
    engine, _ = make_engine(page_count=4, page_size=4, limits=Limits(max_waiting=1))
    with pytest.raises(OutriderError, match="the KV cache holds 16") as caught:
        engine.submit(request([1] * 10, 7), Client())
    assert caught.value.field == "max_tokens"
    for _ in range(2):
        # The first takes all pages, the second waits.
        engine.submit(request([1] * 13, 3), Client())
    with pytest.raises(OutriderError) as caught:
        engine.submit(request([1], 7), Client())
    assert caught.value.reason is Reason.OVERLOADED
    assert caught.value.retry_after_s == 1.0


def test_a_caller_that_wants_the_whole_text_gets_the_first_token_at_once_and_the_rest_together() -> (
    None
):
    engine, model = make_engine(eos_bias=-99)
    client = Client()
    engine.submit(request([1, 2], 12, min_chunk_tokens=12), client)
    finish(engine)
    assert [len(chunk.token_ids) for chunk in client.chunks] == [1, 11]
    assert client.tokens == model.greedy([1, 2], 12)
    assert all(len(chunk.sources) == len(chunk.token_ids) for chunk in client.chunks)
