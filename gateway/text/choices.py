"""Merges a request's sequences into one stream of events, and adds up their usage.

This module is independent of the shape of any API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from gateway.text.deltas import AttributedToken, FinishInfo, LogprobToken, TextDelta
from gateway.tools.reader import Content, Part, joined

_QUEUED_DELTAS = 64

Event = tuple[int, TextDelta]
"""The index of a choice and its next delta."""
_Queue = asyncio.Queue[Event | BaseException | None]


async def merge(
    streams: Sequence[AsyncGenerator[TextDelta, None]], at_once: int
) -> AsyncGenerator[Event, None]:
    """Yield the deltas of all streams as they arrive, with the index of their stream.

    At most `at_once` streams start in one round of the event loop.

    If a stream raises an exception, the iterator raises the first such exception and closes all
    streams. Closing the iterator also closes all streams.
    """
    queue: _Queue = asyncio.Queue(_QUEUED_DELTAS)
    tasks: list[asyncio.Task[None]] = []
    try:
        for index, stream in enumerate(streams):
            if index and index % at_once == 0:
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(_forward(index, stream, queue)))
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(index: int, stream: AsyncGenerator[TextDelta, None], queue: _Queue) -> None:
    """Put a stream's deltas into the queue, then None. If the stream fails, put its exception."""
    try:
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                await queue.put((index, delta))
        await queue.put(None)
    # `merge` raises this exception.
    except Exception as failure:  # noqa: BLE001
        await queue.put(failure)


class UsageTotals:
    """The finish reasons of a request's choices, and the sums of their usage.

    There are n choices for each prompt: choice i belongs to prompt i // n.
    """

    def __init__(self, prompt_count: int, n: int) -> None:
        self.finishes: list[FinishInfo | None] = [None] * (prompt_count * n)
        self._n = n

    @property
    def complete(self) -> bool:
        """True if every choice has finished."""
        return None not in self.finishes

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object.

        A prompt counts once, whatever n is. `accepted_prediction_tokens` and
        `rejected_prediction_tokens` count draft tokens.
        """
        finishes = [finish for finish in self.finishes if finish is not None]
        firsts = [finish for finish in self.finishes[:: self._n] if finish is not None]
        prompt = sum(finish.prompt_token_count for finish in firsts)
        completion = sum(finish.completion_token_count for finish in finishes)
        accepted = sum(finish.stats.accepted_token_count for finish in finishes)
        drafted = sum(finish.stats.draft_token_count for finish in finishes)
        cached = sum(finish.cached_token_count for finish in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def speculation(self) -> dict[str, Any]:
        """Return the `speculation` field of an answer. Empty without speculation.

        The field names the acceptance rules used, and says whether all are lossless. If at least
        half of the steps of a choice verified no draft, the field says why. If this is so for
        several choices, the field gives the reason of the choice with the most such steps.
        """
        stats = [finish.stats for finish in self.finishes if finish is not None]
        described: dict[str, Any] = {}
        rules = sorted({rule for of_choice in stats for rule in of_choice.rules})
        if rules:
            described["rules"] = [rule.label for rule in rules]
            described["lossless"] = not any(rule.lossy for rule in rules)
        pauses = [of_choice.paused for of_choice in stats if of_choice.paused is not None]
        if pauses:
            pause = max(pauses, key=lambda pause: pause.step_count)
            described["paused"] = {
                "reason": pause.reason.label,
                "steps": pause.step_count,
                "forward_seconds": pause.forward_s,
                "draft_seconds": pause.draft_s,
            }
        return {"speculation": described} if described else {}

    def metrics(self) -> dict[str, Any]:
        """Return vLLM's `metrics` object, whose field is null for several sequences, as in vLLM."""
        finish = self.finishes[0]
        if len(self.finishes) > 1 or finish is None:
            return {"speculative_decoding": None}
        stats = finish.stats
        accepted = stats.accepted_token_count
        missing = stats.max_draft_tokens + 1 - len(stats.histogram)
        described = {
            "mean_acceptance_length": 1 + accepted / max(stats.draft_count, 1),
            "draft_acceptance_rate": accepted / max(stats.draft_token_count, 1),
            "acceptance_histogram": stats.histogram + [0] * missing,
            "num_spec_steps": stats.draft_count,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": stats.draft_token_count,
            "num_spec_tokens": stats.max_draft_tokens,
        }
        return {"speculative_decoding": described}


@dataclass(slots=True)
class WholeChoice:
    """The deltas of one choice, joined."""

    parts: list[Part] = field(default_factory=list)
    prompt: list[LogprobToken] = field(default_factory=list)
    shown: list[LogprobToken] = field(default_factory=list)
    attributed: list[AttributedToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The content."""
        return "".join([part.text for part in self.parts if isinstance(part, Content)])


async def collect(events: AsyncGenerator[Event, None], count: int) -> list[WholeChoice]:
    """Join the events of each of `count` choices."""
    choices = [WholeChoice() for _ in range(count)]
    async for index, delta in events:
        choice = choices[index]
        choice.parts += delta.all_parts
        choice.prompt += delta.prompt
        choice.shown += delta.shown
        choice.attributed += delta.attributed
    for choice in choices:
        choice.parts = joined(choice.parts)
    return choices
