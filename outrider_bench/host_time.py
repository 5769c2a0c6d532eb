"""`outrider lab bench --only host`: the engine's own time for a step; its model costs nothing."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch
from rich.console import Console

from outrider.errors import OutriderError
from outrider.lm.pages import PagePool
from outrider.lm.runner import SequenceSlice
from outrider.protocol.draft_messages import DraftBatch, Hello, Proposal, StepBatch
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import SamplingParams, TokenRequest
from outrider_bench.console import progress, table_of
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import VerifierMetrics

_VOCAB = 256
_BATCHES = (1, 16, 64, 256)
_STEPS = 60
# Wheels have a compiled step.
_COMPILED = not str(sys.modules[Engine.__module__].__file__).endswith(".py")


def measure(console: Console) -> None:
    """Measure and print the time of a step by sequences, plain and with drafts."""
    # A verifier does this once it is loaded.
    gc.collect()
    gc.freeze()
    with progress() as bar:
        host, drafted = (
            {
                batch: median(step_seconds(batch, drafts=drafts))
                for batch in bar.track(_BATCHES, description="steps")
            }
            for drafts in (False, True)
        )
    how = "not compiled"
    if _COMPILED:
        how = "compiled"
    title = (
        "the engine's host time a step, with a model that costs nothing, µs (median of 60 steps)"
    )
    columns = ("sequences", "plain", "each", "3 drafted tokens each", "each")
    table = table_of(f"{title}; {how}", columns)
    for batch in _BATCHES:
        cells = [f"{1e6 * seconds[batch]:.0f}" for seconds in (host, drafted)]
        each = [_each(seconds, batch) for seconds in (host, drafted)]
        table.add_row(str(batch), cells[0], each[0], cells[1], each[1])
    console.print(table)


def _each(seconds: dict[int, float], batch: int) -> str:
    """The time that a further sequence adds, in µs."""
    if batch == 1:
        return "–"
    return f"{1e6 * (seconds[batch] - seconds[1]) / (batch - 1):.1f}"


class _NullModel:
    """A model with ready logits: token 0 follows everything."""

    vocab_size = _VOCAB
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._logits_RV = torch.zeros(256 * 4, _VOCAB)
        self._logits_RV[:, 0] = 1.0

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Return the same logits at once, one row for each that is wanted."""
        return self._logits_RV[: sum(part.logit_count for part in slices)]

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Do nothing: there is no cache."""


def step_seconds(batch: int, *, drafts: bool) -> list[float]:
    """Return the seconds of steps of `batch` decoding sequences, without the first ones.

    The step takes drafts and makes the messages to clients and drafters, but sends none.
    """

    def deliver(deliveries: list[Delivery]) -> None:
        for sink, argument in deliveries:
            sink(argument)

    pool = PagePool(batch * 40, 16)
    limits = EngineConfig(
        DraftTokensPolicy("fixed", 3), max_batch_tokens=batch * 16, max_sequences=batch
    )
    engine = Engine(_NullModel(), pool, deliver, VerifierMetrics("null"), limits)
    told: list[StepBatch | OutriderError] = []
    drafter = None
    if drafts:
        drafter = engine.drafting.join(Hello("d", "d", "f", 16), told.append)
    request = TokenRequest([1] * 8, 500, SamplingParams(0.0))
    sequences = [engine.submit(request, lambda chunk: None) for _ in range(batch)]
    times = []
    for _ in range(_STEPS):
        # The bonus token is part of the run, so the next draft hangs below it.
        runs = [
            Proposal(sequence.id, len(sequence.tokens), [0] * 4)
            for sequence in sequences
            if drafter is not None and sequence.assignments["d"].trie.node_count == 0
        ]
        started = time.perf_counter()
        if drafter is not None:
            engine.drafting.on_drafts(drafter, DraftBatch(runs))
        while (rest_s := engine.advance()) != 0.0:
            time.sleep(rest_s or 0.0)
        times.append(time.perf_counter() - started)
    return times[5:]
