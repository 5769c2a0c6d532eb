"""Several sequences of one request as one stream of events, and what they add up to. Knows no shape of any API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from gateway.deltas import AttributedToken, FinishInfo, LogprobToken, TextDelta

_QUEUED_DELTAS = 64

Event = tuple[int, TextDelta]
"""The index of a choice, and its next delta."""
_Queue = asyncio.Queue[Event | BaseException | None]


async def merge(streams: Sequence[AsyncGenerator[TextDelta, None]]) -> AsyncGenerator[Event, None]:
    """The deltas of all streams as they come. The first failure ends all; closing the iterator closes all."""
    queue: _Queue = asyncio.Queue(_QUEUED_DELTAS)
    tasks = [
        asyncio.create_task(_forward(index, stream, queue)) for index, stream in enumerate(streams)
    ]
    try:
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
    """Put a stream's deltas into the queue, then None; or its failure."""
    try:
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                await queue.put((index, delta))
        await queue.put(None)
    except Exception as failure:  # noqa: BLE001  # raised again by the reader of the queue
        await queue.put(failure)


class UsageTotals:
    """Adds up what a request's choices took; choice i belongs to prompt i // n."""

    def __init__(self, prompt_count: int, n: int) -> None:
        self.finishes: list[FinishInfo | None] = [None] * (prompt_count * n)
        self._n = n

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: a prompt counts once whatever n; accepted and rejected are draft tokens."""
        finishes = [finish for finish in self.finishes if finish is not None]
        firsts = [finish for finish in self.finishes[:: self._n] if finish is not None]
        prompt = sum(finish.prompt_token_count for finish in firsts)
        completion = sum(finish.completion_token_count for finish in finishes)
        accepted = sum(finish.stats.accepted_token_count for finish in finishes)
        drafted = sum(finish.stats.draft_token_count for finish in finishes)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(finish.cached_token_count for finish in firsts)
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def speculation(self) -> dict[str, Any]:
        """Which rules judged drafts, and whether they leave the output as the target's own; nothing when there was no draft."""
        rules = sorted(
            {rule for finish in self.finishes if finish is not None for rule in finish.stats.rules}
        )
        if not rules:
            return {}
        names = [rule.name.lower().replace("_", "-") for rule in rules]
        return {"speculation": {"rules": names, "lossless": not any(rule.lossy for rule in rules)}}

    def metrics(self) -> dict[str, Any]:
        """vLLM's `metrics` object; like there, it describes one sequence and is null for several."""
        finish = self.finishes[0]
        if len(self.finishes) > 1 or finish is None:
            return {"speculative_decoding": None}
        stats = finish.stats
        histogram = stats.histogram + [0] * (stats.max_draft_tokens + 1 - len(stats.histogram))
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1
                + stats.accepted_token_count / max(stats.draft_count, 1),
                "draft_acceptance_rate": stats.accepted_token_count
                / max(stats.draft_token_count, 1),
                "acceptance_histogram": histogram,
                "num_spec_steps": stats.draft_count,
                "num_accepted_draft_tokens": stats.accepted_token_count,
                "num_draft_tokens": stats.draft_token_count,
                "num_spec_tokens": stats.max_draft_tokens,
            }
        }


@dataclass(slots=True)
class WholeChoice:
    """All deltas of a choice together."""

    text: str = ""
    prompt: list[LogprobToken] = field(default_factory=list)
    shown: list[LogprobToken] = field(default_factory=list)
    attributed: list[AttributedToken] = field(default_factory=list)


async def collect(events: AsyncGenerator[Event, None], totals: UsageTotals) -> list[WholeChoice]:
    """The whole choices; how each finished is added to the totals."""
    choices = [WholeChoice() for _ in totals.finishes]
    async for index, delta in events:
        choice = choices[index]
        choice.text += delta.text
        choice.prompt += delta.prompt
        choice.shown += delta.shown
        choice.attributed += delta.attributed
        if delta.finish is not None:
            totals.finishes[index] = delta.finish
    return choices
