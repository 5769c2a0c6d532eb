"""One request's state in the engine, and its assignments to drafters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import mul

from outrider.errors import OutriderError
from outrider.grammar.backends import Matcher
from outrider.lm.pages import KVSequence
from outrider.process.observability.telemetry import NO_SPAN, Span
from outrider.protocol.draft_messages import Features, Opened, Window
from outrider.protocol.messages import (
    DraftDistribution,
    PauseReason,
    SpeculationStats,
    TokenChunk,
    TokenRequest,
)
from verifier_svc.state.acceptance_rate import AcceptanceRate, SiblingRates
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.mask_work import MaskWork
from verifier_svc.state.trie import Trie

_LENGTHS_TIMED = 8
_LEAST_CHANCE = 0.1
# An answer that is late by this many latencies counts as an answer without a draft.
_SILENT_LATENCIES = 8.0
# Weight of the newest answer in `answer_rate`.
_RECENT = 0.2
# Steps between two probes: `FIRST_BACKOFF` at the beginning, `_EAGER_BACKOFF` after a probe whose
# guesses were right, and `_LONGEST_BACKOFF` at most.
_EAGER_BACKOFF = 2
FIRST_BACKOFF = 8
_LONGEST_BACKOFF = 256
# There are three classes of drafts, each with its own rate: drafts after a run of 0, of 1 to 3, and
# of at least 4 right guesses.
_RUNS = (1, 4)
RUN_CLASSES = len(_RUNS) + 1


def run_class(run: int) -> int:
    """Return the index of the acceptance rate that holds after a run of right guesses."""
    return bisect_right(_RUNS, run)


@dataclass(eq=False, slots=True)
class Assignment:
    """One sequence assigned to one drafter."""

    drafter: Drafter
    trie: Trie
    distribution: DraftDistribution
    """How the drafter is to choose its draft tokens."""
    rates: list[AcceptanceRate]
    """Acceptance of this sequence's drafts, indexed by `run_class` of the run before a draft."""
    drafter_rates: list[AcceptanceRate]
    """Acceptance over all the drafter's sequences of this kind of traffic, indexed likewise."""
    window: Window
    """How far the last message lets the drafter run ahead; `trie` may have room for more."""
    draft_tokens: int
    """Draft tokens that the last message to the drafter asked for.

    They cover a step, and the tokens that are committed before the draft arrives.
    """
    sent_length: int
    """The committed length in the last message to the drafter."""
    tree_tokens: int = 0
    """Draft tokens of all branches together that the last message asked for; 0 for a chain."""
    lengths: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(1.0))
    """For each position, how often a draft has a token there if all earlier tokens were right."""
    sibling_rates: SiblingRates = field(default_factory=SiblingRates)
    """Measurements of the siblings of the drafter's main guesses, for this kind of traffic."""
    opened: bool = False
    """True if the sequence was announced to the drafter."""
    asked: bool = True
    """True if the drafter is asked for drafts. If not, it gets only probes; nobody waits for it.

    The drafter's earlier guesses may still join another drafter's guesses in a tree.
    """
    backoff: int = FIRST_BACKOFF
    """Steps between two probes. A power of two, so that many sequences are probed in one step."""
    asked_at: dict[int, float] = field(default_factory=dict)
    """Maps a committed length to when the drafter was asked to draft after it (seconds).

    It has a length only if the trie was then empty, and only until the drafter answers.
    """
    answered_length: int = 0
    """The greatest committed length that the drafter answered.

    At 0 the drafter may still be computing the prompt, so its silence says nothing about its speed.
    """
    answer_rate: float = 1.0
    """Share of the drafter's answers that held a draft, as a running mean.

    The other answers are skips, which are not worth a wait. A long overdue answer counts as a skip.
    """
    feature_position: int = 0
    """The drafter gets no further features of tokens before this position."""
    held_features: list[Features] = field(default_factory=list)
    """Features that wait for the verdict of their tokens."""
    told_at: float = 0.0
    """The time at which the last message to the drafter was written (seconds)."""
    run: int = 0
    """The number of the last committed tokens that the drafter guessed in a row and in time.

    The tokens are counted only for quick drafters, such as lookups; for other drafters the number
    stays 0. A text that repeats itself mostly goes on doing so, so the run says more about the next
    draft than the drafter's guesses for other texts do.
    """
    idle_steps: int = 0
    """Steps since a guess of the drafter was last committed; counted only for quick drafters."""
    rate: AcceptanceRate = field(init=False)
    """The rate of `rates` that holds for a draft after the present run."""

    def __post_init__(self) -> None:
        self.rate = self.rates[0]

    def set_run(self, run: int) -> None:
        """Note how many of the last committed tokens the drafter has guessed in a row."""
        self.run = run
        self.rate = self.rates[run_class(run)]

    def follow(self, guessed: int, right: int, decode_step_s: float, *, skipped: bool) -> None:
        """Update a quick drafter's run after a commit that judged `guessed` of its main guesses.

        The first `right` of these guesses were right. If there was no guess, the run continues,
        unless the drafter `skipped`.
        """
        if not self.drafter.is_quick(decode_step_s):
            return
        self.idle_steps = 0 if right else self.idle_steps + 1
        if right < guessed:
            self.set_run(0)
        elif guessed:
            self.set_run(self.run + right)
        elif skipped:
            self.set_run(0)

    @property
    def takes_features(self) -> bool:
        """True if the assignment's drafter gets features of the sequence."""
        return self.opened and self.drafter.feature_width > 0

    def back_off(self) -> None:
        """Note a probe, and double the number of steps until the next probe."""
        self.backoff = min(2 * self.backoff, _LONGEST_BACKOFF)

    def prob_all_accepted(self, count: int, draft_tokens: int) -> float:
        """Return the probability that the next `count` tokens of a draft are right.

        The probability is 0 if the trie has no room for these tokens after `draft_tokens` other
        tokens.
        """
        if draft_tokens + count > self.trie.window.depth:
            return 0.0
        return self.rate.prob_all_accepted(count)

    def promise(self, draft_tokens: int) -> tuple[float, float]:
        """Return the mean numbers of tokens and of right tokens if `draft_tokens` are asked for.

        A drafter that sends few tokens is credited with few, even if they are nearly always right.
        """
        if self.lengths.prob_all_accepted(draft_tokens) == 1.0:
            return draft_tokens, self.rate.expected_tokens(draft_tokens) - 1.0
        lengths = self.lengths.cumulative[:draft_tokens]
        return sum(lengths), sum(map(mul, lengths, self.rate.cumulative))

    def final_length(self, draft_tokens: int) -> tuple[int, int]:
        """Return how many tokens the drafter was asked for, and how many its draft has in the end.

        Both numbers are at most `draft_tokens`, since the step verifies no more. The second number
        is 0 if there is no draft, or if the draft may still grow before the next verdict.
        """
        if draft_tokens == 0 or not self.asked:
            return 0, 0
        wanted = min(draft_tokens, self.draft_tokens)
        return wanted, self.ready_tokens(wanted) if self.trie.ready(wanted) else 0

    def observe_length(self, wanted: int, length: int, right: int) -> None:
        """Count a draft by the two lengths that `final_length` returned for it.

        The draft's first `right` tokens were committed. Drafts with many right tokens are longer
        than other drafts, so positions after the first wrong token do not count.
        """
        if length:
            seen = min(wanted, right + 1)
            there = min(length, seen)
            self.lengths.observe(seen, there)
            self.drafter.lengths.observe(seen, there)

    def ready_tokens(self, draft_tokens: int) -> int:
        """Return the length of the ready path, at most `draft_tokens`, to choose between drafts.

        A sampled path counts as complete. Its drafter may stop after a token because of the token's
        value, and that value must not decide which path is verified: a sampled path, another path,
        or a path that is still waited for.
        """
        length = min(len(self.trie.main_path), draft_tokens)
        if length and self.distribution is DraftDistribution.SPARSE:
            return draft_tokens
        return length

    def observe_acceptance(self, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` tokens; its first `accepted` tokens were right."""
        self.judge(drafted, accepted)
        self.observe_rates(drafted, accepted, self.run)

    def observe_rates(self, drafted: int, accepted: int, run: int) -> None:
        """Count a judged draft in the rates that hold after `run` right guesses."""
        place = run_class(run)
        self.rates[place].observe(drafted, accepted)
        self.drafter_rates[place].observe(drafted, accepted)

    def judge(self, drafted: int, accepted: int) -> None:
        """Note whether the drafter's draft was right: the next message to it depends on that."""
        if drafted:
            self.drafter.count_guess(accepted > 0)
        if 0 < drafted == accepted and not self.asked:
            self.backoff = _EAGER_BACKOFF

    def expect_answer(self, committed_length: int) -> None:
        """Start timing the drafter's answer to the message just written for this length."""
        self.asked_at[committed_length] = self.told_at
        while len(self.asked_at) > _LENGTHS_TIMED:
            del self.asked_at[next(iter(self.asked_at))]

    def on_answer(self, at: float, base_length: int, *, drafted: bool) -> float | None:
        """Note a message that arrived at the time `at` (seconds) and answers `base_length`.

        The message is a proposal if `drafted`, else a skip. Returns the seconds since the drafter
        was asked; None if that was not timed, or if this is not its first answer to that length.
        """
        self.answered_length = max(self.answered_length, base_length)
        asked_at = self.asked_at.pop(base_length, None)
        if self.asked_at:
            # A drafter may read several verdicts at once and answer only the last of them.
            for length in [length for length in self.asked_at if length < base_length]:
                del self.asked_at[length]
        if asked_at is None:
            return None
        self._count_answer(drafted)
        return max(at - asked_at, 0.0)

    def count_silence(self, now: float) -> None:
        """Count an answer without a draft if the drafter is overdue by many times its latency.

        Call this only while the drafter owes an answer.
        """
        latency_s = self.drafter.latency(self.draft_tokens)
        if latency_s > 0.0 and self.due_s(now) < -_SILENT_LATENCIES * latency_s:
            self._count_answer(False)

    def _count_answer(self, drafted: bool) -> None:
        self.answer_rate += _RECENT * (drafted - self.answer_rate)
        self.drafter.count_answer(drafted)

    @property
    def chance(self) -> float:
        """The probability that asking yields a draft, to compare drafters.

        The probability is never near 0: a drafter whose texts are hard to guess for a while should
        still be asked, because asking costs little.
        """
        return max(self.answer_rate, _LEAST_CHANCE)

    def due_s(self, now: float) -> float:
        """Return in how many seconds the drafter's next message should arrive.

        The number is below 0 when the message is late.
        """
        since = min(self.asked_at.values(), default=self.told_at)
        drafted, _ = self.promise(self.draft_tokens)
        return self.drafter.latency(drafted) - (now - since)


@dataclass(eq=False, slots=True)
class Sequence:
    """One request being generated.

    The cache has keys and values of the first `kv.num_computed_tokens` tokens. Between the steps of
    a decoding sequence, the last token is the only token without keys and values.
    """

    id: int
    """The sequence's name for drafters.

    The name changes when the sequence goes on after it was unread.
    """
    arrival: int
    """The sequence's place in the order of arrival."""
    request: TokenRequest
    seed: int
    max_draft_tokens: int
    end_ids: frozenset[int]
    kv: KVSequence
    sink: Callable[[TokenChunk | OutriderError], None]
    tokens: list[int]
    """The committed tokens, beginning with the prompt."""
    stats: SpeculationStats
    assignments: dict[str, Assignment] = field(default_factory=dict)
    """The assignments, keyed by drafter id."""
    past_drafters: set[str] = field(default_factory=set)
    """Ids of drafters that lost the sequence to other drafters. They do not get it again."""
    cached_token_count: int = 0
    page_hashes: list[bytes] = field(default_factory=list)
    """Block hashes of the sequence's full pages, computed only while it waits for pages."""
    unsent: TokenChunk | None = None
    matcher: Matcher | None = None
    """The state of the request's grammar after the output without its last `grammar_lag` tokens."""
    grammar_lag: int = 0
    """The number of committed tokens that `matcher` lacks; the next masks' work advances it."""
    mask_width: int = 0
    mask_work: MaskWork | None = None
    """The masks of the sequence's next step, which waits for them; None if none were requested."""
    mask_row_s: float = 0.0
    """Processor time of the sequence's last masks (seconds a row)."""
    mask_excess_s: float = 0.0
    """Processor time of all the sequence's masks beyond each mask's free time (seconds)."""
    unscored: range = range(0)
    """Positions of prompt tokens whose log probabilities are wanted and not yet sent."""
    admitted: bool = False
    """True if the sequence ever left the queue.

    If it is preempted, it stays admitted, with its drafters.
    """
    pauses: dict[PauseReason, int] = field(default_factory=dict)
    """The number of steps that could have verified a draft but had none, keyed by reason."""
    span: Span = NO_SPAN
    submitted_at: float = 0.0
    """The time at which the request came (monotonic seconds)."""
    scheduled_at: float | None = None
    """The time of the first batch (monotonic seconds), plus how long the sequence was unread."""
    unread_at: float | None = None
    """The time at which the caller stopped reading (monotonic seconds); None while it reads."""

    @property
    def has_begun(self) -> bool:
        """True if the sequence ever ran, here or at another verifier."""
        return self.admitted or bool(self.request.committed)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of committed tokens that no forward has processed; 1 when decoding."""
        return len(self.tokens) - self.kv.num_computed_tokens

    @property
    def most_draft_tokens(self) -> int:
        """How many draft tokens one step could commit, besides the target's own token."""
        left = self.request.max_tokens - (len(self.tokens) - len(self.request.prompt))
        return left - 1 if left > 1 else 0

    def opened_for(self, assignment: Assignment) -> Opened:
        """Return the message that announces the sequence to a drafter."""
        # Only a drafter that draws with the coupled noise gets the seed of that noise.
        coupled = assignment.distribution is DraftDistribution.COUPLED
        return Opened(
            sequence_id=self.id,
            token_ids=list(self.tokens),
            sampling=replace(self.request.sampling, seed=self.seed if coupled else None),
            distribution=assignment.distribution,
            window=assignment.window,
            draft_tokens=assignment.draft_tokens,
            tenant=self.request.tenant,
            traceparent=self.span.traceparent,
            grammar=self.request.grammar,
            prediction=self.request.prediction,
            prompt_length=len(self.request.prompt),
            tree_tokens=assignment.tree_tokens,
        )
