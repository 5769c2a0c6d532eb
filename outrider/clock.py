"""The clock that the verifier and the drafters read, handed to them so that the simulator can hand them another."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Monotonic time in seconds; only differences have a meaning."""

monotonic: Clock = time.monotonic
