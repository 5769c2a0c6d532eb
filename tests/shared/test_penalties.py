"""Counts that stay on the device penalise like counts made anew from each text."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.messages import SamplingParams
from outrider.sampling.context import Context
from outrider.sampling.logits import Adjustments, adjust
from outrider.sampling.penalties import TokenCounts
from outrider.sampling.tensors import Staging

VOCAB = 12
CPU = torch.device("cpu")
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
SAMPLING = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2)


class Steps:
    """Applies penalties step by step with one table, and compares each step."""

    def __init__(self) -> None:
        self.counts = TokenCounts()
        self._random = torch.Generator().manual_seed(0)

    def lay_out(self, contexts: list[Context]) -> Adjustments:
        """Begin a step whose forward may fail."""
        staging = Staging(CPU)
        laid_out = Adjustments(contexts, staging, self.counts)
        staging.send()
        return laid_out

    def check(self, contexts: list[Context]) -> None:
        """Take a step; its logits must have the bits of a step with fresh counts."""
        rows = sum(context.row_count for context in contexts)
        logits = torch.randn(rows, VOCAB, generator=self._random)
        found = self.lay_out(contexts).apply(logits, [None] * len(contexts))
        assert torch.equal(found, adjust(logits, contexts))


def context(text: list[int], prompt_length: int, drafted: list[int]) -> Context:
    return Context(SAMPLING, text, prompt_length, drafted)


@given(data=st.data())
@settings(max_examples=60)
def test_texts_that_grow_come_and_go_are_counted_as_anew(data: st.DataObject) -> None:
    """Sequences begin, end, are left out of steps, and have drafts accepted and rejected."""
    steps = Steps()
    texts: list[tuple[list[int], int]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        if len(texts) < 6 and data.draw(st.booleans()):
            prompt, output = data.draw(TOKENS), data.draw(TOKENS)
            texts.append(([*prompt, *output], len(prompt)))
        if texts and data.draw(st.integers(0, 4)) == 0:
            texts.pop(data.draw(st.integers(0, len(texts) - 1)))
        batch = [each for each in texts if data.draw(st.booleans())]
        drafts = [data.draw(TOKENS) for _ in batch]
        pairs = zip(batch, drafts, strict=True)
        contexts = [context(*each, drafted) for each, drafted in pairs]
        if contexts and data.draw(st.integers(0, 4)) == 0:
            steps.lay_out(contexts)  # its forward fails
        if contexts:
            steps.check(contexts)
        for (text, _), drafted in zip(batch, drafts, strict=True):
            accepted = data.draw(st.integers(0, len(drafted)))
            text += [*drafted[:accepted], data.draw(st.integers(0, VOCAB - 1))]


def test_a_text_that_was_taken_back_is_counted_anew() -> None:
    steps = Steps()
    text = [1, 2, 3, 3, 4]
    steps.check([context(text, 2, [5])])
    del text[3:]
    steps.check([context(text, 2, [])])


def test_the_table_keeps_rows_for_twice_the_largest_batch_only() -> None:
    steps = Steps()
    for i in range(40):
        steps.check([context([i % VOCAB, 1], 1, []) for _ in range(3)])
    assert len(steps.counts.table(torch.empty(0, VOCAB))) == 8


def test_a_step_adds_what_was_committed_since_the_last_one() -> None:
    """A step does not count the whole text again."""
    counts = TokenCounts()
    text = [1, 2, 2, 3]
    counts.lay_out([context(text, 2, [])], Staging(CPU))
    text += [7, 8]
    counts.lay_out([context(text, 2, [])], Staging(CPU))
    assert counts._changes[1].tokens.tensor.tolist() == [7, 8]
    table = counts.table(torch.empty(0, VOCAB))
    assert table[0].tolist() == [0, 1, 3, 2, 0, 0, 0, 2, 2, 0, 0, 0]
