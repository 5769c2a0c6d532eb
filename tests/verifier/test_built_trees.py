"""The engine builds trees out of two drafters' guesses: no text changes, and steps commit more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_model import VOCAB, Client, ScriptedDrafter, make_engine
from random_trees import random_tree

from outrider.protocol.draft_messages import Proposal
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import DraftDistribution, SamplingParams, TokenRequest
from verifier_svc.engine.config import EngineConfig
from verifier_svc.state.drafter import Drafter

COUPLED = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.COUPLED})
SAMPLINGS = {
    "greedy": SamplingParams(0.0),
    "seeded": SamplingParams(1.0, seed=5),
    "penalties": SamplingParams(
        1.0, seed=6, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5
    ),
    "truncated": SamplingParams(1.0, seed=7, top_k=4, top_p=0.9, min_tokens=9),
}


class Run:
    """Requests through an engine, with two drafters that guess trees around the right text."""

    def __init__(self, requests: list[TokenRequest], *, page_size: int = 3) -> None:
        config = EngineConfig(DraftTokensPolicy("fixed", 6), draft_trees=True)
        self.engine, self.model = make_engine(
            page_size=page_size,
            page_count=60 // page_size,
            config=config,
            eos_bias=-2.0,
            always_draft=True,
        )
        self.clients = [Client() for _ in requests]
        pairs = zip(requests, self.clients, strict=True)
        self.sequences = [self.engine.submit(request, client) for request, client in pairs]
        self.moved_count = 0
        self.shared_count = 0
        """Verified trees that had tokens of both drafters."""

    def finish(self, truths: list[list[int]], seed: int) -> None:
        """Draft until all requests have ended; without `truths` decode plainly."""
        names = ("a", "b") if truths else ()
        drafters = [ScriptedDrafter(self.engine, n, n, distributions=COUPLED) for n in names]
        self._watch()
        rng = np.random.default_rng(seed)
        while self.engine.sequences:
            self.engine.drain_inbox()
            for sequence, truth in zip(self.sequences, truths, strict=bool(truths)):
                base = len(sequence.tokens)
                likely = truth[base - len(sequence.request.prompt) :]
                for drafter in drafters:
                    tree = random_tree(rng, 12, VOCAB, likely)
                    if drafter.length.get(sequence.id) == base and tree.token_ids:
                        drafter.send(Proposal(sequence.id, base, tree.token_ids, tree.parents))
            self.engine.step()
        self.engine.outbox.send_to_clients()
        self.engine.pool.check_integrity()
        assert self.engine.pool.used_count == 0

    def _watch(self) -> None:
        # Classes of the step may be compiled, so only the model and the metrics can be changed.
        move_tokens = self.model.move_tokens
        metrics = self.engine._metrics
        verified = metrics.verified_in_tree

        def moved(sources: list[int], targets: list[int]) -> None:
            self.moved_count += len(sources)
            move_tokens(sources, targets)

        def counted(drafter: Drafter, drafted: int, places: list[int], *, leads: bool) -> None:
            # The drafter that leads counts once for each tree, and each other one is a shared tree.
            self.shared_count += not leads
            verified(drafter, drafted, places, leads=leads)

        self.model.move_tokens = moved  # type: ignore[method-assign,assignment]
        metrics.verified_in_tree = counted  # type: ignore[method-assign,assignment]

    @property
    def texts(self) -> list[list[int]]:
        return [client.tokens for client in self.clients]


@pytest.mark.parametrize("page_size", [2, 3, 5])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_built_trees_change_no_text(name: str, page_size: int) -> None:
    requests = [
        TokenRequest([1, 2, i % 7], 20, replace(SAMPLINGS[name], seed=1000 + i)) for i in range(8)
    ]
    plain = Run(requests, page_size=page_size)
    plain.finish([], 0)
    for seed in range(2):
        run = Run(requests, page_size=page_size)
        run.finish(plain.texts, seed)
        assert run.texts == plain.texts
        assert run.moved_count > 2
        assert run.shared_count > 5
        assert run.engine.scheduler.preemption_count > 0
        assert run.model.forward_count < plain.model.forward_count
