"""The tiny model behind a real engine, and a drafter that draws from any law in any way the verifier asks for."""

from __future__ import annotations

import copy
import gc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from exact import END, LENGTH, PROMPT, VOCAB, Drafting, Law, tiny_model

from outrider.draft_tokens_policy import DraftTokensPolicy
from outrider.lm.pages import PagePool
from outrider.lm.runner import ModelRunner
from outrider.messages import (
    AcceptanceRule,
    DraftBatch,
    DraftDistribution,
    Hello,
    Proposal,
    SamplingParams,
    SparseDistribution,
    SpeculationOptions,
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

CONCURRENT = 512
MOST = 5
"""Draft tokens of a step."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is drawn from behind some text, summed up to 1, and what is said of it."""

    law: Law
    cumulative: Law
    claimed: SparseDistribution

    @classmethod
    def of(cls, law: Law, claimed: Law) -> _Known:
        ids = np.flatnonzero(claimed > 0)
        cumulative = law.cumsum()
        return cls(law, cumulative / cumulative[-1], SparseDistribution(ids, claimed[ids]))


class LawDrafter:
    """Drafts 0 to 5 tokens a step, however many chance says; each drawn from its law as the verifier asked.

    `claims` is the distribution it says it drew from, if that is another one; `drops` ends a draft before a token. What it says
    arrives up to `late` steps later, in order. With `branches` another run, drawn likewise, is beside each token.
    """

    def __init__(
        self,
        engine: Engine,
        law: Drafting,
        offers: frozenset[DraftDistribution],
        rng: np.random.Generator,
        *,
        claims: Drafting | None = None,
        sends_distributions: bool = False,
        drops: Callable[[float], bool] = lambda probability: False,
        late: int = 0,
        branches: bool = False,
    ) -> None:
        self.make_engine, self._rng, self._drops = engine, rng, drops
        self._sends_distributions = sends_distributions
        self._known = cache(lambda text: _Known.of(law(text), (claims or law)(text)))
        self._texts: dict[int, tuple[DraftDistribution, int, list[int]]] = {}
        # Committed tokens of each sequence when it was opened, behind which its text begins.
        self._opened: dict[int, int] = {}
        # What was guessed behind each text and still stands.
        self._guesses: dict[int, list[int]] = {}
        self._handle = engine.drafting.join(
            Hello("laws", "laws", "f", 8, distributions=offers), self._told
        )
        self._batch = DraftBatch()
        self._late = late
        self._branches = branches
        self._under_way: deque[tuple[int, DraftBatch]] = deque()
        self._step = 0

    def _told(self, step: object) -> None:
        assert isinstance(step, StepBatch), step
        asked = []
        for opened in step.opened:
            self._texts[opened.sequence_id] = opened.distribution, opened.sampling.seed or 0, []
            self._opened[opened.sequence_id] = len(opened.token_ids)
            asked.append(opened.sequence_id)
        for verdict in step.verdicts:
            new, number = verdict.new_token_ids, verdict.sequence_id
            self._texts[number][2].extend(new)
            # Guesses that still stand are left as they are.
            guesses = self._guesses[number]
            self._guesses[number] = guesses[len(new) :] if guesses[: len(new)] == new else []
            if not self._guesses[number]:
                asked.append(number)
        noise = self._noise(asked)
        for number in asked:
            self._propose(number, noise.get(number))
        for closed in step.closed:
            for known in (self._texts, self._guesses, self._opened):
                del known[closed.sequence_id]

    def _noise(self, sequence_ids: list[int]) -> dict[int, Law]:
        """The coupled noise of the next `MOST` positions of those that draw with it, [MOST, VOCAB] each."""
        coupled = [
            number for number in sequence_ids if self._texts[number][0] is DraftDistribution.COUPLED
        ]
        seeds, positions = [], []
        for number in coupled:
            _, seed, text = self._texts[number]
            seeds += [seed] * MOST
            length = self._opened[number] + len(text)
            positions += range(length, length + MOST)
        if not coupled:
            return {}
        noise = coupled_exponentials(
            torch.from_numpy(coupled_keys(seeds, positions)), VOCAB
        ).numpy()
        return dict(zip(coupled, noise.reshape(-1, MOST, VOCAB), strict=True))

    def _propose(self, sequence_id: int, noise: Law | None) -> None:
        rule, _, text = self._texts[sequence_id]
        tokens: list[int] = []
        distributions: list[SparseDistribution | None] = []
        for i in range(int(self._rng.integers(0, MOST + 1))):
            known = self._known((*text, *tokens))
            token = (
                self._draw(rule, known) if noise is None else int((known.law / noise[i]).argmax())
            )
            if self._drops(float(known.law[token])):
                break
            tokens.append(token)
            distributions.append(known.claimed)
        self._guesses[sequence_id] = tokens
        if tokens:
            sends = rule is DraftDistribution.SPARSE or self._sends_distributions
            length = self._opened[sequence_id] + len(text)
            self._batch.proposals.append(
                Proposal(sequence_id, length, list(tokens), [], distributions if sends else [])
            )
            if self._branches:
                self._propose_branches(sequence_id, length, tokens)

    def _propose_branches(self, sequence_id: int, length: int, main: list[int]) -> None:
        """Sampled, as deep as the main run."""
        _, _, text = self._texts[sequence_id]
        for at, avoided in enumerate(main):
            tokens: list[int] = []
            distributions: list[SparseDistribution | None] = [None] * at
            while at + len(tokens) < len(main):
                known = self._known((*text, *main[:at], *tokens))
                if not tokens:
                    law = known.law.copy()
                    law[avoided] = 0.0
                    known = _Known.of(law / law.sum(), law / law.sum())
                tokens.append(int(known.cumulative.searchsorted(self._rng.random(), "right")))
                distributions.append(known.claimed)
            self._batch.proposals.append(
                Proposal(sequence_id, length, [*main[:at], *tokens], [], distributions)
            )

    def _draw(self, rule: DraftDistribution, known: _Known) -> int:
        if rule is DraftDistribution.SPARSE or self._sends_distributions:
            return int(known.cumulative.searchsorted(self._rng.random(), "right"))
        return int(known.law.argmax())

    def send(self) -> None:
        """Say what has gathered, and deliver what is due."""
        self._step += 1
        if self._batch.proposals:
            self._under_way.append(
                (self._step + int(self._rng.integers(0, self._late + 1)), self._batch)
            )
            self._batch = DraftBatch()
        while self._under_way and self._under_way[0][0] <= self._step:
            self.make_engine.drafting.on_drafts(self._handle, self._under_way.popleft()[1])


def generate(
    sampling: SamplingParams,
    law: Drafting | None,
    draws: int,
    *,
    offers: frozenset[DraftDistribution] = frozenset({DraftDistribution.ONE_HOT}),
    sampled_rule: AcceptanceRule = AcceptanceRule.TOKEN_WISE,
    trust: bool = False,
    seed: int = 0,
    seeded: bool = False,
    speculation: SpeculationOptions | None = None,
    **drafter: Any,
) -> npt.NDArray[np.int64]:
    """The first three tokens of `draws` requests, [draws, 3] in their order, many at a time through one engine.

    Those that are `seeded` have seeds from all of 64 bits.
    """
    rng = np.random.default_rng(seed)
    engine = make_engine(sampled_rule, trust)
    laws = LawDrafter(engine, law, offers, rng, **drafter) if law is not None else None
    texts: list[list[int]] = [[] for _ in range(draws)]
    # The engine would draw a seed from the system; here the test has to come out the same each time.
    own = np.random.default_rng(seed + 1)
    with mock.patch(
        "secrets.randbits", side_effect=lambda bits: int(own.integers(2**bits, dtype=np.uint64))
    ):
        # A third of the time would go into looking for cycles among what all these requests hold.
        thresholds = gc.get_threshold()
        gc.set_threshold(200_000, 50, 100)
        try:
            _run(
                engine,
                laws,
                sampling,
                draws,
                seeded,
                speculation or SpeculationOptions(draft_tokens=5),
                texts,
            )
        finally:
            gc.set_threshold(*thresholds)
    return np.array([[*tokens[:LENGTH], *[END] * (LENGTH - len(tokens))] for tokens in texts])


def seed_of(number: int) -> int:
    """Neighbours differ in all of their 64 bits."""
    return (number + 1) * 0x9E3779B97F4A7C15 % 2**64


def _run(
    engine: Engine,
    laws: LawDrafter | None,
    sampling: SamplingParams,
    draws: int,
    seeded: bool,
    speculation: SpeculationOptions,
    texts: list[list[int]],
) -> None:
    numbers: Iterator[int] = iter(range(draws))
    done: list[int] = []

    def start() -> None:
        number = next(numbers, None)
        if number is None:
            return
        tokens = texts[number]
        request = TokenRequest(
            PROMPT,
            9,
            sampling=replace(sampling, seed=seed_of(number)) if seeded else sampling,
            stop_token_ids=frozenset({END}) if sampling.min_tokens else frozenset(),
            speculation=speculation,
        )
        sequence = engine.submit(request, lambda chunk: _collect(chunk, tokens, finish))

        def finish() -> None:
            done.append(number)
            engine.cancel(sequence)
            start()

    for _ in range(min(CONCURRENT, draws)):
        start()
    while len(done) < draws:
        engine.drain_inbox()
        if laws is not None:
            laws.send()
        engine.step()
        engine.outgoing.tell_clients()


def _collect(chunk: object, tokens: list[int], finish: Callable[[], None]) -> None:
    assert isinstance(chunk, TokenChunk), chunk
    before = len(tokens)
    tokens += chunk.token_ids
    if before < LENGTH and (len(tokens) >= LENGTH or chunk.finish_reason is not None):
        finish()


_MANY = Limits(DraftTokensPolicy("fixed", 5), 16 * CONCURRENT, CONCURRENT, 2 * CONCURRENT)


def make_engine(
    sampled_rule: AcceptanceRule,
    trust: bool,
    limits: Limits = _MANY,
    page_count: int = 8 * CONCURRENT,
) -> Engine:
    def deliver(deliveries: list[Delivery]) -> None:
        for sink, argument in deliveries:
            sink(argument)

    # A copy, since a runner takes its model over.
    runner = ModelRunner(copy.deepcopy(tiny_model()), page_size=4, page_count=page_count)
    pool = PagePool(runner.page_count, runner.page_size)
    draft_verifier = DraftVerifier(sampled_rule)
    # No draft is left out because it would not pay.
    return Engine(
        runner,
        pool,
        deliver,
        Metrics("exact"),
        limits,
        draft_verifier,
        trust_draft_distributions=trust,
        always_draft=True,
    )
