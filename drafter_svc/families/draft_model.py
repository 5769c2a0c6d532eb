"""The draft model that all of a process's verifiers share: one thread drafts for all of them in the same forwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from drafter_svc.families.cached_draft import CachedDraft
from drafter_svc.families.forwards import DEVICE_LOST, Forwards
from drafter_svc.families.shared_pages import SharedPagePool
from outrider.grammar.compiler import GrammarCompiler
from outrider.lm.runner import ModelRunner


@dataclass(eq=False, slots=True)
class _Round:
    """What one verifier's stream wants drafted now; `urgent` if that verifier may be waiting."""

    drafts: list[CachedDraft]
    urgent: bool
    interrupted: Callable[[], bool]
    ended: Future[None] = field(default_factory=Future)
    wanting: list[CachedDraft] = field(default_factory=list)
    """The drafts that want more in the coming forward."""

    def pause_prompts(self) -> None:
        """One chunk of prompts a round: sequences that guess already are not held up by more."""
        self.drafts = [draft for draft in self.drafts if draft.begun] or self.drafts


class DraftModel:
    """The loaded model, its thread and the pages of its cache.

    A stream has one round at a time. Rounds that overlap share forwards, so no stream waits until
    another has all its drafts. Rounds of verifiers that may be waiting go before those that run
    ahead of theirs.
    """

    fatal = (DEVICE_LOST,)

    def __init__(
        self,
        runner: ModelRunner,
        thread: ThreadPoolExecutor,
        *,
        max_batch_tokens: int = 512,
        max_entries: int = 32,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`thread` is the one worker that `runner` was loaded on.

        `max_batch_tokens` bounds one forward, `max_entries` the sparse distribution that goes with
        a sampled token. With `grammars`, what a request's grammar forbids is not proposed.
        """
        self.runner = runner
        self.pool = SharedPagePool(runner.page_count, runner.page_size)
        self._thread = thread
        self._forwards = Forwards(runner, self.pool, max_batch_tokens, max_entries, grammars)
        self._arriving: deque[_Round] = deque()
        self._turn = 0

    def fits(self, draft: CachedDraft) -> bool:
        """Reserve pages for all the text there is; False if there are none, or at the end of the model's context."""
        return self._forwards.fits(draft)

    def grow(
        self, drafts: list[CachedDraft], *, urgent: bool, interrupted: Callable[[], bool]
    ) -> Future[None]:
        """Begin a round: forwards until all that is wanted is guessed, or a message waits.

        The future is done once no forward touches these drafts any more. It has the exception of
        a forward that fails for them; what was guessed before stands.
        """
        arrived = _Round(drafts, urgent, interrupted)
        self._arriving.append(arrived)
        self._thread.submit(self._work)
        return arrived.ended

    # --- on the model's thread ---

    def _work(self) -> None:
        """Draft until nothing more is wanted. Rounds that began meanwhile join between two forwards."""
        rounds: list[_Round] = []
        try:
            while self._take_arriving(rounds):
                rounds[:] = self._advance(rounds)
        except Exception as error:  # noqa: BLE001  # raised by who waits for the rounds
            for left in rounds:
                _end(left, error)

    def _take_arriving(self, rounds: list[_Round]) -> list[_Round]:
        """`rounds`, to which those are added that began."""
        while self._arriving:
            arrived = self._arriving.popleft()
            if not arrived.ended.set_running_or_notify_cancel():
                continue
            try:
                self._forwards.begin(arrived.drafts)
            except Exception as error:  # noqa: BLE001  # raised by who waits for the round
                _end(arrived, error)
            else:
                rounds.append(arrived)
        return rounds

    def _advance(self, rounds: list[_Round]) -> list[_Round]:
        """One forward; the rounds that go on behind it."""
        for each in rounds:
            each.wanting = self._forwards.wanting(each.drafts)
            if not each.wanting:
                _end(each)
        rounds = [each for each in rounds if each.wanting]
        front = [each for each in rounds if each.urgent] or rounds
        if front:
            self._forward(self._in_turn(front))
        for each in rounds:
            if not each.ended.done() and each.interrupted():
                _end(each)
        for each in front:
            each.pause_prompts()
        return [each for each in rounds if not each.ended.done()]

    def _in_turn(self, rounds: list[_Round]) -> list[_Round]:
        """A forward has no room for all prompts, so each round is the first in turn."""
        self._turn += 1
        first = self._turn % len(rounds)
        return rounds[first:] + rounds[:first]

    def _forward(self, rounds: list[_Round]) -> None:
        """One forward for all; if that fails, one for each alone, so that those at fault are known."""
        drafts = [
            draft
            for each in rounds
            for draft in sorted(each.wanting, key=lambda draft: draft.unread_count)
        ]
        try:
            self._forwards.grow(drafts)
        except Exception as error:  # noqa: BLE001  # raised by who waits for the round
            if len(rounds) == 1:
                _end(rounds[0], error)
                return
            for each in rounds:
                self._forward([each])


def _end(over: _Round, error: Exception | None = None) -> None:
    """Tell who waits for a round that no forward touches its drafts any more."""
    if over.ended.done():
        return
    if error is not None:
        over.ended.set_exception(error)
    else:
        over.ended.set_result(None)
