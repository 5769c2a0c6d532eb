"""`outrider lab bench --only host`: the engine's time for a step with a model that costs nothing.

The command also measures which part of this time delays the next forward on a GPU. The host does
its other work while the GPU computes.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median, quantiles
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

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
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.verification.batch import DraftVerifier, Verification, Verified, Verify

_VOCAB = 256
_BATCHES = (1, 16, 32, 64, 256)
_STEPS = 60
# In a wheel, the engine's step is compiled.
_COMPILED = not str(sys.modules[Engine.__module__].__file__).endswith(".py")


def measure(console: Console) -> None:
    """Measure and print a step's time for each number of sequences, plain and with drafts."""
    # A verifier does this after loading.
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
        "the engine's processor time a step, with a model that costs nothing, µs"
        " (median of 55 steps)"
    )
    columns = ("sequences", "plain", "each", "3 drafted tokens each", "each")
    table = table_of(f"{title}; {how}", columns)
    for batch in _BATCHES:
        cells = [f"{1e6 * seconds[batch]:.0f}" for seconds in (host, drafted)]
        each = [_each(seconds, batch) for seconds in (host, drafted)]
        table.add_row(str(batch), cells[0], each[0], cells[1], each[1])
    console.print(table)
    console.print(_delays())


def _delays() -> Table:
    """Measure the time that delays the next forward on a GPU; return it as a table.

    The table has lines for plain steps and for steps with drafts.
    """
    title = (
        "processor time of a step whose work has the order for a GPU: what delays the next forward,"
        " and what runs beside it, µs (median of 55 steps, quartiles)"
    )
    columns = ("sequences", "", "delays the forward", "quartiles", "beside the forward")
    table = table_of(title, columns)
    for batch in _BATCHES:
        for drafts in (False, True):
            steps = launched_steps(batch, drafts=drafts)
            low, middle, high = quantiles([step.delay_s for step in steps], n=4)
            beside = median([step.beside_s for step in steps])
            cells = (f"{1e6 * middle:.0f}", f"{1e6 * low:.0f}–{1e6 * high:.0f}")
            kind = "3 drafted tokens each" if drafts else "plain"
            table.add_row(str(batch), kind, *cells, f"{1e6 * beside:.0f}")
    return table


def _each(seconds: dict[int, float], batch: int) -> str:
    """Return the time that a further sequence adds, in µs."""
    if batch == 1:
        return "–"
    return f"{1e6 * (seconds[batch] - seconds[1]) / (batch - 1):.1f}"


class LaunchedStep(NamedTuple):
    """The host's processor time of a step on a GPU, in seconds."""

    delay_s: float
    """Time from a step's tokens to the next launch: tokens are committed, drafts taken and packed.
    """
    beside_s: float
    """Time from a launch to the wait for its tokens, without verification, which the GPU does."""


class _NullModel:
    """A model with fixed logits: token 0 follows every token."""

    vocab_size = _VOCAB
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._logits_RV = torch.zeros(256 * 4, _VOCAB)
        self._logits_RV[:, 0] = 1.0
        self.launched_at = 0.0
        """This thread's processor time at which the last forward returned (seconds)."""

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Return fixed logits at once, one row for each wanted row."""
        logits_RV = self._logits_RV[: sum(part.logit_count for part in slices)]
        self.launched_at = time.thread_time()
        return logits_RV

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Do nothing: there is no cache."""


class _TimedVerifier:
    """A `DraftVerifier` that notes its thread's processor time when a verification begins and ends.

    Both times are in seconds, like `launched_at`.
    """

    thinking_ids: tuple[int, int] | None = None

    def __init__(self) -> None:
        self._verifier = DraftVerifier()
        self.began_at = self.ended_at = 0.0

    def lay_out(self, batch: Sequence[ScheduledSequence]) -> Verify:
        """Like `DraftVerifier.lay_out`."""
        verify = self._verifier.lay_out(batch)

        def timed(
            logits_RV: torch.Tensor, batch: Sequence[ScheduledSequence]
        ) -> list[Verified | OutriderError]:
            self.began_at = time.thread_time()
            found = verify(logits_RV, batch)
            self.ended_at = time.thread_time()
            return found

        return timed


def step_seconds(batch: int, *, drafts: bool) -> list[float]:
    """Return the processor times of steps of `batch` decoding sequences.

    The first five steps are left out. The times are in seconds. A step takes drafts, and makes
    messages to clients and drafters, but sends none of these messages.
    """
    times = []
    for step in _steps(batch, drafts, _NullModel(), DraftVerifier(), launches=False):
        started = time.thread_time()
        step()
        times.append(time.thread_time() - started)
    return times[5:]


def launched_steps(batch: int, *, drafts: bool) -> list[LaunchedStep]:
    """Return the times of steps whose work has the order that the engine uses on a GPU."""
    model, verifier = _NullModel(), _TimedVerifier()
    found = []
    for step in _steps(batch, drafts, model, verifier, launches=True):
        started = time.thread_time()
        step()
        whole_s = time.thread_time() - started
        beside_s = verifier.began_at - model.launched_at
        gpu_s = verifier.ended_at - verifier.began_at
        found.append(LaunchedStep(whole_s - beside_s - gpu_s, beside_s))
    return found[5:]


def _steps(
    batch: int, drafts: bool, model: _NullModel, verifier: Verification, *, launches: bool
) -> Iterator[Callable[[], None]]:
    """Yield `_STEPS` steps of `batch` sequences; the caller runs each before it takes the next."""

    def deliver(deliveries: list[Delivery]) -> None:
        for sink, argument in deliveries:
            sink(argument)

    pool = PagePool(batch * 40, 16)
    limits = EngineConfig(
        DraftTokensPolicy("fixed", 3), max_batch_tokens=batch * 16, max_sequences=batch
    )
    metrics = VerifierMetrics("null")
    engine = Engine(model, pool, deliver, metrics, limits, verifier, launches=launches)
    told: list[StepBatch | OutriderError] = []
    drafter = None
    if drafts:
        drafter = engine.drafting.join(Hello("d", "d", "f", 16), told.append)
    request = TokenRequest([1] * 8, 500, SamplingParams(0.0))
    sequences = [engine.submit(request, lambda chunk: None) for _ in range(batch)]
    for _ in range(_STEPS):
        # Each proposal has three draft tokens and a guess of the bonus token after them. The next
        # proposal begins below the bonus token.
        runs = [
            Proposal(sequence.id, len(sequence.tokens), [0] * 4)
            for sequence in sequences
            if drafter is not None and sequence.assignments["d"].trie.node_count == 0
        ]

        def step(runs: list[Proposal] = runs) -> None:
            if drafter is not None:
                engine.drafting.on_drafts(drafter, DraftBatch(runs))
            while (rest_s := engine.advance()) != 0.0:
                time.sleep(rest_s or 0.0)

        yield step
