"""Fakes: a table model small enough to enumerate, a client, and a drafter that tests script."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from prometheus_client import generate_latest

from outrider.errors import OutriderError
from outrider.lm.pages import PagePool
from outrider.lm.runner import SequenceSlice
from outrider.lm.streams import SharedRows
from outrider.process.clock import Clock, monotonic
from outrider.protocol.draft_messages import (
    FINAL_STATE,
    DraftBatch,
    Hello,
    Proposal,
    Skip,
    StepBatch,
)
from outrider.protocol.messages import FinishReason, SamplingParams, TokenChunk
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT, PAYING_DRAFTS
from verifier_svc.policy.plan import Plan
from verifier_svc.state.drafter import Drafter
from verifier_svc.verification.batch import DraftVerifier

VOCAB = 8
EOS = 7
GREEDY = SamplingParams(temperature=0.0)
Positions = npt.NDArray[np.int64]


class TableModel:
    """Looks up its logits in a table [V, V, V] by the last two tokens.

    The model reads earlier tokens only from its paged cache, so a wrong page gives wrong logits.
    """

    vocab_size = VOCAB
    eos_token_ids = (EOS,)
    layer_count = 2
    hidden_size = 3

    def __init__(
        self, page_count: int, page_size: int, seed: int = 0, eos_bias: float = -1.0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = 2 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
        self.table[:, :, EOS] += eos_bias
        self.cache = np.full((page_count, page_size), -1)
        self.page_size = page_size
        self.forward_count = 0
        self.broken: Callable[[Sequence[SequenceSlice]], None] = lambda slices: None
        """Called at the beginning of each forward; tests replace it to fail, sleep or watch."""
        self.watched: set[int] = set()
        self._states: list[tuple[int, int, int]] = []
        self.projections: dict[str, Any] = {}

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Write the tokens to their pages; return logits [R, V] as `LanguageModel.forward` does."""
        self.forward_count += 1
        self.broken(slices)
        rows = []
        self._states.clear()
        for part in slices:
            self.cache[self._slots(part, np.arange(part.start, part.end))] = part.token_ids
            for slot in range(part.end - part.logit_count, part.end):
                before = _slot_before(part, slot)
                pair = self.cache[self._slots(part, np.array([before, slot]))]
                assert min(pair) >= 0, "the pages of a slice lack its earlier tokens"
                rows.append(self.table[pair[0], pair[1]])
            if self.watched:
                self._keep_states(part)
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _keep_states(self, part: SequenceSlice) -> None:
        """Keep each token's state: the token before it, the token itself, and its position."""
        for slot, position in zip(part.slots, part.positions, strict=True):
            pair = self.cache[self._slots(part, np.array([_slot_before(part, slot), slot]))]
            self._states.append((*pair.tolist(), position))

    def can_watch(self, states: Collection[int]) -> bool:
        """Return whether the model's layers have these states; as in `FeatureSource`."""
        return set(states) <= {FINAL_STATE, *range(self.layer_count + 1)}

    def watch(self, states: Collection[int]) -> None:
        """Keep these states; as in `FeatureSource`."""
        self.watched = set(states)

    @property
    def kept(self) -> set[int]:
        """The states that the last forward kept."""
        return self.watched

    def copy_states(
        self, states: Sequence[int], rows: Sequence[int], dtype: str, projection: str = ""
    ) -> bytes:
        """Return the states of these rows, as bytes; `100 * k` is added to the numbers of state k.

        See `FeatureSource.copy_states`.
        """
        assert set(states) <= self.watched
        kept = [[n + 100 * k for k in states for n in self._states[row]] for row in rows]
        numbers = np.array(kept, np.dtype(dtype))
        if projection:
            numbers = self.projections[projection](numbers)
        return numbers.tobytes()

    def pick_states(
        self, states: Sequence[int], rows: Sequence[int], dtype: str, projection: str = ""
    ) -> torch.Tensor:
        """Return the states as a tensor with a row for each token."""
        data = bytearray(self.copy_states(states, rows, dtype, projection))
        return torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(len(rows), -1)

    def share_states(
        self, states: Sequence[int], rows: Sequence[int], dtype: str, projection: str = ""
    ) -> SharedRows:
        """Return the states for a drafter in the verifier's process."""
        return SharedRows.of(self.pick_states(states, rows, dtype, projection))

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots as `LanguageModel.move_tokens` does."""
        flat = self.cache.reshape(-1)
        flat[targets] = flat[sources]

    def _slots(self, part: SequenceSlice, positions: Positions) -> tuple[Positions, Positions]:
        """Return the pages of a slice's slots, and the slots' places in these pages."""
        pages = np.array(part.pages)
        return pages[positions // self.page_size], positions % self.page_size

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Return the tokens of plain greedy decoding after the prompt."""
        tokens = list(prompt)
        while len(tokens) - len(prompt) < max_tokens:
            tokens.append(int(self.table[tokens[max(len(tokens) - 2, 0)], tokens[-1]].argmax()))
            if tokens[-1] == EOS:
                break
        return tokens[len(prompt) :]


def _slot_before(part: SequenceSlice, slot: int) -> int:
    """Return the slot of the token before the token of `slot`; 0 at the text's beginning."""
    row = slot - part.tree_start + 1
    if row > 0:
        return part.tree_start - 1 + part.parents[row - 1]
    return max(slot - 1, 0)


class Client:
    """A sink that collects one request's chunks, or its error."""

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []
        self.error: OutriderError | None = None

    def __call__(self, message: TokenChunk | OutriderError) -> None:
        if isinstance(message, OutriderError):
            self.error = message
        else:
            self.chunks.append(message)

    @property
    def tokens(self) -> list[int]:
        """All tokens received so far."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the sequence ended; None if it has not ended."""
        return self.chunks[-1].finish_reason if self.chunks else None


class ScriptedDrafter:
    """A drafter that the test controls; it keeps all messages of the engine."""

    def __init__(
        self,
        engine: Engine,
        name: str = "scripted",
        family: str = "scripted",
        *,
        trusted: bool = True,
        is_local: bool = False,
        **hello: object,
    ) -> None:
        self.engine = engine
        self.received: list[StepBatch] = []
        self.error: OutriderError | None = None
        self.length: dict[int, int] = {}
        """The last known committed length, keyed by sequence."""
        self.ahead: dict[int, list[int]] = {}
        """The drafter's guesses after that length, unless a verdict contradicts them."""
        fields = {"max_draft_tokens": 16, **hello}
        introduction = Hello(name, family, "f", **fields)
        self.handle: Drafter = engine.drafting.join(
            introduction, self._sink, trusted=trusted, is_local=is_local
        )

    def _sink(self, message: StepBatch | OutriderError) -> None:
        if isinstance(message, OutriderError):
            self.error = message
            return
        self.received.append(message)
        for opened in message.opened:
            self.length[opened.sequence_id] = len(opened.token_ids)
            self.ahead[opened.sequence_id] = []
        for verdict in message.verdicts:
            new = verdict.new_token_ids
            ahead = self.ahead[verdict.sequence_id]
            agrees = ahead[: len(new)] == new
            self.length[verdict.sequence_id] = verdict.committed_length
            self.ahead[verdict.sequence_id] = ahead[len(new) :] if agrees else []

    def prove(self) -> None:
        """Make the engine count earlier guesses of this drafter as right."""
        self.handle.taken_bytes = 1
        self.handle.right_guesses = 8
        self.handle.proven = True

    def propose(self, sequence_id: int, tokens: list[int], *, anew: bool = False) -> None:
        """Propose tokens after the guesses so far or, if `anew`, after the committed tokens."""
        before = [] if anew else self.ahead[sequence_id]
        # The engine may answer at once, so this is set before the proposal is sent.
        self.ahead[sequence_id] = [*before, *tokens]
        self.send(Proposal(sequence_id, self.length[sequence_id], list(self.ahead[sequence_id])))

    def skip(self, sequence_id: int) -> None:
        """Send a skip."""
        skip = Skip(sequence_id, self.length[sequence_id])
        self.engine.drafting.on_drafts(self.handle, DraftBatch(skips=[skip]))

    def send(self, *proposals: Proposal) -> None:
        """Send all these proposals in one message."""
        self.engine.drafting.on_drafts(self.handle, DraftBatch(list(proposals)))
        self.engine.drain_inbox()


def make_engine(
    *,
    page_count: int = 64,
    page_size: int = 4,
    config: EngineConfig | None = None,
    seed: int = 0,
    trust: bool = False,
    eos_bias: float = -1.0,
    always_draft: bool = False,
    clock: Clock = monotonic,
    deliver: Callable[[list[Delivery]], None] | None = None,
    draft_verifier: DraftVerifier | None = None,
    launches: bool = False,
) -> tuple[Engine, TableModel]:
    """Return an engine with a table model.

    Without `deliver`, the caller's thread calls sinks at once.
    """

    def call(deliveries: list[Delivery]) -> None:
        for sink, argument in deliveries:
            sink(argument)

    model = TableModel(page_count, page_size, seed, eos_bias)
    pool = PagePool(page_count, page_size)
    engine = Engine(
        model,
        pool,
        deliver or call,
        VerifierMetrics("fake"),
        config or EngineConfig(),
        draft_verifier or DraftVerifier(),
        launches=launches,
        features=model,
        sampled_drafts=trust,
        draft_policy=EVERY_DRAFT if always_draft else PAYING_DRAFTS,
        clock=clock,
    )
    return engine, model


def make_plan(engine: Engine, times: int = 1) -> Plan:
    """Plan `times` times for the running sequences, each time from the previous plan.

    Returns the last plan, which the engine then has.
    """
    for _ in range(times):
        running = engine.scheduler.running.values()
        engine.drafting.plan = engine.planner.plan(running, engine.drafting.plan, 1, engine.clock())
    return engine.drafting.plan


def exposition(engine: Engine) -> str:
    """Return the engine's metrics in Prometheus' text format."""
    return generate_latest(engine._metrics.registry).decode()


def finish(engine: Engine, steps: int = 2000) -> None:
    """Step until no sequence is left, and check that no page is in use."""
    for _ in range(steps):
        engine.step()
        if not engine.sequences:
            break
    assert not engine.sequences
    engine.pool.check_integrity()
    assert engine.pool.used_count == 0
