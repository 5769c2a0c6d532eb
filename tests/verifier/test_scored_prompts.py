"""A prompt is scored once, in any batch and with any pages, within a step's limit of rows."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.lm.runner import SequenceSlice
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import SamplingParams, TokenRequest
from tests.verifier.fake_model import (
    EOS,
    VOCAB,
    Client,
    ScriptedDrafter,
    TableModel,
    finish,
    make_engine,
)
from verifier_svc.engine.config import EngineConfig

PROMPTS = st.lists(
    st.lists(st.integers(0, EOS - 1), min_size=1, max_size=30), min_size=1, max_size=5
)
# For each request: whether its prompt is scored, and its max_tokens.
ASKED = st.tuples(st.booleans(), st.integers(0, 20))


def expected(model: TableModel, prompt: list[int]) -> list[float]:
    """Return the log probabilities of the prompt's tokens from the second on."""
    rows = [
        model.table[prompt[max(i - 1, 0)], prompt[i]].log_softmax(-1)
        for i in range(len(prompt) - 1)
    ]
    return [row[token].item() for row, token in zip(rows, prompt[1:], strict=True)]


@given(data=st.data())
@settings(max_examples=60)
def test_every_prompt_is_scored_once_in_any_batch_with_any_number_of_pages(
    data: st.DataObject,
) -> None:
    config = EngineConfig(
        DraftTokensPolicy("fixed", data.draw(st.integers(0, 3))),
        max_batch_tokens=data.draw(st.integers(3, 40)),
        max_sequences=4,
        scored_logits_bytes=data.draw(st.integers(1, 12)) * 4 * VOCAB,
    )
    engine, model = make_engine(
        page_count=data.draw(st.integers(13, 40)), config=config, eos_bias=-99
    )
    prompts = data.draw(PROMPTS)
    asked = data.draw(st.lists(ASKED, min_size=1, max_size=8))
    served: list[tuple[Client, TokenRequest]] = []
    for i, (scored, max_tokens) in enumerate(asked):
        request = TokenRequest(
            # Prompts repeat, so that the prefix cache has some of them.
            prompts[i % len(prompts)],
            max(max_tokens, 1 - scored),
            SamplingParams(0.0),
            prompt_logprobs=2 if scored else None,
        )
        client = Client()
        served.append((client, request))
        engine.submit(request, client)
    for _ in range(3000):
        engine.step()
        if not engine.sequences:
            break
    assert not engine.sequences
    engine.pool.check_integrity()
    for client, request in served:
        scored = request.prompt_logprobs is not None
        wanted = expected(model, request.prompt) if scored else []
        found = [each.logprob for chunk in client.chunks for each in chunk.prompt_logprobs]
        assert found == pytest.approx(wanted, abs=5e-5)
        assert client.tokens == model.greedy(request.prompt, request.max_tokens)


def test_a_step_scores_prompts_up_to_its_limit_of_rows() -> None:
    engine, model = make_engine(config=EngineConfig(scored_logits_bytes=4 * 4 * VOCAB))
    rows: list[list[int]] = []

    def watch(slices: Sequence[SequenceSlice]) -> None:
        rows.append([part.logit_count for part in slices])

    model.broken = watch
    for _ in range(2):
        engine.submit(TokenRequest([1] * 10, 0, SamplingParams(0.0), prompt_logprobs=0), Client())
    while engine.sequences:
        engine.step()
    # Nine of ten tokens are scored. The last chunk has one more row, to sample from.
    assert rows == [[4], [4], [1 + 1, 3], [4], [2 + 1]]


def test_a_request_too_short_for_drafts_gets_no_drafter() -> None:
    engine, _ = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine)
    for max_tokens in (0, 1, 2):
        request = TokenRequest([1, 2], max_tokens, SamplingParams(0.0), prompt_logprobs=0)
        engine.submit(request, Client())
    engine.drain_inbox()
    assert [opened.sequence_id for step in drafter.received for opened in step.opened] == [3]


def test_more_alternatives_than_tokens_are_all_tokens_and_fail_no_batch() -> None:
    engine, model = make_engine(eos_bias=-99)
    greedy = SamplingParams(0.0)
    asked = TokenRequest([1, 2], 2, greedy, top_logprobs=20, prompt_logprobs=20)
    client, beside = Client(), Client()
    engine.submit(asked, client)
    engine.submit(TokenRequest([3], 4, greedy), beside)
    finish(engine)
    logprobs = [
        known for chunk in client.chunks for known in (*chunk.prompt_logprobs, *chunk.logprobs)
    ]
    assert [sorted(known.top_token_ids) for known in logprobs] == [list(range(VOCAB))] * 3
    assert beside.tokens == model.greedy([3], 4)
