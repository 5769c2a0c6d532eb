"""The record of how full the verifier is, for its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The scheduler's sequences and pages at one time, and its counts since the start.

    `pages` is the part of the page pool in use, 0 to 1.
    """

    running: int = 0
    waiting: int = 0
    unread: int = 0
    pages: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
