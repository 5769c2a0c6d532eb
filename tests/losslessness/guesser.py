"""A drafter of the small target that guesses from a table of distributions."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import numpy as np
import torch

from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError
from outrider.protocol.draft_messages import (
    DraftBatch,
    Hello,
    Proposal,
    SparseDistribution,
    StepBatch,
)
from outrider.protocol.messages import (
    DraftDistribution,
)
from outrider.sampling.noise import coupled_keys
from outrider.sampling.sampler import coupled_exponentials
from tests.losslessness.small import (
    NextProbs,
    Probs,
)
from verifier_svc.engine.loop import Engine


class Guesser:
    """A drafter that runs ahead by a random number of tokens. It draws them as the verifier asked.

    Messages from the drafter and to it arrive up to `late` ticks later, in order. In a share
    `silent` of the ticks it drafts nothing. `stops` tells from a token and its probability whether
    a run ends before that token; `ends` tells whether a chain ends after a token. With `branches`
    it also drafts one-hot branches beside its chain, and with `sampled_branches` another sampled
    run beside each token of its chain. `claims` is the distribution that it claims, if not
    `draft_probs`. If it `always_samples`, it samples even when the verifier asks for the likeliest
    token.
    """

    trusted = True

    def __init__(
        self,
        name: str,
        draft_probs: NextProbs,
        offers: Iterable[DraftDistribution],
        *,
        late: int = 0,
        silent: float = 0.2,
        stops: Callable[[int, float], bool] = lambda token, probability: False,
        ends: Callable[[int], bool] = lambda token: False,
        branches: bool = False,
        sampled_branches: bool = False,
        claims: NextProbs | None = None,
        always_samples: bool = False,
        shortest: int = 0,
        longest: int = 5,
    ) -> None:
        self.name = name
        self._draft_probs = cache(draft_probs)
        claims = claims or draft_probs
        self._claimed = cache(lambda text: _sparse(claims(text)))
        self._offers = frozenset(offers)
        self._late = late
        self._silent = silent
        self._stops = stops
        self._ends = ends
        self._branches = branches
        self._sampled_branches = sampled_branches
        self._always_samples = always_samples
        self._lengths = (shortest, longest + 1)
        self._rng = np.random.default_rng(zlib.crc32(name.encode()))
        self._sequences: dict[int, DraftSequence] = {}
        # Messages in flight, each with the tick at which it arrives.
        self._incoming: deque[tuple[int, StepBatch]] = deque()
        self._outbox: deque[tuple[int, DraftBatch]] = deque()
        self._tick = 0
        self.connected = False
        self.proposed: dict[DraftDistribution, int] = dict.fromkeys(DraftDistribution, 0)
        """The number of proposed tokens, keyed by how they were drawn."""

    def join(self, engine: Engine) -> None:
        self._engine = engine
        self._sequences.clear()
        self._incoming.clear()
        self._outbox.clear()
        self.connected = True
        hello = Hello(self.name, self.name, "f", 12, distributions=self._offers)
        self._handle = engine.drafting.join(hello, self._on_message, trusted=self.trusted)

    def leave(self) -> None:
        self._engine.drafting.leave(self._handle)
        self.connected = False

    def tick(self) -> None:
        """Read the messages that have arrived, draft, and deliver drafts that are due."""
        self._tick += 1
        while self._incoming and self._incoming[0][0] <= self._tick:
            self._read(self._incoming.popleft()[1])
        batch = DraftBatch()
        if self._rng.random() >= self._silent:
            self._grow()
            for sequence in self._sequences.values():
                if proposal := sequence.take_proposal():
                    batch.proposals.append(proposal)
                    if self._sampled_branches:
                        batch.proposals += self._runs_beside(sequence)
        self._outbox.append((self._due(), batch))
        while self._outbox and self._outbox[0][0] <= self._tick:
            due = self._outbox.popleft()[1]
            if due.proposals:
                self._engine.drafting.on_drafts(self._handle, due)

    def _due(self) -> int:
        return self._tick + int(self._rng.integers(0, self._late + 1))

    def _on_message(self, message: StepBatch | OutriderError) -> None:
        assert isinstance(message, StepBatch), message
        self._incoming.append((self._due(), message))

    def _read(self, step: StepBatch) -> None:
        for opened in step.opened:
            self._sequences[opened.sequence_id] = DraftSequence(opened)
        for verdict in step.verdicts:
            self._sequences[verdict.sequence_id].advance_or_rewind(verdict)
        for closed in step.closed:
            del self._sequences[closed.sequence_id]

    def _grow(self) -> None:
        rooms = [
            (sequence, min(sequence.remaining_window, int(self._rng.integers(*self._lengths))))
            for sequence in self._sequences.values()
            if not (sequence.guesses and self._ends(sequence.guesses[-1]))
        ]
        growing = [(sequence, count) for sequence, count in rooms if count]
        for (sequence, count), noise in zip(growing, self._noise(growing), strict=True):
            self._grow_chain(sequence, count, noise)

    def _noise(self, growing: list[tuple[DraftSequence, int]]) -> Iterator[Probs]:
        """Yield the noise of each run: [count, VOCAB] if it is coupled, else ones, [count, 1]."""
        places = [
            (sequence.opened.sampling.seed, len(sequence.tokens) + len(sequence.guesses) + i)
            for sequence, count in growing
            if sequence.opened.distribution is DraftDistribution.COUPLED
            for i in range(count)
        ]
        if places:
            seeds, positions = (np.array(column, np.uint64) for column in zip(*places, strict=True))
            keys = torch.from_numpy(coupled_keys(seeds, positions))
            numbers = coupled_exponentials(keys, self._engine.model.vocab_size).numpy()
        first = 0
        for sequence, count in growing:
            if sequence.opened.distribution is DraftDistribution.COUPLED:
                yield numbers[first : first + count]
                first += count
            else:
                yield np.ones((count, 1))

    def _grow_chain(self, sequence: DraftSequence, count: int, noise: Probs) -> None:
        text = (*sequence.tokens, *sequence.guesses)
        asked = sequence.opened.distribution
        samples = asked is DraftDistribution.SPARSE or self._always_samples
        tokens: list[int] = []
        distributions: list[SparseDistribution] = []
        for i in range(count):
            probs = self._draft_probs((*text, *tokens))
            token = self._draw(probs) if samples else int((probs / noise[i]).argmax())
            if self._stops(token, float(probs[token])):
                break
            tokens.append(token)
            distributions.append(self._claimed((*text, *tokens[:-1])))
            if self._ends(token):
                break
        if not tokens:
            return
        self.proposed[asked] += len(tokens)
        sequence.extend(tokens, distributions if samples else [])
        if self._branches:
            self._branch(sequence)

    def _branch(self, sequence: DraftSequence) -> None:
        """Branch beside a random guess: the likeliest other token, and the likeliest after it."""
        at = int(self._rng.integers(0, len(sequence.guesses)))
        text = (*sequence.tokens, *sequence.guesses[:at])
        taken = sequence.guessed_at(at)
        by_prob = self._draft_probs(text).argsort()[::-1].tolist()
        free = [token for token in by_prob if token not in taken]
        if free and sequence.window.depth >= at + 2:
            second = int(self._draft_probs((*text, free[0])).argmax())
            sequence.branch(at, [free[0], second])

    def _runs_beside(self, sequence: DraftSequence) -> Iterator[Proposal]:
        """Sample a run beside each guess. All these runs end as deep as the chain."""
        text = tuple(sequence.tokens)
        chain = list(sequence.guesses)
        for at, avoided in enumerate(chain):
            tokens: list[int] = []
            distributions: list[SparseDistribution | None] = [None] * at
            while at + len(tokens) < len(chain):
                probs = self._draft_probs((*text, *chain[:at], *tokens))
                if not tokens:
                    probs = np.where(np.arange(len(probs)) == avoided, 0.0, probs)
                tokens.append(self._draw(probs))
                distributions.append(_sparse(probs))
            yield Proposal(
                sequence.id, len(text), [*chain[:at], *tokens], distributions=distributions
            )

    def _draw(self, probs: Probs) -> int:
        sums = probs.cumsum()
        return int(sums.searchsorted(self._rng.random() * sums[-1], "right"))


def _sparse(probs: Probs) -> SparseDistribution:
    ids = np.flatnonzero(probs)
    return SparseDistribution(ids, probs[ids] / probs[ids].sum())
