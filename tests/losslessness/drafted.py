"""The tiny model behind a real engine, and a drafter that draws from any distribution."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from exact import END, LENGTH, PROMPT, VOCAB, NextProbs, Probs, tiny_model

from outrider.lm.pages import PagePool
from outrider.lm.runner import ModelRunner
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
from outrider.sampling.noise import coupled_keys
from outrider.sampling.sampler import coupled_exponentials
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import Metrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT
from verifier_svc.verification.batch import DraftVerifier

CONCURRENT = 512
MOST = 5
"""Draft tokens of a step."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The distribution that a token is drawn from behind some text."""

    probs: Probs
    cumulative: Probs
    """Its running sums, the last of which is 1."""
    claimed: SparseDistribution
    """The distribution that the drafter claims."""

    @classmethod
    def of(cls, probs: Probs, claimed: Probs) -> _Known:
        ids = np.flatnonzero(claimed > 0)
        cumulative = probs.cumsum()
        return cls(probs, cumulative / cumulative[-1], SparseDistribution(ids, claimed[ids]))


class RandomDrafter:
    """Drafts 0 to 5 tokens a step, each drawn from `draft_probs` as the verifier asked.

    `claims` is the distribution that it claims, if not `draft_probs`. `drops` ends a draft before a
    token of such a probability. Messages arrive up to `late` steps later, in order. With `branches`
    it drafts another run, drawn likewise, beside each token.
    """

    def __init__(
        self,
        engine: Engine,
        draft_probs: NextProbs,
        offers: frozenset[DraftDistribution],
        rng: np.random.Generator,
        *,
        claims: NextProbs | None = None,
        sends_distributions: bool = False,
        drops: Callable[[float], bool] = lambda probability: False,
        late: int = 0,
        branches: bool = False,
    ) -> None:
        self._engine = engine
        self._rng = rng
        self._drops = drops
        self._sends_distributions = sends_distributions
        claims = claims or draft_probs
        self._known = cache(lambda text: _Known.of(draft_probs(text), claims(text)))
        self._texts: dict[int, tuple[DraftDistribution, int, list[int]]] = {}
        # Committed tokens of each sequence when it was announced; its text begins behind them.
        self._opened: dict[int, int] = {}
        # The guesses behind each text that no verdict contradicted.
        self._guesses: dict[int, list[int]] = {}
        hello = Hello("random", "random", "f", 8, distributions=offers)
        self._handle = engine.drafting.join(hello, self._on_message)
        self._batch = DraftBatch()
        self._late = late
        self._branches = branches
        self._in_flight: deque[tuple[int, DraftBatch]] = deque()
        self._step = 0

    def _on_message(self, step: object) -> None:
        assert isinstance(step, StepBatch), step
        asked = []
        for opened in step.opened:
            self._texts[opened.sequence_id] = opened.distribution, opened.sampling.seed or 0, []
            self._opened[opened.sequence_id] = len(opened.token_ids)
            asked.append(opened.sequence_id)
        for verdict in step.verdicts:
            new = verdict.new_token_ids
            number = verdict.sequence_id
            self._texts[number][2].extend(new)
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

    def _noise(self, sequence_ids: list[int]) -> dict[int, Probs]:
        """The noise of the next `MOST` positions of coupled sequences, [MOST, VOCAB] by id."""
        coupled = [
            number for number in sequence_ids if self._texts[number][0] is DraftDistribution.COUPLED
        ]
        seeds: list[int] = []
        positions: list[int] = []
        for number in coupled:
            _, seed, text = self._texts[number]
            seeds += [seed] * MOST
            length = self._opened[number] + len(text)
            positions += range(length, length + MOST)
        if not coupled:
            return {}
        keys = torch.from_numpy(coupled_keys(seeds, positions))
        noise = coupled_exponentials(keys, VOCAB).numpy()
        return dict(zip(coupled, noise.reshape(-1, MOST, VOCAB), strict=True))

    def _propose(self, sequence_id: int, noise: Probs | None) -> None:
        rule, _, text = self._texts[sequence_id]
        tokens: list[int] = []
        distributions: list[SparseDistribution | None] = []
        for i in range(int(self._rng.integers(0, MOST + 1))):
            known = self._known((*text, *tokens))
            if noise is None:
                token = self._draw(rule, known)
            else:
                token = int((known.probs / noise[i]).argmax())
            if self._drops(float(known.probs[token])):
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
        """Propose sampled branches beside each token of the main run, as long as it."""
        _, _, text = self._texts[sequence_id]
        for at, avoided in enumerate(main):
            tokens: list[int] = []
            distributions: list[SparseDistribution | None] = [None] * at
            while at + len(tokens) < len(main):
                known = self._known((*text, *main[:at], *tokens))
                if not tokens:
                    others = known.probs.copy()
                    others[avoided] = 0.0
                    others /= others.sum()
                    known = _Known.of(others, others)
                tokens.append(int(known.cumulative.searchsorted(self._rng.random(), "right")))
                distributions.append(known.claimed)
            self._batch.proposals.append(
                Proposal(sequence_id, length, [*main[:at], *tokens], [], distributions)
            )

    def _draw(self, rule: DraftDistribution, known: _Known) -> int:
        if rule is DraftDistribution.SPARSE or self._sends_distributions:
            return int(known.cumulative.searchsorted(self._rng.random(), "right"))
        return int(known.probs.argmax())

    def send(self) -> None:
        """Send the gathered proposals, and deliver messages that are due."""
        self._step += 1
        if self._batch.proposals:
            due = self._step + int(self._rng.integers(0, self._late + 1))
            self._in_flight.append((due, self._batch))
            self._batch = DraftBatch()
        while self._in_flight and self._in_flight[0][0] <= self._step:
            self._engine.drafting.on_drafts(self._handle, self._in_flight.popleft()[1])


def generate(
    sampling: SamplingParams,
    draft_probs: NextProbs | None,
    draws: int,
    *,
    offers: frozenset[DraftDistribution] = frozenset({DraftDistribution.ONE_HOT}),
    sampled_rule: AcceptanceRule = AcceptanceRule.TOKEN_WISE,
    trust: bool = False,
    seed: int = 0,
    seeded: bool = False,
    speculation: SpeculationOptions | None = None,
    **behaviour: Any,
) -> npt.NDArray[np.int64]:
    """The first three tokens of `draws` requests, [draws, 3], many at a time through one engine.

    `behaviour` are further arguments of `RandomDrafter`. `seeded` requests have 64-bit seeds.
    """
    engine = make_engine(sampled_rule, trust)
    drafter: RandomDrafter | None = None
    if draft_probs is not None:
        rng = np.random.default_rng(seed)
        drafter = RandomDrafter(engine, draft_probs, offers, rng, **behaviour)
    requests = _Requests(
        engine, sampling, seeded, speculation or SpeculationOptions(draft_tokens=5), draws
    )
    # The engine would draw seeds from the system; a test must come out the same each time.
    own = np.random.default_rng(seed + 1)
    with mock.patch(
        "secrets.randbits", side_effect=lambda bits: int(own.integers(2**bits, dtype=np.uint64))
    ):
        requests.run(drafter)
    padded = [[*tokens[:LENGTH], *[END] * (LENGTH - len(tokens))] for tokens in requests.texts]
    return np.array(padded)


def seed_of(number: int) -> int:
    """Seeds of neighbours differ in all of their 64 bits."""
    return (number + 1) * 0x9E3779B97F4A7C15 % 2**64


class _Requests:
    """`draws` requests, `CONCURRENT` at a time."""

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams,
        seeded: bool,
        speculation: SpeculationOptions,
        draws: int,
    ) -> None:
        self.texts: list[list[int]] = [[] for _ in range(draws)]
        self._engine = engine
        self._sampling = sampling
        self._seeded = seeded
        self._speculation = speculation
        self._started = 0
        self._done = 0

    def run(self, drafter: RandomDrafter | None) -> None:
        for _ in range(CONCURRENT):
            self._start()
        while self._done < len(self.texts):
            self._engine.drain_inbox()
            if drafter is not None:
                drafter.send()
            self._engine.step()
            self._engine.outbox.send_to_clients()

    def _start(self) -> None:
        """Submit the next request, if one is left."""
        if self._started == len(self.texts):
            return
        sampling = self._sampling
        if self._seeded:
            sampling = replace(sampling, seed=seed_of(self._started))
        request = TokenRequest(
            PROMPT,
            9,
            sampling=sampling,
            stop_token_ids=frozenset({END}) if sampling.min_tokens else frozenset(),
            speculation=self._speculation,
        )
        tokens = self.texts[self._started]
        self._started += 1

        def collect(chunk: object) -> None:
            assert isinstance(chunk, TokenChunk), chunk
            before = len(tokens)
            tokens.extend(chunk.token_ids)
            finished = len(tokens) >= LENGTH or chunk.finish_reason is not None
            if before < LENGTH and finished:
                self._done += 1
                self._engine.cancel(sequence)
                self._start()

        sequence = self._engine.submit(request, collect)


_MANY = EngineConfig(DraftTokensPolicy("fixed", 5), 16 * CONCURRENT, CONCURRENT, 2 * CONCURRENT)


def make_engine(
    sampled_rule: AcceptanceRule,
    trust: bool,
    config: EngineConfig = _MANY,
    page_count: int = 8 * CONCURRENT,
) -> Engine:
    """An engine over the tiny model that verifies every draft, whether it pays or not."""

    def deliver(deliveries: list[Delivery]) -> None:
        for sink, argument in deliveries:
            sink(argument)

    # A copy, since a runner changes its model.
    runner = ModelRunner(copy.deepcopy(tiny_model()), page_size=4, page_count=page_count)
    pool = PagePool(runner.page_count, runner.page_size)
    draft_verifier = DraftVerifier(sampled_rule)
    return Engine(
        runner,
        pool,
        deliver,
        Metrics("exact"),
        config,
        draft_verifier,
        sampled_drafts=trust,
        drafts=EVERY_DRAFT,
    )
