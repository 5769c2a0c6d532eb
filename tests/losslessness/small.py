"""Traffic over one engine, with a target small enough to enumerate and drafters that run ahead, are late, come and go.

The target's logits depend on the whole text, which it reads back from the pages it is given, so that a page of another text, or
one that was overwritten, changes what it says.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from outrider.clock import Clock, monotonic
from outrider.draft_tokens_policy import DraftTokensPolicy
from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError
from outrider.lm.pages import PagePool
from outrider.lm.runner import SequenceSlice
from outrider.messages import (
    AcceptanceRule,
    DraftBatch,
    DraftDistribution,
    Hello,
    SamplingParams,
    SparseDistribution,
    StepBatch,
    TokenChunk,
    TokenRequest,
)
from outrider.sampling.noise import coupled_keys
from outrider.sampling.sampler import coupled_exponentials
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outgoing import Delivery
from verifier_svc.engine.target import Limits
from verifier_svc.metrics import Metrics
from verifier_svc.verification.batch import DraftVerifier

VOCAB = 5
LENGTH = 3
"""Tokens of a text whose joint law is looked at."""
Law = npt.NDArray[np.float64]
Text = tuple[int, ...]
Laws = Callable[[Text], Law]
PROMPTS: tuple[Text, ...] = ((2,), (1, 2, 3, 4, 0, 1), (1, 2, 3, 4, 0, 1, 2, 3, 4, 1, 0))
"""Those of more than a page begin alike."""


@cache
def target_law(text: Text) -> Law:
    """Of the token behind a text, prompt included."""
    logits = np.random.default_rng(zlib.crc32(bytes(text))).normal(size=VOCAB) * 1.3
    law: Law = torch.from_numpy(logits).softmax(-1).numpy()
    return law


def fixed_law(*law: float) -> Laws:
    """The same behind every text."""
    return lambda text: np.array(law)


def near(law: Laws, share: float = 0.6, seed: int = 1) -> Laws:
    """A drafter's law: partly another one, and another behind every text."""

    @cache
    def mixed(text: Text) -> Law:
        other = np.random.default_rng([seed, zlib.crc32(bytes(text))]).dirichlet(np.ones(VOCAB))
        found: Law = share * law(text) + (1 - share) * other
        return found

    return mixed


class SmallTarget:
    """A model for the engine; a forward takes as long as `seconds` says of its number of tokens, on a clock of the test's."""

    vocab_size = VOCAB
    eos_token_ids = ()

    def __init__(self, law: Laws, page_count: int, page_size: int) -> None:
        self._law = cache(lambda text: torch.from_numpy(np.log(law(text) + 1e-300)).float())
        self._pages = np.full((page_count, page_size), -1, np.int16)
        self.takes: Callable[[int], None] = lambda token_count: None

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        size, rows = self._pages.shape[1], []
        self.takes(sum(len(part.token_ids) for part in slices))
        for part in slices:
            end = part.start + len(part.token_ids)
            at, pages = np.arange(part.start, end), np.array(part.pages)
            self._pages[pages[at // size], at % size] = part.token_ids
            text = tuple(self._pages[pages].flatten()[:end].tolist())
            assert min(text) >= 0, "a past that is not in its pages"
            rows += [self._law(text[: end - n]) for n in reversed(range(part.logit_count))]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)


class Guesser:
    """A drafter that goes on below its own guesses, with runs of a random length drawn as it was asked to.

    It hears and speaks up to `late` ticks later, in order, and stays silent in a share of `silent` ticks. `stops` ends a run before
    a token of such a probability. With `branches` it guesses beside its chain as well, one-hot.
    """

    def __init__(
        self,
        name: str,
        law: Laws,
        offers: Iterable[DraftDistribution],
        *,
        late: int = 0,
        silent: float = 0.2,
        stops: Callable[[int, float], bool] = lambda token, probability: False,
        branches: bool = False,
        shortest: int = 0,
        longest: int = 5,
    ) -> None:
        self.name, self._law, self._offers = name, cache(law), frozenset(offers)
        self._late, self._silent, self._stops, self._branches = late, silent, stops, branches
        self._lengths = (shortest, longest + 1)
        self._rng = np.random.default_rng(zlib.crc32(name.encode()))
        self._sequences: dict[int, DraftSequence] = {}
        self._heard: deque[tuple[int, StepBatch]] = deque()
        self._said: deque[tuple[int, DraftBatch]] = deque()
        self._tick = 0
        self.connected = False
        self.proposed: dict[DraftDistribution, int] = dict.fromkeys(DraftDistribution, 0)
        """Tokens, by how they were drawn."""

    def join(self, engine: Engine) -> None:
        self._engine = engine
        self._sequences.clear()
        self._heard.clear()
        self._said.clear()
        self.connected = True
        self._handle = engine.drafting.join(
            Hello(self.name, self.name, "f", 12, distributions=self._offers), self._hear
        )

    def leave(self) -> None:
        self._engine.drafting.leave(self._handle)
        self.connected = False

    def tick(self) -> None:
        """Read what has arrived, guess, and let arrive what was said."""
        self._tick += 1
        while self._heard and self._heard[0][0] <= self._tick:
            self._read(self._heard.popleft()[1])
        batch = DraftBatch()
        if self._rng.random() >= self._silent:
            self._grow()
            taken = [sequence.take_proposal() for sequence in self._sequences.values()]
            batch.proposals += [proposal for proposal in taken if proposal is not None]
        self._said.append((self._due(), batch))
        while self._said and self._said[0][0] <= self._tick:
            if (said := self._said.popleft()[1]).proposals:
                self._engine.drafting.on_drafts(self._handle, said)

    def _due(self) -> int:
        return self._tick + int(self._rng.integers(0, self._late + 1))

    def _hear(self, message: StepBatch | OutriderError) -> None:
        assert isinstance(message, StepBatch), message
        self._heard.append((self._due(), message))

    def _read(self, step: StepBatch) -> None:
        for opened in step.opened:
            self._sequences[opened.sequence_id] = DraftSequence(opened)
        for verdict in step.verdicts:
            self._sequences[verdict.sequence_id].follow(verdict)
        for closed in step.closed:
            del self._sequences[closed.sequence_id]

    def _grow(self) -> None:
        rooms = [
            (sequence, min(sequence.room, int(self._rng.integers(*self._lengths))))
            for sequence in self._sequences.values()
        ]
        growing = [(sequence, count) for sequence, count in rooms if count]
        for (sequence, count), noise in zip(growing, self._noise(growing), strict=True):
            self._grow_chain(sequence, count, noise)

    def _noise(self, growing: list[tuple[DraftSequence, int]]) -> Iterator[Law]:
        """The coupled noise of the positions of each run, [count, VOCAB]; of those alone that know the seed."""
        places = [
            (sequence.opened.sampling.seed, len(sequence.tokens) + len(sequence.guesses) + i)
            for sequence, count in growing
            if sequence.opened.distribution is DraftDistribution.COUPLED
            for i in range(count)
        ]
        if places:
            keys = torch.from_numpy(
                coupled_keys(*(np.array(column, np.uint64) for column in zip(*places, strict=True)))
            )
            numbers = coupled_exponentials(keys, VOCAB).numpy()
        first = 0
        for sequence, count in growing:
            if sequence.opened.distribution is DraftDistribution.COUPLED:
                yield numbers[first : first + count]
                first += count
            else:
                yield np.ones((count, VOCAB))

    def _grow_chain(self, sequence: DraftSequence, count: int, noise: Law) -> None:
        text, tokens, laws = (*sequence.tokens, *sequence.guesses), [], []
        rule = sequence.opened.distribution
        for i in range(count):
            law = self._law((*text, *tokens))
            token = (
                self._draw(law)
                if rule is DraftDistribution.SPARSE
                else int((law / noise[i]).argmax())
            )
            if self._stops(token, float(law[token])):
                break
            tokens.append(token)
            laws.append(_sparse(law))
        if not tokens:
            return
        self.proposed[rule] += len(tokens)
        sequence.extend(tokens, laws if rule is DraftDistribution.SPARSE else [])
        if self._branches:
            self._branch(sequence)

    def _branch(self, sequence: DraftSequence) -> None:
        """What seems likeliest beside one of the tokens ahead, and behind that."""
        at = int(self._rng.integers(0, len(sequence.guesses)))
        text, taken = (*sequence.tokens, *sequence.guesses[:at]), sequence.guessed_at(at)
        free = [token for token in self._law(text).argsort()[::-1].tolist() if token not in taken]
        if free and sequence.window.depth >= at + 2:
            sequence.branch(at, [free[0], int(self._law((*text, free[0])).argmax())])

    def _draw(self, law: Law) -> int:
        sums = law.cumsum()
        return int(sums.searchsorted(self._rng.random() * sums[-1], "right"))


def _sparse(law: Law) -> SparseDistribution:
    ids = np.flatnonzero(law)
    return SparseDistribution(ids, law[ids] / law[ids].sum())


@dataclass
class Traffic:
    """Requests through one engine, `concurrent` at a time, each with a prompt of its own by turns."""

    law: Laws = target_law
    prompts: tuple[Text, ...] = PROMPTS
    rule: AcceptanceRule = AcceptanceRule.BLOCK
    trust: bool = True
    policy: DraftTokensPolicy = field(default_factory=lambda: DraftTokensPolicy("fixed", 3))
    length: int = LENGTH + 2
    """Tokens that each request generates."""
    first: int = 0
    """The first of those whose joint law is looked at."""
    concurrent: int = 96
    page_count: int = 2048
    page_size: int = 4
    max_batch_tokens: int = 2048
    seed: Callable[[int], int | None] = lambda number: None
    always: bool = True
    in_waves: bool = False
    """Whether the next requests begin once all are done, so that all are equally far."""
    events: Callable[[int], object] = lambda tick: None
    """What else happens at a tick."""
    clock: Clock = monotonic
    paused_ticks: int = field(default=0, init=False)
    """Those at which some sequence's drafter was paused."""

    def __post_init__(self) -> None:
        def deliver(deliveries: list[Delivery]) -> None:
            for sink, argument in deliveries:
                sink(argument)

        self.model = SmallTarget(self.law, self.page_count, self.page_size)
        limits = Limits(self.policy, self.max_batch_tokens, self.concurrent, 2 * self.concurrent)
        pool, draft_verifier = PagePool(self.page_count, self.page_size), DraftVerifier(self.rule)
        self.engine = Engine(
            self.model,
            pool,
            deliver,
            Metrics("small"),
            limits,
            draft_verifier,
            trust_draft_distributions=self.trust,
            always_draft=self.always,
            clock=self.clock,
        )

    def run(self, draws: int, *drafters: Guesser) -> npt.NDArray[np.int64]:
        """What `draws` requests generate, [draws, length], in the order of the requests."""
        # The engine would draw seeds from the system; here a test has to come out the same each time.
        own = np.random.default_rng(7)
        with mock.patch(
            "secrets.randbits", side_effect=lambda bits: int(own.integers(2**bits, dtype=np.uint64))
        ):
            return self.run_with_the_systems_seeds(draws, *drafters)

    def run_with_the_systems_seeds(self, draws: int, *drafters: Guesser) -> npt.NDArray[np.int64]:
        """As `run`, each time with other seeds."""
        engine, texts = self.engine, [list[int]() for _ in range(draws)]
        for drafter in drafters:
            drafter.join(engine)
        started = 0
        for tick in itertools.count():
            self.events(tick)
            room = (
                0 if self.in_waves and engine.sequences else self.concurrent - len(engine.sequences)
            )
            for _ in range(min(room, draws - started)):
                self._submit(started, texts[started])
                started += 1
            if started == draws and not engine.sequences:
                break
            assigned = [
                a for sequence in engine.sequences.values() for a in sequence.assignments.values()
            ]
            self.paused_ticks += not all(assignment.asked for assignment in assigned)
            engine.drain_inbox()
            for drafter in drafters:
                if drafter.connected:
                    drafter.tick()
            engine.step()
            engine.outgoing.tell_clients()
        engine.pool.check_integrity()
        assert engine.pool.used_count == 0
        return np.array(texts)

    def _submit(self, number: int, text: list[int]) -> None:
        def collect(chunk: TokenChunk | OutriderError) -> None:
            assert isinstance(chunk, TokenChunk), chunk
            text.extend(chunk.token_ids)

        prompt = list(self.prompts[number % len(self.prompts)])
        sampling = replace(SamplingParams(), seed=self.seed(number))
        self.engine.submit(TokenRequest(prompt, self.length, sampling), collect)

    def expected(self, draws: int) -> Law:
        """How often each prompt and each text of `LENGTH` tokens should come, [prompts * VOCAB ** LENGTH]."""
        counts = np.bincount(np.arange(draws) % len(self.prompts), minlength=len(self.prompts))
        return np.concatenate(
            [
                count * self._joint(prompt).flatten()
                for prompt, count in zip(self.prompts, counts, strict=True)
            ]
        )

    def _joint(self, prompt: Text) -> Law:
        """Of the tokens that are looked at, whatever is before them; [VOCAB] * LENGTH."""
        found = np.zeros([VOCAB] * LENGTH)
        for text in itertools.product(range(VOCAB), repeat=self.first + LENGTH):
            found[text[self.first :]] += np.prod(
                [self.law((*prompt, *text[:i]))[token] for i, token in enumerate(text)]
            )
        return found

    def observed(self, texts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How often they came."""
        prompts = np.arange(len(texts)) % len(self.prompts)
        looked_at = texts[:, self.first : self.first + LENGTH]
        cells = looked_at @ VOCAB ** np.arange(LENGTH)[::-1] + prompts * VOCAB**LENGTH
        return np.bincount(cells, minlength=len(self.prompts) * VOCAB**LENGTH)
