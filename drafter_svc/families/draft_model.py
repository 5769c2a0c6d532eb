"""The draft model that a process uses for all its verifiers, and the thread on which it runs.

A connection's ModelFamily calls `DraftModel.grow` on the event loop to start a round. One worker
thread runs the forwards of all rounds, and a forward drafts for the sequences of all verifiers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from drafter_svc.families.cached_draft import CachedDraft
from drafter_svc.families.forwards import DEVICE_LOST, Forwards
from drafter_svc.families.shared_pages import SharedPagePool
from drafter_svc.families.vocabulary import Vocabulary
from outrider.grammar.compiler import GrammarCompiler
from outrider.lm.runner import ModelRunner


@dataclass(eq=False, slots=True)
class _Round:
    """The drafts that one connection wants to grow now.

    `urgent` says that the connection's verifier may be waiting for the drafts.
    """

    drafts: list[CachedDraft]
    urgent: bool
    interrupted: Callable[[], bool]
    ended: Future[None] = field(default_factory=Future)
    wanting: list[CachedDraft] = field(default_factory=list)
    """The drafts that want more tokens from the coming forward."""

    def pause_prompts(self) -> None:
        """Drop the drafts that still read their prompts, if other drafts have started to guess.

        Such a round reads only one chunk of prompts, so the drafts that guess need not wait for
        more chunks.
        """
        self.drafts = [draft for draft in self.drafts if draft.begun] or self.drafts


class DraftModel:
    """The loaded model, its thread and the pages of its KV cache.

    A connection has one round at a time. Rounds that overlap share forwards, so no connection waits
    until another has all its drafts. Rounds of verifiers that may be waiting go before rounds that
    run ahead of their verifiers.
    """

    fatal: tuple[type[Exception], ...] = (DEVICE_LOST,)

    def __init__(
        self,
        runner: ModelRunner,
        thread: ThreadPoolExecutor,
        *,
        max_batch_tokens: int = 512,
        max_entries: int = 32,
        grammars: GrammarCompiler | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """`thread` has only one worker, and `runner` was loaded on it.

        `max_batch_tokens` bounds the tokens of one forward, and `max_entries` the entries of the
        sparse distribution that is sent with a sampled token. With `grammars`, tokens that a
        request's grammar forbids are not proposed. `vocabulary` is needed if the target's tokenizer
        is not the draft model's.
        """
        self.runner = runner
        self.vocabulary = vocabulary
        self.pool = SharedPagePool(runner.page_count, runner.page_size)
        self._thread = thread
        self._forwards = Forwards(
            runner, self.pool, max_batch_tokens, max_entries, grammars, vocabulary
        )
        # The event loop appends rounds to this queue, and the model's thread takes rounds from it.
        self._arriving: deque[_Round] = deque()
        self._turn = 0

    def fits(self, draft: CachedDraft) -> bool:
        """Reserve pages for all tokens of a draft. The event loop calls this.

        Return False if there are too few pages, or for another reason of `Forwards.fits`.
        """
        return self._forwards.fits(draft)

    def grow(
        self, drafts: list[CachedDraft], *, urgent: bool, interrupted: Callable[[], bool]
    ) -> Future[None]:
        """Start a round. The event loop calls this; the forwards run on the model's thread.

        The round ends when each draft has reached its goal, cannot grow further, or was dropped by
        `pause_prompts`. It ends earlier if `interrupted` returns True after a forward. When the
        round has ended, the future is done, and no later forward touches these drafts. If a forward
        for these drafts failed, the future has its exception; tokens guessed before are kept.
        """
        arrived = _Round(drafts, urgent, interrupted)
        self._arriving.append(arrived)
        self._thread.submit(self._work)
        return arrived.ended

    # --- on the model's thread ---

    def _work(self) -> None:
        """Run forwards until no round is left. New rounds join between two forwards."""
        rounds: list[_Round] = []
        try:
            while self._take_arriving(rounds):
                rounds[:] = self._advance(rounds)
        # The caller of `grow` gets the exception from its future.
        except Exception as error:  # noqa: BLE001
            for left in rounds:
                _end(left, error)

    def _take_arriving(self, rounds: list[_Round]) -> list[_Round]:
        """Add the newly arrived rounds to `rounds`, and return `rounds`."""
        while self._arriving:
            arrived = self._arriving.popleft()
            if not arrived.ended.set_running_or_notify_cancel():
                continue
            try:
                self._forwards.begin(arrived.drafts)
            # The caller of `grow` gets the exception from its future.
            except Exception as error:  # noqa: BLE001
                _end(arrived, error)
            else:
                rounds.append(arrived)
        return rounds

    def _advance(self, rounds: list[_Round]) -> list[_Round]:
        """Run one forward and end the rounds that are complete; return the rounds that go on."""
        for each in rounds:
            each.wanting = self._forwards.wanting(each.drafts)
            if not each.wanting:
                _end(each)
        rounds = [each for each in rounds if each.wanting]
        front = [each for each in rounds if each.urgent] or rounds
        if front:
            self._forward(self._rotated(front))
        for each in rounds:
            if not each.ended.done() and each.interrupted():
                _end(each)
        for each in front:
            each.pause_prompts()
        return [each for each in rounds if not each.ended.done()]

    def _rotated(self, rounds: list[_Round]) -> list[_Round]:
        """Return the rounds, another one first each time: a forward may lack room for some."""
        self._turn += 1
        first = self._turn % len(rounds)
        return rounds[first:] + rounds[:first]

    def _forward(self, rounds: list[_Round]) -> None:
        """Run one forward for all rounds. If it fails, run a forward for each round.

        After a failure, only the round that causes it loses its drafts.

        Within a round, drafts that lack fewer tokens in their KV cache go first.
        """
        drafts: list[CachedDraft] = []
        for each in rounds:
            drafts += sorted(each.wanting, key=lambda draft: draft.unread_count)
        try:
            self._forwards.grow(drafts)
        # The caller of `grow` gets the exception from its future.
        except Exception as error:  # noqa: BLE001
            if len(rounds) == 1:
                _end(rounds[0], error)
                return
            for each in rounds:
                self._forward([each])


def _end(over: _Round, error: Exception | None = None) -> None:
    """Complete a round's future, with an exception if a forward of the round failed."""
    if over.ended.done():
        return
    if error is not None:
        over.ended.set_exception(error)
    else:
        over.ended.set_result(None)
