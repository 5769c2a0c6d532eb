"""Hold each API key to its limits of requests, tokens and sequences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.access.windows import Windows
from gateway.choices import Event
from outrider.errors import OutriderError, Reason, invalid
from outrider.process.key_file import KeyEntry

HEADERS = tuple(
    f"x-ratelimit-{part}-{kind}"
    for part in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
)
"""OpenAI's headers of rate limits."""
_BUSY_RETRY_S = 1.0


class Limits:
    """Counts what each key uses. Without keys there are no limits."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.running: Counter[str] = Counter()
        """Sequences in progress, by the id of their key."""

    async def admit(self, key: KeyEntry | None) -> Grant:
        """Count a request. Raises OutriderError(RATE_LIMIT_EXCEEDED) if it is one too many."""
        grant = Grant(self, key)
        if key is not None:
            await grant.take("requests", key.requests_per_minute, 1)
        return grant


class Grant:
    """One request that was admitted."""

    def __init__(self, limits: Limits, key: KeyEntry | None) -> None:
        self._limits = limits
        self._key = key
        self._minute = 0
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

    async def take(self, kind: str, limit: int | None, amount: int) -> int:
        """Take an amount of this minute's limit, at most the whole, and return what was taken.

        Raises OutriderError(RATE_LIMIT_EXCEEDED) if less is left.
        """
        if self._key is None or limit is None:
            return 0
        amount = min(amount, limit)
        windows = self._limits.windows
        self._minute, self._seconds = windows.now()
        name = f"{self._key.id}/{kind}"
        left = limit - await windows.add(name, amount, self._minute)
        refused = left < 0
        if refused:
            left = limit - await windows.add(name, -amount, self._minute)
        if kind != "sequences":
            self._left[kind] = limit, left
        if refused:
            message = f"the API key has used up its {limit} {kind} of this minute"
            if amount > 1:
                message += f": {max(0, left)} are left, and the request may need {amount}"
            raise self._refusal(message, self._seconds)
        return amount

    def metered(
        self, events: AsyncGenerator[Event, None], *, prompt: int, answer: int, sequences: int
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a request's sequences while they count against the limits.

        `prompt` and `answer` are the tokens of all prompts and the most tokens of all answers. They
        are reserved, and at the end the count is corrected by the tokens that were generated.
        Raises OutriderError(RATE_LIMIT_EXCEEDED) before the first event.
        """
        if self._key is None:
            return events
        return self._metered(self._key, events, prompt, answer, sequences)

    async def _metered(
        self,
        key: KeyEntry,
        events: AsyncGenerator[Event, None],
        prompt: int,
        answer: int,
        sequences: int,
    ) -> AsyncGenerator[Event, None]:
        running = self._limits.running
        self._check_concurrency(key, sequences)
        running[key.id] += sequences
        reserved = used = 0
        minute = self._minute
        try:
            await self.take("sequences", key.sequences_per_minute, sequences)
            reserved = await self.take("tokens", key.tokens_per_minute, prompt + answer)
            minute = self._minute
            async with aclosing(events):
                async for event in events:
                    used = (used or prompt) + len(event[1].token_ids)
                    yield event
        finally:
            running[key.id] -= sequences
            if reserved:
                await self._settle(key, used - reserved, minute)

    async def _settle(self, key: KeyEntry, difference: int, minute: int) -> None:
        """Give back what was not used of a reservation, or count what it did not cover."""
        windows = self._limits.windows
        now, _ = windows.now()
        # What is left over from an earlier minute is of no use in this one.
        if difference > 0 or minute == now:
            await windows.add(f"{key.id}/tokens", difference, now)

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
