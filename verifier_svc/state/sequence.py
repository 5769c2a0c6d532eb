"""One request's state in the engine, and one sequence in the hands of one drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from outrider.errors import OutriderError
from outrider.grammar.backends import Matcher
from outrider.lm.pages import KVSequence
from outrider.messages import (
    DraftDistribution,
    Opened,
    SpeculationStats,
    TokenChunk,
    TokenRequest,
    Window,
)
from outrider.process.telemetry import NO_SPAN, Span
from verifier_svc.state.acceptance_rate import AcceptanceRate
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.trie import Trie

_LENGTHS_TIMED = 8
_RECENT = 0.2
# Steps to the next probe of a silent drafter: behind one that was right, at first, and at most.
_EAGER_BACKOFF, FIRST_BACKOFF, _LONGEST_BACKOFF = 2, 8, 256


@dataclass(eq=False, slots=True)
class Assignment:
    """A sequence in the hands of a drafter."""

    drafter: Drafter
    trie: Trie
    distribution: DraftDistribution
    rate: AcceptanceRate
    learned: AcceptanceRate
    """What its drafter's sequences of this kind teach together."""
    window: Window
    """How far the drafter was last told to run ahead; its trie has room for more."""
    draft_tokens: int
    """How many the drafter was last told to aim at: those of a step, and of the steps that go on until they are there."""
    told_length: int
    """The committed length that it was last told of."""
    opened: bool = False
    """Whether the drafter was told of the sequence."""
    asked: bool = True
    """Whether its drafts pay. If not, the drafter hears nothing but probes, and its drafts are not verified."""
    backoff: int = FIRST_BACKOFF
    """Steps between two probes of a drafter that is not asked; a power of two, so that many are probed in the same step."""
    asked_at: dict[int, float] = field(default_factory=dict)
    """When the drafter was told of a committed length behind which its trie was empty (seconds), until it answers that length."""
    answered_length: int = 0
    """The greatest committed length that it answered. At 0 it may still be at the prompt, which says nothing of its drafting."""
    answer_rate: float = 1.0
    """Share of its answers that held a draft, the last few counting most; for the others nobody should have waited."""
    told_at: float = 0.0
    """When it was last told of a step (seconds)."""

    def back_off(self) -> None:
        """Note a probe: the next one is twice as far away."""
        self.backoff = min(2 * self.backoff, _LONGEST_BACKOFF)

    def all_accepted(self, count: int, draft_tokens: int) -> float:
        """Probability that a draft has its next `count` tokens right; 0 if the trie has no room for them and `draft_tokens`."""
        return (
            self.rate.all_accepted(count) if draft_tokens + count <= self.trie.window.depth else 0.0
        )

    def learn(self, drafted: int, accepted: int) -> None:
        """Note how many of so many tokens were right, up to the first wrong one."""
        self.rate.observe(drafted, accepted)
        self.learned.observe(drafted, accepted)
        if 0 < drafted == accepted and not self.asked:
            self.backoff = _EAGER_BACKOFF

    def timed(self, committed_length: int) -> None:
        """Note that the drafter was told of a length behind which it has to draft anew, to measure how long it takes."""
        self.asked_at[committed_length] = self.told_at
        while len(self.asked_at) > _LENGTHS_TIMED:
            del self.asked_at[next(iter(self.asked_at))]

    def answered(self, at: float, base_length: int, *, drafted: bool) -> float | None:
        """A message came, `at` by the clock: seconds since the drafter was asked if it is the first for that length, late or not.

        Without a draft it says that the drafter has none.
        """
        self.answered_length = max(self.answered_length, base_length)
        asked_at = self.asked_at.pop(base_length, None)
        if self.asked_at:
            # One answer serves for all the lengths that the drafter read at once.
            for length in [length for length in self.asked_at if length < base_length]:
                del self.asked_at[length]
        if asked_at is None:
            return None
        self.answer_rate += _RECENT * (drafted - self.answer_rate)
        return max(at - asked_at, 0.0)

    def due_s(self, now: float) -> float:
        """Seconds until its drafter's next message should be here, by what it usually takes; below 0 when it is late."""
        since = min(self.asked_at.values(), default=self.told_at)
        return self.drafter.latency(self.draft_tokens) - (now - since)


@dataclass(eq=False, slots=True)
class Sequence:
    """One request being generated.

    `tokens` are the committed tokens, the prompt first. The cache holds keys and values of the
    first `kv.num_computed_tokens` of them: between decoding steps, of all but the last.
    """

    id: int
    request: TokenRequest
    seed: int
    max_draft_tokens: int
    end_ids: frozenset[int]
    kv: KVSequence
    sink: Callable[[TokenChunk | OutriderError], None]
    tokens: list[int]
    stats: SpeculationStats
    assignments: dict[str, Assignment] = field(default_factory=dict)
    cached_token_count: int = 0
    unsent: TokenChunk | None = None
    matcher: Matcher | None = None
    """Where the committed output stands in its grammar."""
    mask_width: int = 0
    unscored: range = range(0)
    """The prompt's tokens, by position, whose log probabilities are wanted and not yet told."""
    admitted: bool = False
    """Whether it ever left the queue; one that was preempted has, and keeps its drafters."""
    span: Span = NO_SPAN
    submitted_at: float = 0.0
    """When the request came (monotonic seconds)."""
    scheduled_at: float | None = None
    """When it was first part of a batch (monotonic seconds)."""

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that a forward has not seen; 1 when decoding."""
        return len(self.tokens) - self.kv.num_computed_tokens

    @property
    def most_draft_tokens(self) -> int:
        """Draft tokens that could still be committed: one token of each step is the target's own."""
        left = self.request.max_tokens - (len(self.tokens) - len(self.request.prompt))
        return left - 1 if left > 1 else 0

    def opened_for(self, assignment: Assignment) -> Opened:
        """The announcement to a drafter."""
        return Opened(
            sequence_id=self.id,
            token_ids=list(self.tokens),
            # Whoever draws with our noise needs the seed that it is drawn from.
            sampling=replace(
                self.request.sampling,
                seed=self.seed if assignment.distribution is DraftDistribution.COUPLED else None,
            ),
            distribution=assignment.distribution,
            window=assignment.window,
            draft_tokens=assignment.draft_tokens,
            tenant=self.request.tenant,
            traceparent=self.span.traceparent,
            grammar=self.request.grammar,
            prediction=self.request.prediction,
            prompt_length=len(self.request.prompt),
        )
