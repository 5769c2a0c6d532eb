"""Sequences' ids, bounds and chunks, for the native engine and for vLLM's engine.

The queue and the number of unread answers are bounded. Chunks wait here for more tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from outrider.errors import OutriderError, Reason
from outrider.process.clock import Clock
from outrider.protocol.messages import TokenChunk, TokenRequest
from outrider.protocol.model_info import Load, retry_after_s
from verifier_svc.engine.outbox import Outbox
from verifier_svc.state.sequence import Sequence


class SequenceBook:
    """Gives out sequence ids, bounds the queue and unread answers, and holds chunks.

    Only the engine's thread uses it. `max_waiting` bounds the queue and, separately, the number
    of unread answers. `unread` maps ids to sequences whose callers do not read, the longest unread
    first.
    """

    def __init__(
        self, outbox: Outbox, clock: Clock, max_waiting: int, unread: dict[int, Sequence]
    ) -> None:
        self.unread = unread
        self._outbox = outbox
        self._clock = clock
        self._max_waiting = max_waiting
        self._coalesces = True
        self._last_id = 0

    def new_id(self) -> int:
        """Return an id that no sequence has had."""
        self._last_id += 1
        return self._last_id

    # --- the queue ---

    def check_room(self, waiting: int, request: TokenRequest, load: Callable[[], Load]) -> None:
        """Raise OutriderError(OVERLOADED) if the queue of `waiting` sequences has no room.

        For a continued request the bound is twice as high, because another verifier has accepted
        the request before.
        """
        most = self._max_waiting * (2 if request.committed else 1)
        if waiting >= most:
            message = f"{most} requests are waiting already"
            retry_s = retry_after_s(load().wait_s())
            raise OutriderError(Reason.OVERLOADED, message, retry_after_s=retry_s)

    # --- answers that nobody reads ---

    def pause(self, sequence: Sequence) -> Sequence | None:
        """Note that a sequence waits until its caller reads; the engine has stopped running it.

        If too many sequences are unread, returns the sequence that has to end with `slow_reader`:
        the longest unread sequence of the tenant with the most unread sequences.
        """
        sequence.unread_at = self._clock()
        self.unread[sequence.id] = sequence
        if len(self.unread) <= self._max_waiting:
            return None
        counts = Counter([each.request.tenant for each in self.unread.values()])
        return max(self.unread.values(), key=lambda each: counts[each.request.tenant])

    @property
    def slow_reader(self) -> OutriderError:
        """The error that ends a sequence that `pause` has returned."""
        message = f"more than {self._max_waiting} answers are unread"
        return OutriderError(Reason.SLOW_READER, message)

    def resume(self, sequence: Sequence) -> bool:
        """Let an unread sequence go on; False if it is not unread.

        The sequence gets a new id, because a drafter may be told of an id only once.
        """
        if self.unread.pop(sequence.id, None) is None or sequence.unread_at is None:
            return False
        if sequence.scheduled_at is not None:
            sequence.scheduled_at += max(self._clock() - sequence.unread_at, 0.0)
        sequence.unread_at = None
        sequence.id = self.new_id()
        return True

    # --- chunks ---

    def emit(self, sequence: Sequence, chunk: TokenChunk) -> None:
        """Send a chunk, or keep it until, joined with later chunks, it has `min_chunk_tokens`.

        The first and the last chunk are sent at once.
        """
        if sequence.unsent is not None:
            chunk = sequence.unsent.joined(chunk)
        enough = len(chunk.token_ids) >= sequence.request.min_chunk_tokens or not self._coalesces
        if enough or chunk.finish_reason is not None or sequence.stats.forward_count <= 1:
            self._outbox.add(sequence.sink, chunk)
            sequence.unsent = None
        else:
            sequence.unsent = chunk

    def stop_coalescing(self, sequences: Iterable[Sequence]) -> None:
        """Send clients all unsent tokens, and from now on the tokens of each step."""
        self._outbox.catch_up()
        self._coalesces = False
        for sequence in sequences:
            if sequence.unsent is not None:
                self._outbox.add(sequence.sink, sequence.unsent)
                sequence.unsent = None
        self._outbox.send_to_clients()
