"""Requests through an engine with the small target. The tests compare the requests' texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from outrider.errors import OutriderError
from outrider.lm.pages import PagePool
from outrider.lm.runner import ModelRunner
from outrider.process.clock import Clock, monotonic
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import (
    AcceptanceRule,
    SamplingParams,
    SpeculationOptions,
    TokenChunk,
    TokenRequest,
)
from tests.losslessness.guesser import Guesser
from tests.losslessness.small import (
    LENGTH,
    PROMPTS,
    VOCAB,
    NextLogits,
    NextProbs,
    Probs,
    SmallTarget,
    Text,
    target_probs,
)
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT, PAYING_DRAFTS
from verifier_svc.verification.batch import DraftVerifier


def step(engine: Engine, drafters: Iterable[Guesser] = ()) -> None:
    """Let each connected drafter draft; then take one step of the engine."""
    engine.drain_inbox()
    for drafter in drafters:
        if drafter.connected:
            drafter.tick()
    engine.step()
    engine.outbox.send_to_clients()


@dataclass
class Traffic:
    """Requests through one engine, `concurrent` at a time. The requests use the prompts in turn."""

    probs: NextProbs = target_probs
    """The target's distribution after a text."""
    logits: NextLogits | None = None
    """The target's logits after a text; by default the logarithms of `probs`."""
    runner: ModelRunner | None = None
    """A target with hidden states, in place of the small target."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    stop_token: int | None = None
    """A token that ends a text; it also pads the ended text."""
    enough: int = 64
    """A request is cancelled when it has this many tokens."""
    prompts: tuple[Text, ...] = PROMPTS
    rule: AcceptanceRule = AcceptanceRule.BLOCK
    trust: bool = True
    policy: DraftTokensPolicy = field(default_factory=lambda: DraftTokensPolicy("fixed", 3))
    length: int = LENGTH + 2
    """The number of tokens that each request generates."""
    first: int = 0
    """The index of the first token whose joint distribution is compared."""
    concurrent: int = 96
    page_count: int = 2048
    page_size: int = 4
    max_batch_tokens: int = 2048
    seed: Callable[[int], int | None] = lambda number: None
    always: bool = True
    trees: bool = False
    in_waves: bool = False
    """True if new requests wait until all earlier requests are done: each wave starts together."""
    events: Callable[[int], object] = lambda tick: None
    """Called at each tick."""
    clock: Clock = monotonic
    paused_ticks: int = field(default=0, init=False)
    """The number of ticks at which some sequence's drafter was paused."""

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
            self.runner or self.model,
            PagePool(self.page_count, self.page_size),
            deliver,
            VerifierMetrics("small"),
            config,
            DraftVerifier(self.rule),
            sampled_drafts=self.trust,
            draft_policy=EVERY_DRAFT if self.always else PAYING_DRAFTS,
            features=self.runner,
            clock=self.clock,
        )

    def run(self, draws: int, *drafters: Guesser) -> npt.NDArray[np.int64]:
        """Return the tokens of `draws` requests, [draws, length], a row for each request."""
        # The engine would draw seeds from the system, but a test must give the same result each
        # time.
        own = np.random.default_rng(7)
        with mock.patch(
            "secrets.randbits", side_effect=lambda bits: int(own.integers(2**bits, dtype=np.uint64))
        ):
            return self.run_with_the_systems_seeds(draws, *drafters)

    def run_with_the_systems_seeds(self, draws: int, *drafters: Guesser) -> npt.NDArray[np.int64]:
        """Run the requests as `run` does, but with new seeds each time."""
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
        """Return the expected counts of each prompt and text, [prompts * VOCAB ** LENGTH]."""
        counts = np.bincount(np.arange(draws) % len(self.prompts), minlength=len(self.prompts))
        pairs = zip(self.prompts, counts, strict=True)
        return np.concatenate([count * self._joint(prompt).flatten() for prompt, count in pairs])

    def _joint(self, prompt: Text) -> Probs:
        """Return the joint distribution of compared tokens, summed over earlier tokens.

        The result has the shape [VOCAB] * LENGTH: one dimension for each compared token.
        """
        found = np.zeros([VOCAB] * LENGTH)
        for text in itertools.product(range(VOCAB), repeat=self.first + LENGTH):
            found[text[self.first :]] += np.prod(
                [self.probs((*prompt, *text[:i]))[token] for i, token in enumerate(text)]
            )
        return found

    def observed(self, texts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how often each prompt and text occurs in `texts`, [draws, length].

        The counts are in the order of `expected`.
        """
        prompts = np.arange(len(texts)) % len(self.prompts)
        compared = texts[:, self.first : self.first + LENGTH]
        cells = compared @ VOCAB ** np.arange(LENGTH)[::-1] + prompts * VOCAB**LENGTH
        return np.bincount(cells, minlength=len(self.prompts) * VOCAB**LENGTH)


def seed_of(number: int) -> int:
    """Return the seed of request `number`. Neighbours' seeds differ in many of their 64 bits."""
    return (number + 1) * 0x9E3779B97F4A7C15 % 2**64
