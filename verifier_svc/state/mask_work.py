"""The masks of one sequence's next step; another thread may compute them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from outrider.process.clock import Clock, thread_cpu_clock
from verifier_svc.state.trie import DraftTree

Compute = Callable[[], npt.NDArray[np.int32]]


class MaskWork:
    """The work of computing a mask for each row of a draft.

    The engine's thread makes the object, and one thread calls `run`. Until the work is done,
    nothing else uses the sequence's matcher.
    """

    def __init__(self, compute: Compute, draft: DraftTree, drafter_id: str) -> None:
        """`compute` returns the masks of `draft`, whose main path `drafter_id` proposed."""
        self.draft = draft
        self.drafter_id = drafter_id
        self.mask: npt.NDArray[np.int32] | None = None
        """The masks, a row for each row of the draft; None until they are done."""
        self.failure: BaseException | None = None
        self._compute = compute
        self._done = threading.Event()
        self._clock: Clock | None = None
        self._began = 0.0
        self._seconds = 0.0
        self._wake: Callable[[], object] | None = None
        self._cancelled = False

    @property
    def done(self) -> bool:
        """True if `run` has computed the masks, has failed, or has found the work cancelled."""
        return self._done.is_set()

    @property
    def seconds(self) -> float:
        """The processor time that the work has taken so far."""
        clock = self._clock
        if clock is None:
            return self._seconds
        return clock() - self._began

    def run(self) -> None:
        """Compute the masks on this thread, unless the work was cancelled."""
        if self._cancelled:
            self._done.set()
            return
        clock = thread_cpu_clock()
        self._began = clock()
        self._clock = clock
        try:
            self.mask = self._compute()
        # The sequence ends with this error.
        except BaseException as error:  # noqa: BLE001
            self.failure = error
        self._seconds = clock() - self._began
        self._clock = None
        self._done.set()
        wake = self._wake
        if wake is not None:
            wake()

    def cancel(self) -> None:
        """Cancel the work if it has not started."""
        self._cancelled = True

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return whether the work is done."""
        return self._done.wait(seconds)

    def wake_when_done(self, wake: Callable[[], object]) -> None:
        """Call `wake` when the work is done, or at once if it already is."""
        self._wake = wake
        if self.done:
            wake()
