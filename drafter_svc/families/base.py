"""What every family of drafters is to the stream, and how a failure in one sequence's part stays with that sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from outrider.errors import OutriderError
from outrider.messages import DraftBatch, Opened, Rule, Verdict

log = logging.getLogger(__name__)


class Failures:
    """The sequences that a family gave up because their part of its work raised what nobody foresaw.

    `drop` takes back what the family holds of such a sequence. An exception of a `fatal` type is no sequence's: it goes on up, and
    should end the process.
    """

    def __init__(self, drop: Callable[[int], object], fatal: tuple[type[Exception], ...] = ()) -> None:
        self.sequence_ids: set[int] = set()
        """Until they are closed."""
        self.fatal = fatal
        self._drop = drop
        self._told: set[tuple[type[Exception], str, int]] = set()

    @contextmanager
    def of(self, sequence_id: int) -> Iterator[None]:
        """A block of work for one sequence: what it raises costs that sequence its drafts.

        Unless it is fatal, or an OutriderError, by which the verifier is told that it makes no sense.
        """
        try:
            yield
        except OutriderError:
            raise
        except Exception as error:
            if isinstance(error, self.fatal):
                raise
            self.add(sequence_id, error)

    def add(self, sequence_id: int, error: Exception) -> None:
        """Give a sequence up; the log has each kind of error once, by its type and where it was raised."""
        self.sequence_ids.add(sequence_id)
        kind = type(error), *_origin(error)
        if kind not in self._told:
            self._told.add(kind)
            log.error("sequence %d is not drafted for; of others that fail like it nothing is said", sequence_id, exc_info=error)
        try:
            self._drop(sequence_id)
        except Exception:
            log.exception("what was held of sequence %d could not be given back", sequence_id)


def _origin(error: Exception) -> tuple[str, int]:
    """File and line of the innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace is not None else ("", 0)


class Family(Protocol):
    """A way of drafting. Sequences it was not handed are ignored, so that late messages do no harm."""

    name: str
    distributions: frozenset[Rule]
    max_depth: int
    device: str
    failures: Failures

    def open(self, opened: Opened) -> None:
        """Take a sequence; cheap, like `verdict` and `close`, since all three run on the event loop, between two drafts."""

    def verdict(self, verdict: Verdict) -> None:
        """Follow a commit; raises OutriderError(PROTOCOL_VIOLATION) for one that contradicts what was proposed."""

    def close(self, sequence_id: int) -> None:
        """Drop a sequence and all its state."""

    async def draft(self, interrupted: Callable[[], bool]) -> DraftBatch:
        """The proposals of this round; empty when there is nothing to do before the next verdict. A sequence that fails is noted in
        `failures`, and the others' drafts are returned.

        A draft that takes long looks at `interrupted` now and then and returns what it has once that is true: a verdict waits to be
        applied.
        """

    async def aclose(self) -> None:
        """Give everything back."""
