"""The clock that verifier and drafters get as a parameter, so that a simulator can set it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

Clock = Callable[[], float]
"""Returns monotonic time in seconds. Only differences have a meaning."""

monotonic: Clock = time.monotonic


thread_cpu: Clock = time.thread_time
"""Returns the processor time of the calling thread, in seconds."""


def thread_cpu_clock() -> Clock:
    """Return a clock of this thread's processor time.

    Any thread may read it while this thread lives.
    """
    clock_id = time.pthread_getcpuclockid(threading.get_ident())
    return partial(time.clock_gettime, clock_id)
