"""A verifier's trie and a drafter's state agree after messages in any order."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.draft_messages import Opened, Proposal, Verdict, Window
from outrider.protocol.messages import DraftDistribution, SamplingParams
from verifier_svc.state.trie import Trie


class LateMessages:
    """A verifier's trie and a drafter's state of one sequence, with the messages between them.

    The drafter is often right, and the verifier commits with and without drafts.
    """

    def __init__(self, data: st.DataObject) -> None:
        window = Window(token_count=24, depth=6)
        self._draw = data.draw
        self.text = [9]
        self.trie = Trie(len(self.text), window)
        greedy = SamplingParams(temperature=0.0)
        one_hot = DraftDistribution.ONE_HOT
        self.sequence = DraftSequence(Opened(1, [9], greedy, one_hot, window, draft_tokens=3))
        self._proposals: deque[Proposal] = deque()
        self._verdicts: deque[Verdict] = deque()

    def draft(self) -> None:
        sequence = self.sequence
        sequence.extend(self._draw(st.lists(LIKELY_TOKENS, min_size=1, max_size=4)))
        if sequence.guesses and self._draw(st.booleans()):
            at = self._draw(st.integers(0, len(sequence.guesses) - 1))
            sequence.branch(at, [self._draw(st.integers(1, 3)), 1])
        if proposal := sequence.take_proposal():
            self._proposals.append(proposal)

    def commit(self) -> None:
        path = self.trie.path(3).token_ids
        accepted = path[: self._draw(st.integers(0, len(path)))]
        new = [*accepted, self._draw(LIKELY_TOKENS)]
        self.text.extend(new)
        matched = self.trie.advance(new).matched
        self._verdicts.append(Verdict(1, len(self.text), new, matched, 3))

    def repeat_proposal(self) -> None:
        """Deliver the oldest proposal, and keep it to deliver it again."""
        if self._proposals:
            self.trie.add(self._proposals[0], self.text)

    def deliver_proposal(self) -> None:
        if self._proposals:
            self.trie.add(self._proposals.popleft(), self.text)

    def deliver_verdict(self) -> None:
        if self._verdicts:
            self.sequence.advance_or_rewind(self._verdicts.popleft())

    def deliver_all(self) -> None:
        while self._proposals:
            self.deliver_proposal()
        while self._verdicts:
            self.deliver_verdict()


LIKELY_TOKENS = st.sampled_from([1, 1, 1, 2])
STEPS = [
    LateMessages.draft,
    LateMessages.commit,
    LateMessages.repeat_proposal,
    LateMessages.deliver_proposal,
    LateMessages.deliver_verdict,
]


@given(st.data())
def test_both_sides_agree_after_any_delays(data: st.DataObject) -> None:
    late = LateMessages(data)
    for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=40)):
        step(late)
    late.deliver_all()
    assert late.sequence.tokens == late.text
    assert late.trie.path(99).token_ids == late.sequence.guesses
