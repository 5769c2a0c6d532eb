"""A response's statistics and the metrics count the verified draft tokens."""

from outrider.protocol.messages import TokenRequest
from tests.verifier.fake_model import (
    GREEDY,
    VOCAB,
    Client,
    ScriptedDrafter,
    exposition,
    make_engine,
)


def test_statistics_count_verified_tokens() -> None:
    engine, model = make_engine(eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(TokenRequest([1, 2], 10, GREEDY), client)
    engine.drain_inbox()
    truth = model.greedy([1, 2], 10)
    drafter.propose(sequence.id, truth[:2])
    engine.step()
    drafter.propose(sequence.id, [truth[3], (truth[4] + 1) % VOCAB, 0], anew=True)
    while engine.sequences:
        engine.step()
    stats = client.chunks[-1].stats
    assert stats is not None
    assert stats.draft_count == 2
    assert stats.draft_token_count == 5
    assert stats.accepted_token_count == 3
    assert stats.histogram == [0, 1, 1]
    assert stats.forward_count == 2 + (10 - 3 - 2)
    text = exposition(engine)
    labels = 'drafter="scripted",family="scripted",model_name="fake",placement="local"'
    name = "outrider:spec_decode_num_accepted_tokens"
    assert f"{name}_total{{{labels}}} 3.0" in text
    assert f'{name}_per_pos_total{{{labels},position="1"}} 1.0' in text
    assert f'{name}_by_branch_total{{branch="main",model_name="fake"}} 3.0' in text
    emitted = "outrider:spec_decode_num_emitted_tokens_by_shape_total"
    assert f'{emitted}{{model_name="fake",shape="chain"}} 5.0' in text


def test_draft_tokens_beyond_the_end_are_not_accepted() -> None:
    engine, model = make_engine(eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    truth = model.greedy([1, 2, 3], 9)
    stop = next(i for i in range(1, 4) if truth[i] not in truth[:i])
    request = TokenRequest([1, 2, 3], 9, GREEDY, stop_token_ids=frozenset({truth[stop]}))
    sequence = engine.submit(request, client)
    engine.drain_inbox()
    drafter.propose(sequence.id, truth[:4])
    while engine.sequences:
        engine.step()
    stats = client.chunks[-1].stats
    assert stats is not None
    assert client.tokens == truth[: stop + 1]
    assert (stats.draft_token_count, stats.accepted_token_count) == (4, stop + 1)
    assert stop < 3
