"""Messages between verifier and drafters in any order leave the texts unchanged."""

from __future__ import annotations

import random
from collections import Counter, deque

from fake_model import VOCAB, Client, make_engine
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import (
    DraftBatch,
    Hello,
    Opened,
    Proposal,
    Skip,
    StepBatch,
    Verdict,
    Window,
)
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import DraftDistribution, SamplingParams, TokenRequest
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.state.trie import Trie


class LateMessages:
    """A verifier's trie and a drafter's state of one sequence; messages wait between them.

    Its guesses are often right, and the verifier commits with and without drafts.
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
            self.sequence.follow(self._verdicts.popleft())

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


class Drafter:
    """Drafts for all sequences. The test delivers, repeats, delays and drops its messages."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.join()

    def join(self) -> None:
        self.sequences: dict[int, DraftSequence] = {}
        self.inbox: deque[StepBatch] = deque()
        self.outbox: list[DraftBatch] = []
        self.handle = self.engine.drafting.join(Hello(self.name, self.name, "f", 8), self._receive)

    def _receive(self, message: StepBatch | OutriderError) -> None:
        assert isinstance(message, StepBatch), message
        self.inbox.append(message)

    def rejoin(self) -> None:
        self.engine.drafting.leave(self.handle)
        self.join()

    def read(self) -> None:
        """Read the next message. A gap before it makes the drafter connect again."""
        step = self.inbox.popleft()
        for opened in step.opened:
            self.sequences[opened.sequence_id] = DraftSequence(opened)
        try:
            for verdict in step.verdicts:
                if verdict.sequence_id in self.sequences:
                    self.sequences[verdict.sequence_id].follow(verdict)
        except OutriderError as gap:
            if gap.reason is not Reason.PROTOCOL_VIOLATION:
                raise
            self.rejoin()

    def draft(self, rng: random.Random) -> None:
        batch = DraftBatch()
        for sequence in self.sequences.values():
            wrong = [rng.randrange(VOCAB) for _ in range(rng.randrange(3))]
            right = self._truth(sequence)[: rng.choice([4, 3, 1, 0])]
            sequence.extend([*right, *wrong])
            if sequence.guesses and rng.random() < 0.5:
                sequence.branch(0, [rng.randrange(VOCAB), 1])
            if proposal := sequence.take_proposal():
                batch.proposals.append(proposal)
            elif rng.random() < 0.5:
                batch.skips.append(Skip(sequence.id, len(sequence.tokens)))
        self.outbox.append(batch)

    def _truth(self, sequence: DraftSequence) -> list[int]:
        """The target's next tokens, as if all guesses so far were right."""
        generated = len(sequence.tokens) - sequence.opened.prompt_length + len(sequence.guesses)
        return PLAIN[sequence.id - 1][generated:]

    def deliver(self, rng: random.Random, *, again: bool) -> None:
        batch = rng.choice(self.outbox)
        self.engine.drafting.on_drafts(self.handle, batch)
        if not again:
            self.outbox.remove(batch)


ACTIONS = ["well", "well", "read", "draft", "deliver", "again", "lose", "skip", "rejoin"]


def act(drafter: Drafter, rng: random.Random) -> None:
    """Do something with one drafter's messages."""
    action = rng.choice(ACTIONS)
    if action == "well":
        while drafter.inbox:
            drafter.read()
        drafter.draft(rng)
        drafter.deliver(rng, again=False)
    elif action == "read" and drafter.inbox:
        drafter.read()
    elif action == "draft":
        drafter.draft(rng)
    elif action in ("deliver", "again") and drafter.outbox:
        drafter.deliver(rng, again=action == "again")
    elif action == "lose" and drafter.outbox:
        drafter.outbox.pop(rng.randrange(len(drafter.outbox)))
    elif action == "skip" and drafter.inbox:
        drafter.inbox.popleft()
    elif action == "rejoin" and rng.random() < 0.25:
        drafter.rejoin()


REQUESTS = [
    TokenRequest([1, 2, 3], 24, SamplingParams(temperature=0.0)),
    TokenRequest([4, 5], 24, SamplingParams(temperature=1.0, seed=7)),
    TokenRequest([6, 1, 1], 24, SamplingParams(temperature=0.8, top_k=4, seed=8)),
]


def plain_texts() -> list[list[int]]:
    """The texts of all requests without drafters."""
    engine, _ = make_engine(eos_bias=-99)
    clients = [Client() for _ in REQUESTS]
    for request, client in zip(REQUESTS, clients, strict=True):
        engine.submit(request, client)
    while engine.sequences:
        engine.step()
    return [client.tokens for client in clients]


PLAIN = plain_texts()


def run(rng: random.Random) -> Engine:
    """Serve all requests with two drafters whose messages are late, repeated or lost."""
    config = EngineConfig(DraftTokensPolicy("fixed", 4))
    engine, _ = make_engine(eos_bias=-99, config=config, always_draft=True)
    drafters = [Drafter(engine, "one"), Drafter(engine, "two")]
    clients = [Client() for _ in REQUESTS]
    for request, client in zip(REQUESTS, clients, strict=True):
        engine.submit(request, client)
    while engine.sequences:
        engine.drain_inbox()
        for _ in range(rng.randrange(4)):
            act(rng.choice(drafters), rng)
        engine.step()
    assert [client.tokens for client in clients] == PLAIN
    return engine


def test_every_interleaving_leaves_greedy_and_seeded_texts_unchanged() -> None:
    counted: Counter[str] = Counter()
    for seed in range(40):
        engine = run(random.Random(seed))
        engine.pool.check_integrity()
        assert engine.pool.used_count == 0
        for metric in engine._metrics.registry.collect():
            totals = [sample.value for sample in metric.samples if sample.name.endswith("_total")]
            counted[metric.name] += int(sum(totals))
    assert counted["outrider:spec_decode_num_accepted_tokens"] > 200
    assert counted["outrider:stale_tokens"] > 200
    assert counted["outrider:wasted_tokens"] > 200
