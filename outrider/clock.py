"""The clock of verifier and drafters: a parameter of theirs, so that a simulator can set it."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns monotonic time in seconds. Only differences have a meaning."""

monotonic: Clock = time.monotonic
