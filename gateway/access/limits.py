"""Hold each API key to its limits of requests, tokens and sequences."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gateway.access.rate_windows import Count, RateWindows
from outrider.errors import OutriderError, Reason, invalid
from outrider.process.key_file import KeyEntry

_BUSY_RETRY_S = 1.0


class _Counted(Protocol):
    """What a sequence's event brings, as far as limits count it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The new tokens."""


_Event = TypeVar("_Event", bound=tuple[int, _Counted])


class Limits:
    """Counts what each key uses. Without keys there are no limits."""

    def __init__(self, windows: RateWindows) -> None:
        self.windows = windows
        self.running: Counter[str] = Counter()
        """Sequences in progress, by the id of their key."""

    async def admit(self, key: KeyEntry | None) -> Grant:
        """Count a request. Raises OutriderError(RATE_LIMIT_EXCEEDED) if that exceeds a limit."""
        grant = Grant(self, key)
        if key is not None:
            await grant.take("requests", key.requests_per_minute, 1)
        return grant


@dataclass(frozen=True, slots=True)
class _Taken:
    """An amount that a request has taken of a limit, and where it was counted."""

    name: str
    amount: int
    minute: int
    count: Count


class Grant:
    """One request that was admitted."""

    def __init__(self, limits: Limits, key: KeyEntry | None) -> None:
        self._limits = limits
        self._key = key
        self._seconds = 0.0
        self._left: dict[str, tuple[int, int]] = {}

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's headers, which tell what is left of the minute's requests and tokens."""
        shown = {}
        reset = f"{math.ceil(self._seconds)}s"
        for kind, (limit, left) in self._left.items():
            shown[f"x-ratelimit-limit-{kind}"] = str(limit)
            shown[f"x-ratelimit-remaining-{kind}"] = str(max(0, left))
            shown[f"x-ratelimit-reset-{kind}"] = reset
        return shown

    async def take(self, kind: str, limit: int | None, amount: int) -> _Taken | None:
        """Take an amount of this minute's limit, at most the whole; None without a limit.

        Raises OutriderError(RATE_LIMIT_EXCEEDED) if less is left.
        """
        if self._key is None or limit is None:
            return None
        amount = min(amount, limit)
        windows = self._limits.windows
        minute, self._seconds = windows.now()
        name = f"{self._key.id}/{kind}"
        taken = _Taken(name, amount, minute, await windows.add(name, amount, minute))
        left = limit - taken.count.total
        refused = left < 0
        if refused:
            left += amount
            await self._correct(taken, -amount)
        if kind != "sequences":
            self._left[kind] = limit, left
        if refused:
            message = f"the API key has used up its {limit} {kind} of this minute"
            if amount > 1:
                message += f": {max(0, left)} are left, and the request may need {amount}"
            raise self._refusal(message, self._seconds)
        return taken

    def metered(
        self,
        events: AsyncGenerator[_Event, None],
        *,
        prompt: int,
        answer: int,
        sequences: int,
        gathered: bool,
    ) -> AsyncGenerator[_Event, None]:
        """Yield the events of a request's sequences while they count against the limits.

        `prompt` and `answer` are the tokens of all prompts and the most tokens of all answers. They
        are reserved, and at the end the count is corrected by the tokens that were generated. A
        client that leaves pays for the prompts and the tokens so far. If the verifier holds tokens
        back (`gathered`), nobody knows how many there are, and the client pays for all that it
        reserved. Raises OutriderError(RATE_LIMIT_EXCEEDED) before the first event.
        """
        if self._key is None:
            return events
        return self._metered(self._key, events, prompt, answer, sequences, gathered)

    async def _metered(
        self,
        key: KeyEntry,
        events: AsyncGenerator[_Event, None],
        prompt: int,
        answer: int,
        sequences: int,
        gathered: bool,
    ) -> AsyncGenerator[_Event, None]:
        running = self._limits.running
        self._check_concurrency(key, sequences)
        running[key.id] += sequences
        reserved: _Taken | None = None
        used = 0
        try:
            reserved = await self._reserve(key, sequences, prompt + answer)
            async with aclosing(events):
                async for event in events:
                    used = (used or prompt) + len(event[1].token_ids)
                    yield event
        # A deadline that passes is a caller that leaves.
        except (asyncio.CancelledError, GeneratorExit, OutriderError) as error:
            is_late = (
                not isinstance(error, OutriderError) or error.reason is Reason.DEADLINE_EXCEEDED
            )
            if reserved is not None and is_late:
                used = max(used, reserved.amount if gathered else prompt)
            raise
        finally:
            running[key.id] -= sequences
            if reserved is not None:
                await self._correct(reserved, used - reserved.amount)

    async def _reserve(self, key: KeyEntry, sequences: int, tokens: int) -> _Taken | None:
        """Take sequences and tokens, or neither. Returns the tokens; None without a limit."""
        counted = await self.take("sequences", key.sequences_per_minute, sequences)
        try:
            return await self.take("tokens", key.tokens_per_minute, tokens)
        except (OutriderError, asyncio.CancelledError):
            if counted is not None:
                await self._correct(counted, -counted.amount)
            raise

    async def _correct(self, taken: _Taken, difference: int) -> None:
        """Give back unused tokens, or count the tokens beyond the reservation."""
        if difference == 0:
            return
        windows = self._limits.windows
        # Tokens beyond the reservation count now that their number is known.
        minute = windows.now()[0] if difference > 0 else taken.minute
        await windows.correct(taken.name, difference, minute, taken.count)

    def _check_concurrency(self, key: KeyEntry, sequences: int) -> None:
        most = key.concurrent_sequences
        running = self._limits.running[key.id]
        if most is None or running + sequences <= most:
            return
        if sequences > most:
            problem = f"asks for {sequences} sequences, but the API key may run {most} at once"
            raise invalid("n", problem)
        message = f"the API key may run {most} sequences at once, and {running} are running"
        raise self._refusal(message, _BUSY_RETRY_S)

    def _refusal(self, message: str, seconds: float) -> OutriderError:
        return OutriderError(
            Reason.RATE_LIMIT_EXCEEDED,
            message,
            retry_after_s=float(math.ceil(seconds)),
            metadata=self.headers,
        )
