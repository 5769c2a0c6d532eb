"""A model small enough to enumerate: its logits are a table over the last two tokens, which it reads from its paged cache."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from outrider.clock import Clock, monotonic
from outrider.errors import OutriderError
from outrider.lm.pages import PagePool
from outrider.lm.runner import SequenceSlice
from outrider.messages import DraftBatch, FinishReason, Hello, Proposal, Skip, StepBatch, TokenChunk
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outgoing import Delivery
from verifier_svc.engine.target import Limits
from verifier_svc.metrics import Metrics
from verifier_svc.policy.plan import Plan
from verifier_svc.state.drafter import Drafter

VOCAB = 8
EOS = 7


class TableModel:
    """Logits [V, V, V] by the last two tokens. What it knows of earlier tokens is what lies in the pages it is given."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)

    def __init__(
        self, page_count: int, page_size: int, seed: int = 0, eos_bias: float = -1.0
    ) -> None:
        self.table = (
            torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
        )
        self.table[:, :, EOS] += eos_bias
        self.cache = np.full((page_count, page_size), -1)
        self.page_size = page_size
        self.forward_count = 0
        self.broken: Callable[[Sequence[SequenceSlice]], None] = lambda slices: None

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        self.forward_count += 1
        self.broken(slices)
        rows = []
        for part in slices:
            positions = np.arange(part.start, part.start + len(part.token_ids))
            pages = np.array(part.pages)
            self.cache[pages[positions // self.page_size], positions % self.page_size] = (
                part.token_ids
            )
            for position in positions[len(positions) - part.logit_count :]:
                before = max(position - 1, 0)
                pair = [
                    self.cache[pages[p // self.page_size], p % self.page_size]
                    for p in (before, position)
                ]
                assert min(pair) >= 0, "a slice was scored whose past is not in its pages"
                rows.append(self.table[pair[0], pair[1]])
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What plain greedy decoding gives."""
        tokens = list(prompt)
        while len(tokens) - len(prompt) < max_tokens:
            tokens.append(int(self.table[tokens[max(len(tokens) - 2, 0)], tokens[-1]].argmax()))
            if tokens[-1] == EOS:
                break
        return tokens[len(prompt) :]


class Client:
    """Collects what one request is sent."""

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
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.chunks[-1].finish_reason if self.chunks else None


class ScriptedDrafter:
    """A drafter in the test's hands: keeps what it was told, proposes what it is given."""

    def __init__(
        self, engine: Engine, name: str = "scripted", family: str = "scripted", **hello: object
    ) -> None:
        self.engine = engine
        self.told: list[StepBatch] = []
        self.error: OutriderError | None = None
        self.length: dict[int, int] = {}
        """The committed length that it was told of, by sequence."""
        self.ahead: dict[int, list[int]] = {}
        """Its guesses behind that, as far as no verdict contradicts them."""
        fields = {"max_draft_tokens": 16, **hello}
        self.handle: Drafter = engine.drafting.join(Hello(name, family, "f", **fields), self._sink)  # type: ignore[arg-type]

    def _sink(self, message: StepBatch | OutriderError) -> None:
        if isinstance(message, OutriderError):
            self.error = message
            return
        self.told.append(message)
        for opened in message.opened:
            self.length[opened.sequence_id] = len(opened.token_ids)
            self.ahead[opened.sequence_id] = []
        for verdict in message.verdicts:
            new, ahead = verdict.new_token_ids, self.ahead[verdict.sequence_id]
            self.length[verdict.sequence_id] = verdict.committed_length
            self.ahead[verdict.sequence_id] = ahead[len(new) :] if ahead[: len(new)] == new else []

    def propose(self, sequence_id: int, tokens: list[int], *, anew: bool = False) -> None:
        """Propose tokens behind its guesses so far, or `anew` behind what is committed."""
        # Before it is sent, since the engine may answer at once.
        self.ahead[sequence_id] = [*tokens] if anew else [*self.ahead[sequence_id], *tokens]
        self.send(Proposal(sequence_id, self.length[sequence_id], list(self.ahead[sequence_id])))

    def skip(self, sequence_id: int) -> None:
        self.engine.drafting.on_drafts(
            self.handle, DraftBatch(skips=[Skip(sequence_id, self.length[sequence_id])])
        )

    def send(self, *proposals: Proposal) -> None:
        self.engine.drafting.on_drafts(self.handle, DraftBatch(list(proposals)))
        self.engine.drain_inbox()


def make_engine(
    *,
    page_count: int = 64,
    page_size: int = 4,
    limits: Limits | None = None,
    seed: int = 0,
    trust: bool = False,
    eos_bias: float = -1.0,
    always_draft: bool = False,
    clock: Clock = monotonic,
    deliver: Callable[[list[Delivery]], None] | None = None,
) -> tuple[Engine, TableModel]:
    """An engine over a table model; without `deliver`, sinks are called at once, on the caller's thread."""

    def call(deliveries: list[Delivery]) -> None:
        for sink, argument in deliveries:
            sink(argument)

    model = TableModel(page_count, page_size, seed, eos_bias)
    pool = PagePool(page_count, page_size)
    engine = Engine(
        model,
        pool,
        deliver or call,
        Metrics("fake"),
        limits or Limits(),
        trust_draft_distributions=trust,
        always_draft=always_draft,
        clock=clock,
    )
    return engine, model


def make_plan(engine: Engine, times: int = 1) -> Plan:
    """Plan so many times for what runs; each plan rests on the one before it. The last one is the engine's."""
    for _ in range(times):
        running = engine.scheduler.running.values()
        engine.drafting.plan = engine.planner.plan(running, engine.drafting.plan, 1, engine.clock())
    return engine.drafting.plan
