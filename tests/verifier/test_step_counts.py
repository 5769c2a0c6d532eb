"""Counts the operators, copies to the device and waits of a step's acceptance.

Run as a program, it prints a table. No GPU is needed: a fake device counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import (
    Acceptance,
    AcceptanceRule,
    DraftDistribution,
    SamplingParams,
    SpeculationOptions,
    TokenRequest,
)
from tests.fake_device import DEVICE, FakeDevice
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, make_engine
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.trie import DraftTree
from verifier_svc.verification.batch import DraftVerifier, Verified

VOCAB = 3000
DRAFTED = 4
LENGTH = 20
SAMPLES = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE})


@dataclass(frozen=True)
class Case:
    """A batch of equal sequences.

    A step runs at most `operators` operators, copies `copies` times, and waits `waits` times.
    """

    sampling: SamplingParams
    operators: int
    copies: int = 1
    waits: int = 1
    rule: AcceptanceRule | None = None
    """The rule for sampled drafts, if the drafts are sampled."""
    top_logprobs: int | None = None
    acceptance: Acceptance = Acceptance.EXACT
    masked: bool = False
    flat: bool = False
    """True if all tokens are about equally likely."""


CASES = {
    "greedy": Case(GREEDY, 6, copies=0),
    "temperature": Case(SamplingParams(0.8), 16),
    "top-p": Case(SamplingParams(top_p=0.9), 35),
    "top-k": Case(SamplingParams(top_k=50), 22),
    "top-k and top-p": Case(SamplingParams(top_k=50, top_p=0.9), 42),
    "min-p": Case(SamplingParams(min_p=0.1), 20),
    "typical-p": Case(SamplingParams(typical_p=0.9), 34),
    "penalties": Case(SamplingParams(0.0, repetition_penalty=1.2, presence_penalty=0.3), 18),
    "bias and bans": Case(
        SamplingParams(0.0, logit_bias=((3, 1.0),), min_tokens=90, banned_token_ids=(5,)), 16
    ),
    "grammar": Case(GREEDY, 16, masked=True),
    "log probabilities": Case(GREEDY, 21, top_logprobs=5),
    "block": Case(SamplingParams(), 152, rule=AcceptanceRule.BLOCK),
    "token-wise": Case(SamplingParams(), 70, rule=AcceptanceRule.TOKEN_WISE),
    "typical acceptance": Case(SamplingParams(), 29, acceptance=Acceptance.TYPICAL),
    "everything": Case(
        SamplingParams(0.8, 50, 0.9, repetition_penalty=1.2, frequency_penalty=0.1),
        212,
        copies=2,
        rule=AcceptanceRule.BLOCK,
        top_logprobs=5,
        masked=True,
    ),
    "top-p of flat rows": Case(SamplingParams(1.9, top_p=0.99), 90, copies=2, waits=2, flat=True),
}
"""Masks come in a separate copy, since they are computed during the forward. The last case
needs another copy and wait: only the device knows that 1024 candidates are too few."""


class Batch:
    """Sequences that go on from step to step, as the engine's do."""

    def __init__(self, case: Case, size: int) -> None:
        engine, _ = make_engine(trust=True, page_count=100 * size)
        ScriptedDrafter(engine, distributions=SAMPLES)
        self._case = case
        self._random = np.random.default_rng(0)
        self._sequences = [
            engine.submit(
                TokenRequest(
                    self._tokens(LENGTH),
                    90,
                    case.sampling,
                    speculation=SpeculationOptions(acceptance=case.acceptance),
                    top_logprobs=case.top_logprobs,
                ),
                Client(),
            )
            for _ in range(size)
        ]
        for i, sequence in enumerate(self._sequences):
            sequence.seed = i

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(0, VOCAB, count).tolist()

    def logits(self) -> torch.Tensor:
        """Return the logits of a step.

        The vocabulary's first 8 tokens are likely, unless the case is flat; drafts consist of these
        tokens.
        """
        rows = len(self._sequences) * (1 + DRAFTED)
        scale = 0.01 if self._case.flat else 1.0
        logits = scale * self._random.standard_normal((rows, VOCAB))
        logits[:, :8] += 0.0 if self._case.flat else 8.0
        return torch.from_numpy(logits).float()

    def step(self) -> list[ScheduledSequence]:
        """Return the batch of a step, without masks."""
        batch = []
        for sequence in self._sequences:
            tokens = self._random.integers(0, 8, DRAFTED).tolist()
            claims = []
            if self._case.rule is not None:
                claims = [SparseDistribution(np.arange(8), np.full(8, 0.125))] * DRAFTED
            [assignment] = sequence.assignments.values()
            draft = DraftTree(tokens, claims)
            last = len(sequence.tokens) - 1
            batch.append(
                ScheduledSequence(sequence, last, sequence.tokens[-1:], draft, assignment, True)
            )
        return batch

    def masked(self, batch: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        """Return the batch after its masks have come."""
        if not self._case.masked:
            return list(batch)
        width = -(-VOCAB // 32)
        words = self._random.integers(-(2**31), 2**31, (len(batch), 1 + DRAFTED, width), np.int32)
        pairs = zip(batch, words, strict=True)
        # Every other sequence has a grammar.
        return [replace(each, mask=mask if i % 2 else None) for i, (each, mask) in enumerate(pairs)]

    def commit(self, count: int) -> None:
        """Append arbitrary tokens."""
        for sequence in self._sequences:
            sequence.tokens += self._tokens(count)


def run(case: Case, device: FakeDevice | None, size: int, steps: int = 3) -> list[object]:
    """Return the results of some steps; the device counts the last step."""
    batch = Batch(case, size)
    rule = case.rule or AcceptanceRule.BLOCK
    verifier = DraftVerifier(rule)
    if device is not None:
        verifier = DraftVerifier(rule, device=DEVICE)
    results: list[object] = []
    for _ in range(steps):
        scheduled, logits = batch.step(), batch.logits()
        masked = batch.masked(scheduled)
        if device is not None:
            logits = device.put(logits)
            device.operators = device.copies = device.waits = 0
        results += verifier.lay_out(scheduled)(logits, masked)
        batch.commit(2)
    return results


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_one_copy_and_waits_once(name: str) -> None:
    case = CASES[name]
    with FakeDevice() as device:
        results = run(case, device, 6)
    assert all(isinstance(result, Verified) for result in results)
    assert (device.copies, device.waits) == (case.copies, case.waits)
    assert device.operators <= case.operators


@pytest.mark.parametrize("name", CASES)
def test_a_gpus_path_gives_the_results_of_the_cpus(name: str) -> None:
    near = run(CASES[name], None, 6)
    with FakeDevice() as device:
        far = run(CASES[name], device, 6)
    assert far == near


if __name__ == "__main__":
    print("| step of 64 sequences with 4 draft tokens each | operators | copies | waits |")
    print("| --- | ---: | ---: | ---: |")
    for name, case in CASES.items():
        with FakeDevice() as device:
            run(case, device, 64)
        print(f"| {name} | {device.operators} | {device.copies} | {device.waits} |")
