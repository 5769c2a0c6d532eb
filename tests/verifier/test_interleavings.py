"""Whatever order messages take between verifier and drafters, texts stay as they are and both sides agree in the end."""

from __future__ import annotations

from collections import deque

from fake_model import VOCAB, Client, make_engine
from hypothesis import HealthCheck, given, settings, target
from hypothesis import strategies as st

from drafter_svc.draft_sequence import DraftSequence
from outrider.depth_policy import DepthPolicy
from outrider.errors import OutriderError, Reason
from outrider.messages import (
    DraftBatch,
    Hello,
    Opened,
    Proposal,
    Rule,
    SamplingParams,
    Skip,
    StepBatch,
    TokenRequest,
    Verdict,
    Window,
)
from verifier_svc.engine import Engine, Limits
from verifier_svc.trie import Trie

ANY_TIME = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))


@given(st.data())
def test_however_late_messages_are_both_sides_agree_in_the_end(data: st.DataObject) -> None:
    """A drafter whose guesses are often right, and a verifier that commits with and without it; messages wait on the way."""
    window = Window(token_count=24, depth=6)
    text = [9]
    trie = Trie(len(text), window)
    sequence = DraftSequence(Opened(1, list(text), SamplingParams(temperature=0.0), Rule.ONE_HOT, window, draft_tokens=3))
    up: deque[Proposal] = deque()
    down: deque[Verdict] = deque()

    def draft() -> None:
        count = data.draw(st.integers(1, 4))
        sequence.extend(data.draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=count, max_size=count)))
        if sequence.guesses and data.draw(st.booleans()):
            sequence.branch(data.draw(st.integers(0, len(sequence.guesses) - 1)), [data.draw(st.integers(1, 3)), 1])
        if proposal := sequence.take_proposal():
            up.append(proposal)

    def commit() -> None:
        path = trie.path(3).token_ids
        new = [*path[: data.draw(st.integers(0, len(path)))], data.draw(st.sampled_from([1, 1, 1, 2]))]
        text.extend(new)
        down.append(Verdict(1, len(text), new, trie.advance(new).matched, 3))

    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["draft", "commit", "up", "up again", "down"]))
        if action == "draft":
            draft()
        elif action == "commit":
            commit()
        elif action.startswith("up") and up:
            trie.add(up[0], text)
            if action == "up":
                up.popleft()
        elif action == "down" and down:
            sequence.follow(down.popleft())
    for proposal in up:
        trie.add(proposal, text)
    for verdict in down:
        sequence.follow(verdict)
    assert sequence.tokens == text
    assert trie.path(99).token_ids == sequence.guesses


class Drafter:
    """Drafts for all sequences; the test says what it hears, what it says, and what of that arrives, when and how often."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name
        self.join()

    def join(self) -> None:
        self.sequences: dict[int, DraftSequence] = {}
        self.heard: deque[StepBatch] = deque()
        self.said: list[DraftBatch] = []
        self.handle = self.engine.drafting.join(Hello(self.name, self.name, "f", 8), self._told)

    def _told(self, message: StepBatch | OutriderError) -> None:
        assert isinstance(message, StepBatch), message
        self.heard.append(message)

    def rejoin(self) -> None:
        self.engine.drafting.leave(self.handle)
        self.join()

    def hear(self) -> None:
        """Read the next message. A drafter that notices a gap begins anew, as a lost connection makes it do."""
        step = self.heard.popleft()
        for opened in step.opened:
            self.sequences[opened.sequence_id] = DraftSequence(opened)
        try:
            for verdict in step.verdicts:
                if verdict.sequence_id in self.sequences:
                    self.sequences[verdict.sequence_id].follow(verdict)
        except OutriderError as error:
            assert error.reason is Reason.PROTOCOL_VIOLATION
            self.rejoin()

    def draft(self, data: st.DataObject) -> None:
        batch = DraftBatch()
        for sequence in self.sequences.values():
            wrong = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
            sequence.extend([*self._truth(sequence)[: data.draw(st.integers(0, 4))], *wrong])
            if sequence.guesses and data.draw(st.booleans()):
                sequence.branch(0, [data.draw(st.integers(0, VOCAB - 1)), 1])
            if proposal := sequence.take_proposal():
                batch.proposals.append(proposal)
            elif data.draw(st.booleans()):
                batch.skips.append(Skip(sequence.id, len(sequence.tokens)))
        self.said.append(batch)

    def _truth(self, sequence: DraftSequence) -> list[int]:
        """What the target says next; behind a wrong guess as good as any."""
        generated = len(sequence.tokens) - sequence.opened.prompt_length + len(sequence.guesses)
        return PLAIN[sequence.id - 1][generated:]

    def deliver(self, data: st.DataObject, *, again: bool) -> None:
        batch = data.draw(st.sampled_from(self.said))
        self.engine.drafting.take(self.handle, batch)
        if not again:
            self.said.remove(batch)


def act(drafter: Drafter, data: st.DataObject) -> None:
    action = data.draw(
        st.sampled_from(["hear", "hear", "draft", "draft", "deliver", "deliver", "again", "lose", "unheard", "rejoin"])
    )
    if action == "hear" and drafter.heard:
        drafter.hear()
    elif action == "draft":
        drafter.draft(data)
    elif action in ("deliver", "again") and drafter.said:
        drafter.deliver(data, again=action == "again")
    elif action == "lose" and drafter.said:
        drafter.said.pop(data.draw(st.integers(0, len(drafter.said) - 1)))
    elif action == "unheard" and drafter.heard:
        drafter.heard.popleft()
    elif action == "rejoin" and data.draw(st.integers(0, 3)) == 0:
        drafter.rejoin()


REQUESTS = [
    TokenRequest([1, 2, 3], 24, SamplingParams(temperature=0.0)),
    TokenRequest([4, 5], 24, SamplingParams(temperature=1.0, seed=7)),
    TokenRequest([6, 1, 1], 24, SamplingParams(temperature=0.8, top_k=4, seed=8)),
]


def plain_texts() -> list[list[int]]:
    engine, _ = make_engine(eos_bias=-99)
    clients = [Client() for _ in REQUESTS]
    for request, client in zip(REQUESTS, clients, strict=True):
        engine.submit(request, client)
    while engine.sequences:
        engine.step()
    return [client.tokens for client in clients]


PLAIN = plain_texts()


@ANY_TIME
@given(st.data())
def test_every_interleaving_leaves_greedy_and_seeded_text_as_it_is(data: st.DataObject) -> None:
    engine, _ = make_engine(eos_bias=-99, limits=Limits(DepthPolicy("fixed", 4)))
    drafters = [Drafter(engine, "one"), Drafter(engine, "two")]
    clients = [Client() for _ in REQUESTS]
    for request, client in zip(REQUESTS, clients, strict=True):
        engine.submit(request, client)
    while engine.sequences:
        engine.drain_inbox()
        for _ in range(data.draw(st.integers(0, 4))):
            act(data.draw(st.sampled_from(drafters)), data)
        engine.step()
    assert [client.tokens for client in clients] == PLAIN
    engine.pool.check_integrity()
    assert engine.pool.used_count == 0
    accepted = sum(client.chunks[-1].stats.accepted_token_count for client in clients if client.chunks[-1].stats)
    target(accepted, label="draft tokens accepted")
