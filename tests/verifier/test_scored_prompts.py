"""Whatever batches and pages there are, each prompt that asks is scored once, with as many rows of logits a step as are allowed."""

from collections.abc import Sequence

from fake_model import EOS, VOCAB, Client, ScriptedDrafter, TableModel, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft_tokens_policy import DraftTokensPolicy
from outrider.lm.runner import SequenceSlice
from outrider.messages import SamplingParams, TokenRequest
from verifier_svc.engine.target import Limits

PROMPTS = st.lists(
    st.lists(st.integers(0, EOS - 1), min_size=1, max_size=30), min_size=1, max_size=5
)
# Whether each request wants its prompt scored, and its max_tokens; prompts repeat, so that the prefix cache has something to offer.
ASKED = st.tuples(st.booleans(), st.integers(0, 20))


def expected(model: TableModel, prompt: list[int]) -> list[float]:
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
    limits = Limits(
        DraftTokensPolicy("fixed", data.draw(st.integers(0, 3))),
        max_batch_tokens=data.draw(st.integers(3, 40)),
        max_sequences=4,
        scored_logits_bytes=data.draw(st.integers(1, 12)) * 4 * VOCAB,
    )
    engine, model = make_engine(
        page_count=data.draw(st.integers(13, 40)), limits=limits, eos_bias=-99
    )
    bases, asked = data.draw(PROMPTS), data.draw(st.lists(ASKED, min_size=1, max_size=8))
    told: list[tuple[Client, TokenRequest]] = []
    for i, (scored, max_tokens) in enumerate(asked):
        prompt = bases[i % len(bases)]
        request = TokenRequest(
            prompt,
            max(max_tokens, 1 - scored),
            SamplingParams(0.0),
            prompt_logprobs=2 if scored else None,
        )
        told.append((Client(), request))
        engine.submit(request, told[-1][0])
    for _ in range(3000):
        engine.step()
        if not engine.sequences:
            break
    assert not engine.sequences
    engine.pool.check_integrity()
    for client, request in told:
        logprobs = [logprob for chunk in client.chunks for logprob in chunk.prompt_logprobs]
        wanted = expected(model, request.prompt) if request.prompt_logprobs is not None else []
        assert [round(logprob.logprob, 4) for logprob in logprobs] == [
            round(value, 4) for value in wanted
        ]
        assert client.tokens == model.greedy(request.prompt, request.max_tokens)


def test_a_step_takes_as_many_rows_of_logits_for_prompts_as_are_allowed() -> None:
    engine, model = make_engine(limits=Limits(scored_logits_bytes=4 * 4 * VOCAB))
    rows: list[list[int]] = []

    def watch(slices: Sequence[SequenceSlice]) -> None:
        rows.append([part.logit_count for part in slices])

    model.broken = watch
    for _ in range(2):
        engine.submit(TokenRequest([1] * 10, 0, SamplingParams(0.0), prompt_logprobs=0), Client())
    while engine.sequences:
        engine.step()
    # Nine of ten tokens are scored; the last chunk has a row more, to draw from.
    assert rows == [[4], [4], [1 + 1, 3], [4], [2 + 1]]


def test_who_could_commit_no_draft_is_handed_to_no_drafter() -> None:
    engine, _ = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine)
    for max_tokens in (0, 1, 2):
        engine.submit(
            TokenRequest([1, 2], max_tokens, SamplingParams(0.0), prompt_logprobs=0), Client()
        )
    engine.drain_inbox()
    assert [opened.sequence_id for step in drafter.told for opened in step.opened] == [3]
