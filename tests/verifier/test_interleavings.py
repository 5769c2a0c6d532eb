"""Whatever order messages take between verifier and drafters, texts stay as they are and both sides agree in the end."""

from __future__ import annotations

import random
from collections import Counter, deque

from fake_model import VOCAB, Client, make_engine
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft_tokens_policy import DraftTokensPolicy
from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError, Reason
from outrider.messages import (
    DraftBatch,
    DraftDistribution,
    Hello,
    Opened,
    Proposal,
    SamplingParams,
    Skip,
    StepBatch,
    TokenRequest,
    Verdict,
    Window,
)
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.target import Limits
from verifier_svc.state.trie import Trie


@given(st.data())
def test_however_late_messages_are_both_sides_agree_in_the_end(data: st.DataObject) -> None:
    """A drafter whose guesses are often right, and a verifier that commits with and without it; messages wait on the way."""
    window = Window(token_count=24, depth=6)
    text = [9]
    trie = Trie(len(text), window)
    sequence = DraftSequence(
        Opened(
            1,
            list(text),
            SamplingParams(temperature=0.0),
            DraftDistribution.ONE_HOT,
            window,
            draft_tokens=3,
        )
    )
    up: deque[Proposal] = deque()
    down: deque[Verdict] = deque()

    def draft() -> None:
        count = data.draw(st.integers(1, 4))
        sequence.extend(
            data.draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=count, max_size=count))
        )
        if sequence.guesses and data.draw(st.booleans()):
            sequence.branch(
                data.draw(st.integers(0, len(sequence.guesses) - 1)),
                [data.draw(st.integers(1, 3)), 1],
            )
        if proposal := sequence.take_proposal():
            up.append(proposal)

    def commit() -> None:
        path = trie.path(3).token_ids
        new = [
            *path[: data.draw(st.integers(0, len(path)))],
            data.draw(st.sampled_from([1, 1, 1, 2])),
        ]
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
        except OutriderError as gap:
            if gap.reason is not Reason.PROTOCOL_VIOLATION:
                raise
            self.rejoin()

    def draft(self, rng: random.Random) -> None:
        batch = DraftBatch()
        for sequence in self.sequences.values():
            wrong = [rng.randrange(VOCAB) for _ in range(rng.randrange(3))]
            sequence.extend([*self._truth(sequence)[: rng.choice([4, 3, 1, 0])], *wrong])
            if sequence.guesses and rng.random() < 0.5:
                sequence.branch(0, [rng.randrange(VOCAB), 1])
            if proposal := sequence.take_proposal():
                batch.proposals.append(proposal)
            elif rng.random() < 0.5:
                batch.skips.append(Skip(sequence.id, len(sequence.tokens)))
        self.said.append(batch)

    def _truth(self, sequence: DraftSequence) -> list[int]:
        """What the target says next; behind a wrong guess as good as any."""
        generated = len(sequence.tokens) - sequence.opened.prompt_length + len(sequence.guesses)
        return PLAIN[sequence.id - 1][generated:]

    def deliver(self, rng: random.Random, *, again: bool) -> None:
        batch = rng.choice(self.said)
        self.engine.drafting.on_drafts(self.handle, batch)
        if not again:
            self.said.remove(batch)


ACTIONS = ["well", "well", "hear", "draft", "deliver", "again", "lose", "unheard", "rejoin"]


def act(drafter: Drafter, rng: random.Random) -> None:
    action = rng.choice(ACTIONS)
    if action == "well":
        while drafter.heard:
            drafter.hear()
        drafter.draft(rng)
        drafter.deliver(rng, again=False)
    elif action == "hear" and drafter.heard:
        drafter.hear()
    elif action == "draft":
        drafter.draft(rng)
    elif action in ("deliver", "again") and drafter.said:
        drafter.deliver(rng, again=action == "again")
    elif action == "lose" and drafter.said:
        drafter.said.pop(rng.randrange(len(drafter.said)))
    elif action == "unheard" and drafter.heard:
        drafter.heard.popleft()
    elif action == "rejoin" and rng.random() < 0.25:
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


def run(rng: random.Random) -> Engine:
    """All requests, with two drafters whose messages go astray."""
    engine, _ = make_engine(
        eos_bias=-99, limits=Limits(DraftTokensPolicy("fixed", 4)), always_draft=True
    )
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


def test_every_interleaving_leaves_greedy_and_seeded_text_as_it_is() -> None:
    counted: Counter[str] = Counter()
    for seed in range(100):
        engine = run(random.Random(seed))
        engine.pool.check_integrity()
        assert engine.pool.used_count == 0
        for family in engine._metrics.registry.collect():
            counted[family.name] += int(
                sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
            )
    assert counted["outrider:spec_decode_num_accepted_tokens"] > 500
    assert counted["outrider:stale_tokens"] > 500
    assert counted["outrider:wasted_tokens"] > 500
