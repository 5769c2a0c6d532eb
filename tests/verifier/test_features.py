"""A drafter gets the features that it asked for: for each committed token once, in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import OutriderError, Reason
from outrider.lm.streams import SharedRows
from outrider.protocol.draft_messages import FeatureDtype, FeatureRequest
from outrider.protocol.messages import TokenRequest
from tests.random_trees import TreeGrafter
from tests.verifier.fake_model import (
    GREEDY,
    VOCAB,
    Client,
    ScriptedDrafter,
    TableModel,
    finish,
    make_engine,
)
from verifier_svc.drafts import features
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine

REQUEST = FeatureRequest((2, 0), final_state=True, dtype=FeatureDtype.FLOAT32)
PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]


def wanted(text: list[int], request: FeatureRequest = REQUEST) -> np.ndarray:
    """Return the features that the table model gives for a text's tokens."""
    rows = []
    for position, token in enumerate(text):
        state = (text[max(position - 1, 0)], token, position)
        rows.append([number + 100 * k for k in request.states for number in state])
    return np.array(rows, np.float32)


def received(drafter: ScriptedDrafter, sequence_id: int) -> dict[int, np.ndarray]:
    """Return the features of a sequence, keyed by position.

    Positions must come once and in order.
    """
    found: dict[int, np.ndarray] = {}
    for message in drafter.received:
        for entry in message.features:
            if entry.sequence_id != sequence_id:
                continue
            rows = np.frombuffer(entry.rows, np.float32).reshape(-1, drafter.handle.feature_width)
            for at, row in enumerate(rows, entry.first_position):
                assert at > max(found, default=-1)
                found[at] = row
    return found


def run(
    engine: Engine, drafter: ScriptedDrafter, model: TableModel, request: TokenRequest, wrong: int
) -> tuple[int, list[int]]:
    """Answer a request while the drafter guesses.

    A draft's last guess is wrong where the number of tokens that the client has is a multiple of
    `wrong`. Returns the sequence's id and its whole text.
    """
    client = Client()
    sequence = engine.submit(request, client)
    truth = model.greedy(request.prompt, request.max_tokens)
    while engine.sequences:
        engine.step()
        done = len(client.tokens)
        if engine.sequences and drafter.length.get(sequence.id, 0) > len(request.prompt):
            guesses = truth[done : done + 4]
            if guesses and done % wrong == 0:
                guesses[-1] = (guesses[-1] + 1) % 7
            if guesses:
                drafter.propose(sequence.id, guesses, anew=True)
    finish(engine)
    return sequence.id, [*request.prompt, *client.tokens]


@pytest.mark.parametrize("wrong", [1, 3])
@pytest.mark.parametrize("max_batch_tokens", [3, 64])
def test_every_committed_token_but_the_last_has_its_features_once(
    wrong: int, max_batch_tokens: int
) -> None:
    config = EngineConfig(max_batch_tokens=max_batch_tokens)
    engine, model = make_engine(config=config, eos_bias=-99, always_draft=True)
    drafter = ScriptedDrafter(engine, feature_request=REQUEST)
    assert drafter.handle.feature_width == 3 * model.hidden_size
    number, text = run(engine, drafter, model, TokenRequest(PROMPT, 24, GREEDY), wrong)
    found = received(drafter, number)
    # No verdict follows the last step.
    assert len(PROMPT) + 15 < len(found) < len(text)
    assert sorted(found) == list(range(len(found)))
    np.testing.assert_array_equal(np.stack(list(found.values())), wanted(text)[: len(found)])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_accepted_paths_of_trees_have_the_features_of_their_text(seed: int) -> None:
    engine, model = make_engine(
        page_size=3, page_count=30, seed=seed, eos_bias=-99, always_draft=True
    )
    drafter = ScriptedDrafter(engine, feature_request=REQUEST)
    grafter = TreeGrafter(engine, seed, VOCAB, lambda each: model.greedy(each.tokens, 8))
    clients = [Client(), Client()]
    numbers = [
        engine.submit(TokenRequest(PROMPT[:count], 16, GREEDY), client).id
        for count, client in zip((4, 7), clients, strict=True)
    ]
    finish(engine)
    assert grafter.tree_count
    for number, count, client in zip(numbers, (4, 7), clients, strict=True):
        text = [*PROMPT[:count], *client.tokens]
        found = received(drafter, number)
        assert found
        for position, row in found.items():
            np.testing.assert_array_equal(row, wanted(text)[position])


def test_a_prompts_features_come_while_it_is_read() -> None:
    engine, _ = make_engine(config=EngineConfig(max_batch_tokens=3), eos_bias=-99)
    drafter = ScriptedDrafter(engine, feature_request=REQUEST)
    engine.submit(TokenRequest(PROMPT, 2, GREEDY), Client())
    engine.step()
    engine.step()
    assert [len(message.opened) for message in drafter.received] == [1, 0, 0]
    assert [entry.first_position for m in drafter.received for entry in m.features] == [0, 3]
    assert not any(message.verdicts for message in drafter.received)


def test_tokens_of_the_prefix_cache_leave_a_gap() -> None:
    engine, model = make_engine(eos_bias=-99, always_draft=True)
    drafter = ScriptedDrafter(engine, feature_request=REQUEST)
    request = TokenRequest(PROMPT, 6, GREEDY)
    run(engine, drafter, model, request, 2)
    number, text = run(engine, drafter, model, request, 2)
    found = received(drafter, number)
    assert min(found) == 8, "two pages of four tokens were cached"
    np.testing.assert_array_equal(np.stack(list(found.values())), wanted(text)[8 : max(found) + 1])


@pytest.mark.parametrize("last", [0, 3])
def test_only_the_last_tokens_of_a_prompt_have_features_if_so_requested(last: int) -> None:
    engine, model = make_engine(eos_bias=-99, always_draft=True)
    wanted = replace(REQUEST, last_prompt_token_count=last)
    drafter = ScriptedDrafter(engine, feature_request=wanted)
    number, _ = run(engine, drafter, model, TokenRequest(PROMPT, 6, GREEDY), 2)
    assert min(received(drafter, number)) == len(PROMPT) - last


def test_features_wait_until_the_drafter_is_told_of_their_tokens() -> None:
    engine, _ = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine, feature_request=REQUEST)
    client = Client()
    number = engine.submit(TokenRequest(PROMPT, 40, GREEDY), client).id
    finish(engine)
    told = 0
    for message in drafter.received:
        for opened in message.opened:
            told = max(told, len(opened.token_ids))
        for verdict in message.verdicts:
            told = max(told, verdict.committed_length)
        for entry in message.features:
            count = len(entry.rows) // (4 * drafter.handle.feature_width)
            assert entry.first_position + count < told or told == len(PROMPT)
    assert received(drafter, number)


def test_features_of_a_drafter_that_is_never_asked_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(features, "_MAX_HELD_TOKENS", 4)
    engine, _ = make_engine(eos_bias=-99)
    ScriptedDrafter(engine, feature_request=REQUEST)
    sequence = engine.submit(TokenRequest(PROMPT, 60, GREEDY), Client())
    most = 0
    while engine.sequences:
        engine.step()
        for assignment in sequence.assignments.values():
            most = max(most, len(assignment.held_features))
    assert 0 < most <= 6


def test_features_that_wait_keep_no_other_sequences_rows_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the verifier's process, features are parts of a whole step's tensor."""
    engine, model = make_engine(eos_bias=-99)
    pick = model.pick_states

    def pick_beside_others(*asked: Any) -> torch.Tensor:
        rows = pick(*asked)
        return torch.cat([rows, torch.zeros(500, rows.shape[1])])[: len(rows)]

    monkeypatch.setattr(model, "pick_states", pick_beside_others)
    ScriptedDrafter(engine, feature_request=REQUEST, is_local=True)
    sequence = engine.submit(TokenRequest(PROMPT, 60, GREEDY), Client())
    most = 0
    while engine.sequences:
        engine.step()
        for assignment in sequence.assignments.values():
            for entry in assignment.held_features:
                assert isinstance(entry.rows, SharedRows)
                assert entry.rows.read().untyped_storage().nbytes() == entry.rows.nbytes
            most = max(most, len(assignment.held_features))
    assert most > 8


def test_a_drafter_that_asks_for_none_gets_none_and_nothing_is_kept() -> None:
    engine, model = make_engine(eos_bias=-99, always_draft=True)
    drafter = ScriptedDrafter(engine)
    number, _ = run(engine, drafter, model, TokenRequest(PROMPT, 6, GREEDY), 2)
    assert not received(drafter, number)
    assert model.watched == set()


def test_states_are_kept_only_while_a_drafter_wants_them() -> None:
    engine, model = make_engine()
    first = ScriptedDrafter(engine, "one", feature_request=FeatureRequest((1,)))
    second = ScriptedDrafter(engine, "two", feature_request=FeatureRequest((0,)))
    assert model.watched == {0, 1}
    engine.drafting.leave(first.handle)
    assert model.watched == {0}
    engine.drafting.leave(second.handle)
    assert model.watched == set()


def test_long_entries_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_MAX_ENTRY_BYTES", 100)
    engine, model = make_engine(eos_bias=-99, always_draft=True)
    drafter = ScriptedDrafter(engine, feature_request=REQUEST)
    number, text = run(engine, drafter, model, TokenRequest(PROMPT, 6, GREEDY), 2)
    assert max(len(e.rows) for m in drafter.received for e in m.features) <= 100
    found = received(drafter, number)
    np.testing.assert_array_equal(np.stack(list(found.values())), wanted(text)[: len(found)])


class FirstTwo:
    """A projection that keeps two of nine numbers."""

    states, projected_width = REQUEST.states, 2

    def __call__(self, features: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(features[:, :2])


def test_a_known_projection_is_applied_for_the_drafter_that_asks_for_it_alone() -> None:
    engine, model = make_engine(eos_bias=-99, always_draft=True)
    model.projections = {"first-two": FirstTwo()}
    asking = replace(REQUEST, projection="first-two")
    asks = ScriptedDrafter(engine, "asks", feature_request=asking)
    other = ScriptedDrafter(engine, "other", family="b", feature_request=REQUEST)
    narrow = replace(asking, aux_layers=(0, 2))
    unfit = ScriptedDrafter(engine, "unfit", family="c", feature_request=narrow)
    unknown = replace(REQUEST, projection="another")
    strange = ScriptedDrafter(engine, "strange", family="d", feature_request=unknown)
    granted = [
        (d.handle.feature_width, d.handle.projects_features) for d in (asks, other, unfit, strange)
    ]
    assert granted == [(2, True), (9, False), (9, False), (9, False)]
    number, text = run(engine, asks, model, TokenRequest(PROMPT, 24, GREEDY), 3)
    found, states = received(asks, number), received(other, number)
    assert len(found) > len(PROMPT)
    for at, row in found.items():
        np.testing.assert_array_equal(row, wanted(text)[at, :2])
    for at, row in states.items():
        np.testing.assert_array_equal(row, wanted(text)[at])
    assert len(states) > len(PROMPT) - 2


def test_a_layer_that_the_target_lacks_is_refused_by_name() -> None:
    engine, _ = make_engine()
    with pytest.raises(OutriderError) as refused:
        ScriptedDrafter(engine, feature_request=FeatureRequest((1, 3)))
    assert refused.value.reason is Reason.INVALID_VALUE
    assert str(refused.value).endswith("hello.feature_request.aux_layers must be in [0, 2], not 3")


def test_a_target_that_keeps_no_states_grants_no_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, model = make_engine(eos_bias=-99, always_draft=True)
    monkeypatch.setattr(model, "can_watch", lambda states: False)
    drafter = ScriptedDrafter(engine, feature_request=REQUEST)
    assert drafter.handle.feature_width == 0
    number, _ = run(engine, drafter, model, TokenRequest(PROMPT, 6, GREEDY), 2)
    assert not received(drafter, number)
