"""The engine commits the target's tokens with any drafts, and frees everything at the end."""

import hashlib
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import OutriderError, Reason
from outrider.lm.pages import KVSequence
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import TokenRequest, TokenSource
from tests.verifier.fake_model import (
    EOS,
    GREEDY,
    VOCAB,
    Client,
    ScriptedDrafter,
    exposition,
    finish,
    make_engine,
)
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine

PROMPT = st.lists(st.integers(0, EOS - 1), min_size=1, max_size=12)


def request(prompt: list[int], max_tokens: int = 20, **changes: object) -> TokenRequest:
    """Return a greedy request with some fields changed."""
    return replace(TokenRequest(prompt, max_tokens, GREEDY), **changes)


def test_a_wrong_draft_costs_nothing_but_the_step() -> None:
    engine, model = make_engine(eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(request([1, 2, 3], 10), client)
    engine.drain_inbox()
    truth = model.greedy([1, 2, 3], 10)
    drafter.propose(sequence.id, [truth[0], (truth[1] + 1) % VOCAB, truth[2]])
    engine.step()
    [verdict] = drafter.received[-1].verdicts
    assert verdict.committed_length == 5
    assert verdict.matched_token_count == 1
    assert verdict.new_token_ids == truth[:2]
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
def test_greedy_output_is_plain_with_any_drafts_batches_and_pages(
    data: st.DataObject,
) -> None:
    policy = DraftTokensPolicy("fixed", data.draw(st.integers(0, 5)))
    config = EngineConfig(policy, max_batch_tokens=data.draw(st.integers(4, 40)), max_sequences=6)
    pages = data.draw(st.integers(8, 40))
    engine, model = make_engine(page_count=pages, config=config, seed=data.draw(st.integers(0, 5)))
    drafter_count = data.draw(st.integers(0, 2))
    drafters = [ScriptedDrafter(engine, f"d{i}", f"family{i}") for i in range(drafter_count)]
    prompts = data.draw(st.lists(PROMPT, min_size=1, max_size=8))
    clients = []
    for prompt in prompts:
        clients.append(Client())
        engine.submit(request(prompt, 16), clients[-1])
    engine.drain_inbox()
    # The number of draws depends on measured times, because they decide how long drafting is
    # paused. So the draws cannot come from hypothesis.
    noise = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(3000):
        for drafter in drafters:
            for sequence in list(engine.sequences.values()):
                truth = model.greedy(sequence.tokens, 6)
                guess_randomly(engine, drafter, sequence.id, noise, truth)
        engine.step()
        if not engine.sequences:
            break
    finish(engine, 0 if not engine.sequences else 2000)
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.tokens == model.greedy(prompt, 16)


def guess_randomly(
    engine: Engine,
    drafter: ScriptedDrafter,
    sequence_id: int,
    noise: random.Random,
    truth: list[int],
) -> None:
    """Propose a chain at the root, first right and then wrong tokens, or nothing.

    The proposal never breaks the protocol.
    """
    assignment = engine.sequences[sequence_id].assignments.get(drafter.handle.id)
    if assignment is None or assignment.trie.node_count or noise.random() < 0.3:
        return
    if drafter.length[sequence_id] != len(engine.sequences[sequence_id].tokens):
        return  # the drafter is paused, so it does not know the last tokens
    right = noise.randint(0, len(truth))
    wrong = [noise.randrange(VOCAB) for _ in range(3)]
    tokens = [*truth[:right], *wrong][: assignment.trie.window.depth]
    if tokens:
        drafter.propose(sequence_id, tokens, anew=True)


def test_a_long_prompt_is_processed_in_chunks_while_others_decode() -> None:
    engine, model = make_engine(config=EngineConfig(max_batch_tokens=8), eos_bias=-99)
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


def test_a_cancelled_sequence_is_freed_and_closed_to_its_drafter() -> None:
    engine, _ = make_engine(eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(request([1, 2], 30), client)
    engine.drain_inbox()
    engine.step()
    engine.cancel(sequence)
    engine.drain_inbox()
    assert 'outrider:num_requests_running{model_name="fake"} 0.0' in exposition(engine)
    assert [closed.sequence_id for closed in drafter.received[-1].closed] == [sequence.id]
    assert engine.pool.used_count == 0
    engine.cancel(sequence)


def test_a_request_that_cannot_fit_or_queue_is_refused() -> None:
    engine, _ = make_engine(page_count=4, page_size=4, config=EngineConfig(max_waiting=1))
    with pytest.raises(OutriderError, match="the KV cache holds 16") as caught:
        engine.submit(request([1] * 10, 7), Client())
    assert caught.value.field == "max_tokens"
    for _ in range(2):
        # The first request takes all pages, and the second one waits.
        engine.submit(request([1] * 13, 3), Client())
    with pytest.raises(OutriderError) as caught:
        engine.submit(request([1], 7), Client())
    assert caught.value.reason is Reason.OVERLOADED
    assert caught.value.retry_after_s == 1.0


def test_min_chunk_tokens_delays_all_tokens_but_the_first() -> None:
    engine, model = make_engine(eos_bias=-99)
    client = Client()
    engine.submit(request([1, 2], 12, min_chunk_tokens=12), client)
    finish(engine)
    assert [len(chunk.token_ids) for chunk in client.chunks] == [1, 11]
    assert client.tokens == model.greedy([1, 2], 12)
    assert all(len(chunk.sources) == len(chunk.token_ids) for chunk in client.chunks)


@pytest.mark.parametrize("max_batch_tokens", [8, 64])
def test_pages_of_a_prompt_belong_to_its_tenant(max_batch_tokens: int) -> None:
    """The step of any chunk but the last commits no token, and yet caches the chunk's pages."""
    config = EngineConfig(max_batch_tokens=max_batch_tokens)
    engine, _ = make_engine(config=config, eos_bias=-99)
    prompt = [i % 7 for i in range(22)]
    cached = []
    for tenant in ("a", "", "a"):
        client = Client()
        engine.submit(request(prompt, 2, tenant=tenant), client)
        finish(engine)
        cached.append(client.chunks[-1].cached_token_count)
    assert cached == [0, 0, 20]


def test_the_youngest_of_a_tenants_sequences_is_preempted() -> None:
    """Together, the two sequences outgrow the cache.

    The older sequence never gives its pages away.
    """
    engine, _ = make_engine(page_count=8, page_size=4, eos_bias=-99)
    older = engine.submit(request([1, 2], 24), Client())
    younger = engine.submit(request([3, 4], 24), Client())
    while engine.scheduler.preemption_count == 0:
        engine.step()
    assert list(engine.scheduler.running) == [older.id]
    assert list(engine.scheduler.waiting) == [younger]


def test_a_text_that_waits_for_pages_is_hashed_once_and_shares_pages_as_soon_as_that_suffices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two equal prompts fit the cache together only after most of the first has been written."""
    config = EngineConfig(max_batch_tokens=4)
    engine, model = make_engine(page_count=12, page_size=4, eos_bias=-99, config=config)
    hashed: list[bytes] = []
    sha256 = hashlib.sha256

    def watch(content: bytes) -> Any:
        hashed.append(content)
        return sha256(content)

    monkeypatch.setattr(hashlib, "sha256", watch)
    prompt = [i % 7 for i in range(33)]
    clients = [Client(), Client()]
    for client in clients:
        engine.submit(request(prompt, 3), client)
    finish(engine)
    assert [client.tokens for client in clients] == [model.greedy(prompt, 3)] * 2
    assert clients[1].chunks[-1].cached_token_count == 24
    # A page's hash covers 32 + 4 * 4 bytes; only the hash of a first page also covers the salt. The
    # first request hashes its first page to look it up and to enter it, and the second request to
    # wait for it and to share it.
    assert sum(len(content) != 48 for content in hashed) == 4


def test_a_draft_for_which_no_page_is_free_is_not_counted_for_its_drafter() -> None:
    engine, model = make_engine(page_count=2, page_size=4, eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(request([1, 2, 3, 4], 4), client)
    engine.drain_inbox()
    drafter.propose(sequence.id, model.greedy([1, 2, 3, 4], 3))
    taken = KVSequence()
    assert engine.pool.reserve(taken, 4)
    engine.step()
    assert sequence.stats.draft_token_count == 0
    engine.pool.free(taken)
    finish(engine)
    assert client.chunks[0].sources == [TokenSource.PLAIN]
    assert client.chunks[0].drafter_id == ""
    assert client.chunks[0].draft_token_count == 0
    assert client.tokens == model.greedy([1, 2, 3, 4], 4)
