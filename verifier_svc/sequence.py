"""One request's state in the engine, and one sequence in the hands of one drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from outrider.errors import OutriderError
from outrider.grammar_backends import Matcher
from outrider.lm.pages import KVSequence
from outrider.messages import Opened, Rule, SpeculationStats, TokenChunk, TokenRequest, Window
from outrider.telemetry import NO_SPAN, Span
from verifier_svc.depth import AcceptanceRate
from verifier_svc.drafters import Drafter
from verifier_svc.trie import Trie

_LENGTHS_TIMED = 8
_RECENT = 0.2
_FIRST_PAUSE = 4
_LONGEST_PAUSE = 256


@dataclass(eq=False, slots=True)
class Pause:
    """Speculation that does not pay is paused by silence: a drafter that hears no verdict spends nothing.

    Once it pays, or after `steps_left` steps as a probe, it is told all that it missed; each pause in a row is twice as long.
    """

    steps_left: int = 0
    length: int = _FIRST_PAUSE
    withheld: list[int] = field(default_factory=list)
    probing: bool = False

    def begin(self, new_token_ids: list[int]) -> None:
        self.steps_left, self.withheld, self.probing = self.length, list(new_token_ids), False
        self.length = min(2 * self.length, _LONGEST_PAUSE)

    def step(self, new_token_ids: list[int], affords_probe: Callable[[], bool], pays: bool) -> bool:
        """Withhold another step's tokens; whether that was the last, as it pays again or a probe is due and can be afforded."""
        self.withheld += new_token_ids
        if pays:
            self.steps_left = 0
            return True
        if self.steps_left > 1 or affords_probe():
            self.steps_left -= 1
        self.probing = self.steps_left == 0
        return self.probing

    def forget(self) -> None:
        """Speculation pays again, so the next pause is a short one."""
        self.length, self.probing = _FIRST_PAUSE, False

    def end(self) -> list[int]:
        """What was withheld."""
        withheld, self.withheld = self.withheld, []
        return withheld


@dataclass(eq=False, slots=True)
class Assignment:
    """A sequence in the hands of a drafter."""

    drafter: Drafter
    trie: Trie
    rule: Rule
    rate: AcceptanceRate
    learned: AcceptanceRate
    """What its drafter's sequences of this kind teach together."""
    window: Window
    """How far the drafter was last told to run ahead; its trie has room for more."""
    draft_tokens: int
    """How many the drafter was last told to aim at: those of a step, and of the steps that go on until they are there."""
    pause: Pause = field(default_factory=lambda: Pause())
    asked_at: dict[int, float] = field(default_factory=dict)
    """When the drafter was told of a committed length behind which its trie was empty (seconds), until it answers that length."""
    answered_length: int = 0
    """The greatest committed length that it answered. At 0 it may still be at the prompt, which says nothing of its drafting."""
    answer_rate: float = 1.0
    """Share of its answers that held a draft, the last few counting most; for the others nobody should have waited."""
    told_at: float = 0.0
    """When it was last told of a step (seconds)."""
    ahead: bool = False
    """Whether the drafter goes on while its last draft is verified, or is asked for so much that nobody waits for it."""

    def asked(self, committed_length: int) -> None:
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

    `tokens` are the committed ones, the prompt first. `kv.length` of them have their keys and values in the cache; between steps of
    a decoding sequence that is all but the last.
    """

    id: int
    request: TokenRequest
    seed: int
    depth_limit: int
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
    depth: int = 0
    """Draft tokens that the coming step should verify, before `draft_limit` cuts it; none before it was planned for."""

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that a forward has not seen; 1 when decoding."""
        return len(self.tokens) - self.kv.length

    @property
    def draft_limit(self) -> int:
        """Draft tokens that could still be committed: one token of each step is the target's own."""
        if self.depth == 0:
            return 0
        # All but one of the tokens that are left.
        most = self.request.max_tokens - (len(self.tokens) - len(self.request.prompt)) - 1
        return self.depth if self.depth < most else max(0, most)

    def opened_for(self, assignment: Assignment) -> Opened:
        """The announcement to a drafter."""
        return Opened(
            sequence_id=self.id,
            token_ids=list(self.tokens),
            # Whoever draws with our noise needs the seed that it is drawn from.
            sampling=replace(self.request.sampling, seed=self.seed if assignment.rule is Rule.COUPLED else None),
            rule=assignment.rule,
            window=assignment.window,
            draft_tokens=assignment.draft_tokens,
            tenant=self.request.tenant,
            traceparent=self.span.traceparent,
            grammar=self.request.grammar,
            prediction=self.request.prediction,
            prompt_length=len(self.request.prompt),
        )
