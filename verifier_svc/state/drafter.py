"""A connected drafter and its measurements. This module uses no stream and no policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import DraftBatch, Hello, StepBatch
from outrider.protocol.model_info import DrafterInfo
from verifier_svc.state.acceptance_rate import AcceptanceRate, Latency, SiblingRates
from verifier_svc.state.acceptance_watch import AcceptanceWatch

# A new drafter must make this many right guesses before it counts as proven.
_TEST_GUESSES = 8
# A new drafter becomes doubtful when it was told of this many steps since its last right guess: the
# first number is for a drafter that never answered, the second for a drafter that answers.
_SILENT_STEPS = 8
_ANSWERING_STEPS = 32
# A drafter that has answered before counts as silent only after all of these times: `_SILENT_STEPS`
# steps, `_SILENT_LATENCIES` of its latencies, and `_SILENT_S` seconds, because a busy machine may
# keep a process from running for that long.
_SILENT_LATENCIES = 8
_SILENT_S = 0.1
# A wrong guess counts as this many further steps.
_WRONG_STEPS = 4
# Decay of the rates over all of a drafter's sequences: they remember a hundred drafts. If they
# remembered ten, the prior alone would give a drafter that is always wrong a rate of 0.23 on each
# new sequence.
LONG_MEMORY = 0.99
# Weight of the newest answer in a drafter's `answer_rate`.
_RECENT_ANSWER = 0.05
# A drafter is quick if it drafts a token in at most this share of a plain step's time. The share is
# small because the drafter may slow down the target meanwhile, wherever it computes.
_QUICK_SHARE = 0.05
# A message takes `_MESSAGE_BYTES` of memory besides its size on the wire, `_TOKEN_BYTES` for each
# token, and `_ENTRY_BYTES` for each proposal and skip. A message of 4096 skips fills its stream's
# budget until the engine takes the message.
_MESSAGE_BYTES = 1024
_TOKEN_BYTES = 16
_ENTRY_BYTES = 256
MOST_ANSWERS = 2**16
"""Each message to a drafter allows it some proposals and skips. Unused allowances add up, but to no
more than this number of proposals and of skips. A drafter that answers each message stays below the
number, even if it reads a thousand steps of 64 sequences at once."""


def held_bytes(byte_count: int, batch: DraftBatch | None = None) -> int:
    """Return roughly how much memory a message of `byte_count` bytes on the wire takes.

    The engine's time for a batch grows with the batch's tokens and entries too, so a bound on this
    memory bounds the time as well.
    """
    held = byte_count + _MESSAGE_BYTES
    if batch is None:
        return held
    token_count = sum([len(each.token_ids) for each in batch.proposals])
    return held + _TOKEN_BYTES * token_count + _ENTRY_BYTES * _entry_count(batch)


def _entry_count(batch: DraftBatch) -> int:
    return len(batch.proposals) + len(batch.skips)


@dataclass(eq=False, slots=True)
class Drafter:
    """A connected drafter."""

    hello: Hello
    sink: Callable[[StepBatch | OutriderError], None]
    holder: str = ""
    """The common name of the drafter's certificate; empty without TLS."""
    source: str = ""
    """The drafter's owner: the common name of its certificate, or without TLS its address."""
    round_trip: Latency = field(default_factory=Latency)
    """Time from a verdict that asks for a draft to the answer, without the time of drafting."""
    token_time: Latency = field(default_factory=Latency)
    """Time to draft one token."""
    rates: dict[tuple[bool, bool, bool], list[AcceptanceRate]] = field(default_factory=dict)
    """Acceptance over all the drafter's sequences, keyed by kind of traffic, in lists like
    `Assignment.rates`. A new sequence has these rates as priors."""
    lengths: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(1.0, decay=LONG_MEMORY))
    """The lengths of the drafter's drafts, as in `Assignment.lengths`.

    They are a new sequence's prior.
    """
    sibling_rates: dict[tuple[bool, bool, bool], SiblingRates] = field(default_factory=dict)
    """Measurements of the siblings of the drafter's main guesses, keyed by kind of traffic."""
    outbox: StepBatch = field(default_factory=StepBatch)
    """Messages of the current step that are to be sent to the drafter."""
    sequence_ids: set[int] = field(default_factory=set)
    last_sequence_id: int = 0
    """The highest sequence id that was ever announced to the drafter."""
    feature_width: int = 0
    """The width of a token's features that the drafter gets; 0 if it gets none."""
    projects_features: bool = False
    """True if the drafter's features are the result of the projection that it asked for."""
    is_local: bool = False
    """True if the drafter runs in the verifier's process."""
    trusted: bool = False
    """True if the drafter's claimed distributions count where sampled drafts are accepted."""
    on_target_device: bool = False
    """True if the drafter computes on the target's GPU, or on cores that the target uses."""
    busy_until: float = 0.0
    """The time by which the drafter should have filled all its windows (seconds)."""
    draining: bool = False
    # At first a drafter may send one entry, although no message to it has allowed one. An entry
    # with an id that was never opened therefore gets the error about ids, not the error about too
    # many entries.
    proposals_left: int = 1
    """The number of proposals that the drafter may send before it gets a further message."""
    skips_left: int = 1
    """The number of skips that the drafter may send before it gets a further message."""
    taken_bytes: int = 0
    """The `held_bytes` of the drafter's messages that the engine has processed."""
    right_guesses: int = 0
    """The number of drafts whose first token was right, at most `_TEST_GUESSES`."""
    proven: bool = False
    """True if the drafter has passed its trial. A proven drafter is preferred to others."""
    told_steps: int = 0
    """Steps of the drafter's trial since its last right guess.

    A wrong guess counts as further steps.
    """
    silent_at: float = math.inf
    """The time from which the drafter counts as silent unless it answers (seconds); inf if it owes
    no answer."""
    silent: bool = False
    """True if the drafter has stopped answering."""
    paused: bool | None = None
    """True if drafts did not pay in the last plan that considered the drafter.

    None if no plan has considered it.
    """
    turn: int = 0
    """The number of the drafter's last turn. Joining is a turn, and so is getting a sequence."""
    answer_rate: float = 1.0
    """Share of the drafter's answers that held a draft: a running mean over all its sequences."""
    verified_count: int = 0
    accepted_count: int = 0
    acceptance_watch: AcceptanceWatch = field(default_factory=AcceptanceWatch)

    @property
    def id(self) -> str:
        """The id with which the drafter registered."""
        return self.hello.drafter_id

    @property
    def blamed(self) -> str:
        """The name under which its faults count. With TLS, a new id does not reset the count."""
        return self.holder or self.id

    @property
    def answered(self) -> bool:
        """True if the drafter has sent any message since it joined."""
        return self.taken_bytes > 0

    @property
    def on_trial(self) -> bool:
        """True if the drafter has yet to show what its guesses are worth."""
        return not self.proven and not self.is_doubtful

    @property
    def is_doubtful(self) -> bool:
        """True if the drafter fell silent, or failed its trial: by skips, or late or wrong drafts.

        A doubtful drafter is only probed, on one sequence at a time.
        """
        if self.silent or self.proven:
            return self.silent
        patience = _ANSWERING_STEPS if self.answered else _SILENT_STEPS
        return self.told_steps >= patience

    @property
    def merit(self) -> float:
        """The probability that asking the drafter yields a right first token, to compare drafters.

        It is the probability for the kind of traffic that the drafter guesses best. Only drafts
        outside a run count, although quick drafters are right more often within a run.
        """
        rates = [by_run[0].by_position[0] for by_run in self.rates.values()]
        return self.answer_rate * max(rates, default=0.0)

    def succeed(self, earlier: Drafter) -> None:
        """Compare acceptance with an earlier stream of this drafter, if that one named weights."""
        before = earlier.hello.weights_version
        if before and before == self.hello.weights_version:
            self.acceptance_watch.resume(earlier.acceptance_watch)
        elif before:
            self.acceptance_watch.continue_from(
                earlier.acceptance_watch, earlier.verified_count, earlier.accepted_count
            )

    def tell(self, now: float, step_s: float) -> None:
        """Count a step of `step_s` seconds, which sent the drafter a message at `now` (seconds)."""
        self.told_steps += not self.proven
        if self.silent_at == math.inf:
            # A wait that ends without a draft raises the drafter's latency afterwards. Such a wait
            # must not postpone this deadline too.
            patience_s = max(_SILENT_STEPS * step_s, _SILENT_LATENCIES * self.latency(1))
            self.silent_at = now + max(patience_s, _SILENT_S)

    def fell_silent(self, now: float) -> bool:
        """Set `silent`; return whether the drafter has become silent since the last call."""
        if self.silent or not self.answered or now <= self.silent_at:
            return False
        self.silent = True
        return True

    def may_answer(self, window_tokens: int) -> None:
        """Let the drafter answer another Opened or Verdict, with a window of `window_tokens`.

        An answer may have one skip, and a proposal for each token that the drafter runs ahead.
        """
        self.skips_left = min(self.skips_left + 1, MOST_ANSWERS)
        self.proposals_left = min(self.proposals_left + window_tokens, MOST_ANSWERS)

    def count_entries(self, batch: DraftBatch) -> None:
        """Count a message's entries against what is allowed, since entries cost the engine time.

        Raises OutriderError(PROTOCOL_VIOLATION) for more entries than the messages to the drafter
        allow.
        """
        # A message without entries counts as one proposal.
        self.proposals_left -= max(len(batch.proposals), 1 - _entry_count(batch))
        self.skips_left -= len(batch.skips)
        if self.skips_left < 0:
            raise _too_many("skips", "one skip", -self.skips_left)
        if self.proposals_left < 0:
            raise _too_many(
                "proposals", "a proposal for each token of its window", -self.proposals_left
            )

    def hear(self) -> None:
        """Note that the drafter has answered, or that its guesses were right."""
        self.silent_at = math.inf
        self.silent = False

    def count_guess(self, right: bool) -> None:
        """Count a judged draft; `right` says whether its first token was right."""
        if right:
            # A drafter whose right guesses reach far ahead need not answer each message.
            self.hear()
            self.right_guesses = min(self.right_guesses + 1, _TEST_GUESSES)
            self.proven = self.right_guesses == _TEST_GUESSES
            self.told_steps = 0
        elif not self.proven:
            self.told_steps += _WRONG_STEPS

    def count_answer(self, drafted: bool) -> None:
        """Update `answer_rate` by an answer with or without a draft, or by a missing answer."""
        self.answer_rate += _RECENT_ANSWER * (drafted - self.answer_rate)

    def latency(self, draft_tokens: float) -> float:
        """Return how many seconds after a verdict a draft of `draft_tokens` tokens arrives."""
        return self.round_trip.value + draft_tokens * self.token_time.value

    def busy_s(self, draft_tokens: float) -> float:
        """Return how many seconds the target loses while the drafter drafts `draft_tokens`.

        The number is above 0 only if both compute on one device.
        """
        return draft_tokens * self.token_time.value if self.on_target_device else 0.0

    def is_quick(self, decode_step_s: float) -> bool:
        """True if a draft token takes little time beside a plain step of `decode_step_s` seconds.

        A drafter in the verifier's process is never quick, since it uses the target's device.
        """
        guess_s = self.token_time.value
        return not self.is_local and guess_s <= _QUICK_SHARE * decode_step_s

    @property
    def accepts_sequences(self) -> bool:
        """True if the drafter may get another sequence."""
        limit = self.hello.max_sequence_count
        return not self.draining and (limit is None or len(self.sequence_ids) < limit)

    def info(self, connected: bool) -> DrafterInfo:
        """Return the API's record of the drafter. Fields that were not measured yet are None."""
        hello = self.hello
        rate = self.accepted_count / self.verified_count if self.verified_count else None
        return DrafterInfo(
            hello.drafter_id,
            hello.family,
            hello.placement,
            connected,
            len(self.sequence_ids),
            rate,
            self.round_trip.value or None,
            self.token_time.value or None,
        )


def _too_many(entries: str, allowed: str, excess: int) -> OutriderError:
    message = f"must hold no more than {allowed} for each Opened and Verdict, {excess} are too many"
    field = f"drafts.{entries}"
    return OutriderError(Reason.PROTOCOL_VIOLATION, f"{field} {message}", field)
