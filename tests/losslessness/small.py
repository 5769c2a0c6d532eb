"""Traffic over one engine with a small target, and drafters that run ahead, are late, come and go.

The target's distribution can be enumerated. It depends on the whole text, which the target reads
from its pages. So a page of another text, or one that was overwritten, changes the output.
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

from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError
from outrider.lm.pages import PagePool
from outrider.lm.runner import SequenceSlice
from outrider.process.clock import Clock, monotonic
from outrider.protocol.draft_messages import (
    DraftBatch,
    Hello,
    Proposal,
    SparseDistribution,
    StepBatch,
)
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import (
    AcceptanceRule,
    DraftDistribution,
    SamplingParams,
    SpeculationOptions,
    TokenChunk,
    TokenRequest,
)
from outrider.protocol.token_tree import path_to
from outrider.sampling.noise import coupled_keys
from outrider.sampling.sampler import coupled_exponentials
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import Metrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT, PAYING_DRAFTS
from verifier_svc.verification.batch import DraftVerifier

VOCAB = 5
LENGTH = 3
"""Tokens of a text whose joint distribution is compared."""
Probs = npt.NDArray[np.float64]
Text = tuple[int, ...]
NextProbs = Callable[[Text], Probs]
"""The distribution of the token behind a text, prompt included."""
NextLogits = Callable[[Text], torch.Tensor]
"""The logits of the token behind a text, [V]."""
PROMPTS: tuple[Text, ...] = ((2,), (1, 2, 3, 4, 0, 1), (1, 2, 3, 4, 0, 1, 2, 3, 4, 1, 0))
"""Prompts that are longer than a page begin alike."""


@cache
def target_probs(text: Text) -> Probs:
    """A random distribution of its own behind each text."""
    logits = np.random.default_rng(zlib.crc32(bytes(text))).normal(size=VOCAB) * 1.3
    probs: Probs = torch.from_numpy(logits).softmax(-1).numpy()
    return probs


def fixed(*probs: float) -> NextProbs:
    """The same distribution behind every text."""
    return lambda text: np.array(probs)


def near(target: NextProbs, share: float = 0.6, seed: int = 1) -> NextProbs:
    """A mixture of the target's distribution, with weight `share`, and a random one."""

    @cache
    def mixed(text: Text) -> Probs:
        other = np.random.default_rng([seed, zlib.crc32(bytes(text))]).dirichlet(np.ones(VOCAB))
        found: Probs = share * target(text) + (1 - share) * other
        return found

    return mixed


class SmallTarget:
    """A model for the engine. `takes` gets the number of tokens of each forward."""

    eos_token_ids = ()

    def __init__(self, logits: NextLogits, page_count: int, page_size: int) -> None:
        self.vocab_size = len(logits(PROMPTS[0]))
        self._logits = logits
        self._pages = np.full((page_count, page_size), -1, np.int16)
        self.takes: Callable[[int], None] = lambda token_count: None

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        size = self._pages.shape[1]
        rows: list[torch.Tensor] = []
        self.takes(sum(len(part.token_ids) for part in slices))
        for part in slices:
            at = np.arange(part.start, part.end)
            pages = np.array(part.pages)
            self._pages[pages[at // size], at % size] = part.token_ids
            text = tuple(self._pages[pages].flatten()[: part.end].tolist())
            assert min(text) >= 0, "a token of the past is not in its page"
            for slot in range(part.end - part.logit_count, part.end):
                rows.append(self._logits(_text_of(part, text, slot)))
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots, as `LanguageModel.move_tokens`."""
        flat = self._pages.reshape(-1)
        flat[targets] = flat[sources]


def _text_of(part: SequenceSlice, cached: Text, slot: int) -> Text:
    """The text that ends with the token of `slot`: what is before a tree, and a path in it."""
    first = part.tree_start
    path = path_to(slot - first + 1, part.parents)
    if not path:
        return cached[: slot + 1]
    return (*cached[:first], *[cached[first - 1 + row] for row in path])


class Guesser:
    """A drafter that runs ahead in runs of a random length, drawn as the verifier asked.

    Messages from and to it arrive up to `late` ticks later, in order. It drafts nothing in a share
    `silent` of the ticks. `stops` ends a run before a token of such a probability, and `ends` a
    chain behind such a token. With `branches` it also drafts one-hot branches beside its chain, and
    with `sampled_branches` another sampled run beside each token of its chain. `claims` is the
    distribution that it claims, if not `draft_probs`. If it `always_samples`, it does so though
    the verifier asks for the likeliest token.
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
        """Proposed tokens, by how they were drawn."""

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
            self._sequences[verdict.sequence_id].follow(verdict)
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
        """The coupled noise of each run's positions, [count, VOCAB]; ones for other runs."""
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
        """Branch beside a random guess: the likeliest other token, and the likeliest behind it."""
        at = int(self._rng.integers(0, len(sequence.guesses)))
        text = (*sequence.tokens, *sequence.guesses[:at])
        taken = sequence.guessed_at(at)
        by_prob = self._draft_probs(text).argsort()[::-1].tolist()
        free = [token for token in by_prob if token not in taken]
        if free and sequence.window.depth >= at + 2:
            second = int(self._draft_probs((*text, free[0])).argmax())
            sequence.branch(at, [free[0], second])

    def _runs_beside(self, sequence: DraftSequence) -> Iterator[Proposal]:
        """Sampled runs beside each guess, each as long as the chain."""
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


def step(engine: Engine, drafters: Iterable[Guesser] = ()) -> None:
    """One step of the engine, before which each connected drafter may draft."""
    engine.drain_inbox()
    for drafter in drafters:
        if drafter.connected:
            drafter.tick()
    engine.step()
    engine.outbox.send_to_clients()


@dataclass
class Traffic:
    """Requests through one engine, `concurrent` at a time, which take turns with the prompts."""

    probs: NextProbs = target_probs
    """The target's."""
    logits: NextLogits | None = None
    """The target's, if not those of `probs`."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    stop_token: int | None = None
    """A token that ends a text; behind its end a text is filled with it."""
    enough: int = 64
    """A request is cancelled when it has this many tokens."""
    prompts: tuple[Text, ...] = PROMPTS
    rule: AcceptanceRule = AcceptanceRule.BLOCK
    trust: bool = True
    policy: DraftTokensPolicy = field(default_factory=lambda: DraftTokensPolicy("fixed", 3))
    length: int = LENGTH + 2
    """Tokens that each request generates."""
    first: int = 0
    """The first of the tokens whose joint distribution is compared."""
    concurrent: int = 96
    page_count: int = 2048
    page_size: int = 4
    max_batch_tokens: int = 2048
    seed: Callable[[int], int | None] = lambda number: None
    always: bool = True
    trees: bool = False
    in_waves: bool = False
    """Whether the next requests begin only when all are done, so that all are equally far."""
    events: Callable[[int], object] = lambda tick: None
    """Called at each tick."""
    clock: Clock = monotonic
    paused_ticks: int = field(default=0, init=False)
    """Ticks at which some sequence's drafter was paused."""

    def __post_init__(self) -> None:
        def deliver(deliveries: list[Delivery]) -> None:
            for sink, argument in deliveries:
                sink(argument)

        logits = self.logits or cache(
            lambda text: torch.from_numpy(np.log(self.probs(text) + 1e-300)).float()
        )
        self.model = SmallTarget(logits, self.page_count, self.page_size)
        config = EngineConfig(
            self.policy, self.max_batch_tokens, self.concurrent, 2 * self.concurrent
        )
        config = replace(config, draft_trees=self.trees)
        self.engine = Engine(
            self.model,
            PagePool(self.page_count, self.page_size),
            deliver,
            Metrics("small"),
            config,
            DraftVerifier(self.rule),
            sampled_drafts=self.trust,
            drafts=EVERY_DRAFT if self.always else PAYING_DRAFTS,
            clock=self.clock,
        )

    def run(self, draws: int, *drafters: Guesser) -> npt.NDArray[np.int64]:
        """The tokens that `draws` requests generate, [draws, length], by request."""
        # The engine would draw seeds from the system; a test must come out the same each time.
        own = np.random.default_rng(7)
        with mock.patch(
            "secrets.randbits", side_effect=lambda bits: int(own.integers(2**bits, dtype=np.uint64))
        ):
            return self.run_with_the_systems_seeds(draws, *drafters)

    def run_with_the_systems_seeds(self, draws: int, *drafters: Guesser) -> npt.NDArray[np.int64]:
        """As `run`, but with other seeds each time."""
        engine = self.engine
        texts = [list[int]() for _ in range(draws)]
        for drafter in drafters:
            drafter.join(engine)
        started = 0
        for tick in itertools.count():
            self.events(tick)
            room = self.concurrent - len(engine.sequences)
            if self.in_waves and engine.sequences:
                room = 0
            for _ in range(min(room, draws - started)):
                self._submit(started, texts[started])
                started += 1
            if started == draws and not engine.sequences:
                break
            assigned = [
                a for sequence in engine.sequences.values() for a in sequence.assignments.values()
            ]
            self.paused_ticks += not all(assignment.asked for assignment in assigned)
            step(engine, drafters)
        engine.pool.check_integrity()
        assert engine.pool.used_count == 0
        length = min(self.length, self.enough)
        padded = [[*text, *[self.stop_token or 0] * length][:length] for text in texts]
        return np.array(padded)

    def _submit(self, number: int, text: list[int]) -> None:
        def collect(chunk: TokenChunk | OutriderError) -> None:
            assert isinstance(chunk, TokenChunk), chunk
            text.extend(chunk.token_ids)
            if len(text) >= self.enough:
                self.engine.cancel(sequence)

        request = TokenRequest(
            list(self.prompts[number % len(self.prompts)]),
            self.length,
            replace(self.sampling, seed=self.seed(number)),
            stop_token_ids=frozenset() if self.stop_token is None else frozenset({self.stop_token}),
            speculation=self.speculation,
        )
        sequence = self.engine.submit(request, collect)

    def expected(self, draws: int) -> Probs:
        """Expected counts by prompt and text of `LENGTH` tokens, [prompts * VOCAB ** LENGTH]."""
        counts = np.bincount(np.arange(draws) % len(self.prompts), minlength=len(self.prompts))
        pairs = zip(self.prompts, counts, strict=True)
        return np.concatenate([count * self._joint(prompt).flatten() for prompt, count in pairs])

    def _joint(self, prompt: Text) -> Probs:
        """Joint distribution of the compared tokens, summed over those before; [VOCAB] * LENGTH."""
        found = np.zeros([VOCAB] * LENGTH)
        for text in itertools.product(range(VOCAB), repeat=self.first + LENGTH):
            found[text[self.first :]] += np.prod(
                [self.probs((*prompt, *text[:i]))[token] for i, token in enumerate(text)]
            )
        return found

    def observed(self, texts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Counts of the same cells in the texts, [draws, length]."""
        prompts = np.arange(len(texts)) % len(self.prompts)
        compared = texts[:, self.first : self.first + LENGTH]
        cells = compared @ VOCAB ** np.arange(LENGTH)[::-1] + prompts * VOCAB**LENGTH
        return np.bincount(cells, minlength=len(self.prompts) * VOCAB**LENGTH)


def seed_of(number: int) -> int:
    """A request's seed. Seeds of neighbours differ in all of their 64 bits."""
    return (number + 1) * 0x9E3779B97F4A7C15 % 2**64
