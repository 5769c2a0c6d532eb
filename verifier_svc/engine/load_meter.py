"""Measures for gateways how busy the engine is: its queue, and how long sequences take."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace

from outrider.protocol.model_info import Load
from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.state.sequence import Sequence

# The mean time in the batch covers about `_SEQUENCES` sequences, or `_BATCHES` full batches if
# these have more sequences. The window is this wide because the estimated wait multiplies an error
# of the mean by the length of the queue.
_SEQUENCES = 64
_BATCHES = 4
# Until a first sequence has ended, each sequence is expected to take this many forwards, as for a
# short answer. A verifier that has timed nothing yet must not announce waits of minutes to a burst
# of requests.
_FIRST_FORWARDS = 128.0


class LoadMeter:
    """Measures the load of one engine, on the engine's thread.

    `running` and `waiting` hold the engine's sequences.
    """

    def __init__(
        self,
        running: Sized,
        waiting: Sized,
        most_running: int,
        most_waiting: int,
        cost: ForwardCost,
    ) -> None:
        self._cost = cost
        self._running = running
        self._waiting = waiting
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._recent = max(_SEQUENCES, _BATCHES * most_running)
        self._ended_count = 0
        # Means of the recent sequences. Of a prompt, only computed tokens count, not cached tokens.
        self._sequence_s: float | None = None
        self._forwards = 0.0
        self._prompt_tokens = 0.0
        self._admitted_count = 0

    def admitted(self) -> None:
        """Note how many sequences run. Call it when no other waiting sequence fits."""
        self._admitted_count = len(self._running)

    def ended(self, sequence: Sequence, now: float) -> None:
        """Count an ended sequence's time in the batch, at most until its client stopped reading."""
        if sequence.scheduled_at is None:
            return
        if sequence.unread_at is not None:
            now = sequence.unread_at
        seconds = max(now - sequence.scheduled_at, 0.0)
        self._ended_count += 1
        share = 1.0 / min(self._ended_count, self._recent)
        before = self._sequence_s or 0.0
        self._sequence_s = before + share * (seconds - before)
        self._forwards += share * (sequence.stats.forward_count - self._forwards)
        computed = len(sequence.request.prompt) - sequence.cached_token_count
        self._prompt_tokens += share * (computed - self._prompt_tokens)

    def load(self) -> Load:
        """Return the engine's present load.

        Some sequences may have ended since the last admission. The waiting sequences that take
        their places in the next step count as running.
        """
        total = len(self._running) + len(self._waiting)
        running = min(max(len(self._running), self._admitted_count), total)
        load = Load(running, total - running, self._most_running, self._most_waiting)
        return replace(load, sequence_s=self._sequence_s_at(load.places))

    def _sequence_s_at(self, places: int) -> float | None:
        """Return how long a sequence stays in a batch of `places` sequences.

        Return None if nothing was timed. Recent sequences may have run alone, far faster than in a
        full batch. The result is therefore at least the time that the mean number of forwards of
        recent sequences takes in a full batch, plus the time of one prompt for each place.
        """
        if not self._cost.known:
            return self._sequence_s
        forwards = self._forwards if self._ended_count else _FIRST_FORWARDS
        prompts_s = places * self._cost.prompt_token_s * self._prompt_tokens
        full_s = forwards * self._cost.estimate(places, places) + prompts_s
        return max(full_s, self._sequence_s or 0.0)
