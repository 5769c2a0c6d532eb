"""Several sequences of one request as one stream of events, and what they add up to. Knows no shape of any API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from gateway.generate import AuthoredToken, Ending, Piece, ShownToken

_QUEUED_PIECES = 64

Event = tuple[int, Piece]
"""The index of a choice, and its next piece."""


async def merge(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Event, None]:
    """The pieces of all streams as they come. The first failure ends all; closing the iterator closes all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(_QUEUED_PIECES)
    tasks = [asyncio.create_task(_forward(index, stream, queue)) for index, stream in enumerate(streams)]
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


async def _forward(index: int, stream: AsyncGenerator[Piece, None], queue: asyncio.Queue[Event | BaseException | None]) -> None:
    """Put a stream's pieces into the queue, then None; or its failure."""
    try:
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                await queue.put((index, piece))
        await queue.put(None)
    except Exception as failure:  # noqa: BLE001  # raised again by the reader of the queue
        await queue.put(failure)


def scored_once(streams: Sequence[AsyncGenerator[Piece, None]]) -> list[AsyncGenerator[Piece, None]]:
    """The choices of one prompt, which the first of them scores: the others begin when it has, and tell what it told."""
    scored: asyncio.Future[list[ShownToken]] = asyncio.get_running_loop().create_future()
    first, *others = streams
    return [_scoring(first, scored), *(_after_scoring(other, scored) for other in others)]


async def _scoring(stream: AsyncGenerator[Piece, None], scored: asyncio.Future[list[ShownToken]]) -> AsyncGenerator[Piece, None]:
    prompt: list[ShownToken] = []
    async with aclosing(stream) as pieces:
        async for piece in pieces:
            prompt += piece.prompt
            if (piece.token_ids or piece.ending is not None) and not scored.done():
                scored.set_result(prompt)
            yield piece


async def _after_scoring(
    stream: AsyncGenerator[Piece, None], scored: asyncio.Future[list[ShownToken]]
) -> AsyncGenerator[Piece, None]:
    prompt = await scored
    async with aclosing(stream) as pieces:
        async for piece in pieces:
            yield replace(piece, prompt=prompt)
            prompt = []


def repeated(stream: AsyncGenerator[Piece, None], n: int) -> list[AsyncGenerator[Piece, None]]:
    """A stream n times over, generated once: for choices that nothing is drawn for. All but the first come when it is over."""
    whole: asyncio.Future[list[Piece]] = asyncio.get_running_loop().create_future()
    return [_recorded(stream, whole), *(_replayed(whole) for _ in range(n - 1))]


async def _recorded(stream: AsyncGenerator[Piece, None], whole: asyncio.Future[list[Piece]]) -> AsyncGenerator[Piece, None]:
    pieces: list[Piece] = []
    async with aclosing(stream) as told:
        async for piece in told:
            pieces.append(piece)
            yield piece
    whole.set_result(pieces)


async def _replayed(whole: asyncio.Future[list[Piece]]) -> AsyncGenerator[Piece, None]:
    for piece in await whole:
        yield piece


class Tally:
    """Adds up the endings of a request's choices; choice i belongs to prompt i // n."""

    def __init__(self, prompt_count: int, n: int) -> None:
        self.endings: list[Ending | None] = [None] * (prompt_count * n)
        self.prompts: list[list[ShownToken]] = [[] for _ in self.endings]
        self.shown: list[list[ShownToken]] = [[] for _ in self.endings]
        self.authored: list[list[AuthoredToken]] = [[] for _ in self.endings]
        self._n = n

    def add(self, index: int, ending: Ending) -> None:
        self.endings[index] = ending

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: a prompt counts once whatever n; accepted and rejected are draft tokens."""
        endings = [ending for ending in self.endings if ending is not None]
        firsts = [ending for ending in self.endings[:: self._n] if ending is not None]
        prompt = sum(ending.prompt_token_count for ending in firsts)
        completion = sum(ending.completion_token_count for ending in endings)
        accepted = sum(ending.stats.accepted_token_count for ending in endings)
        drafted = sum(ending.stats.draft_token_count for ending in endings)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(ending.cached_token_count for ending in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def speculation(self) -> dict[str, Any]:
        """Which rules judged drafts, and whether they leave the output as the target's own; nothing when there was no draft."""
        rules = sorted({rule for ending in self.endings if ending is not None for rule in ending.stats.rules})
        if not rules:
            return {}
        names = [rule.name.lower().replace("_", "-") for rule in rules]
        return {"speculation": {"rules": names, "lossless": not any(rule.lossy for rule in rules)}}

    def metrics(self) -> dict[str, Any]:
        """vLLM's `metrics` object; like there, it describes one sequence and is null for several."""
        ending = self.endings[0]
        if len(self.endings) > 1 or ending is None:
            return {"speculative_decoding": None}
        stats = ending.stats
        histogram = stats.histogram + [0] * (stats.max_depth + 1 - len(stats.histogram))
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + stats.accepted_token_count / max(stats.draft_count, 1),
                "draft_acceptance_rate": stats.accepted_token_count / max(stats.draft_token_count, 1),
                "acceptance_histogram": histogram,
                "num_spec_steps": stats.draft_count,
                "num_accepted_draft_tokens": stats.accepted_token_count,
                "num_draft_tokens": stats.draft_token_count,
                "num_spec_tokens": stats.max_depth,
            }
        }


async def collect(events: AsyncGenerator[Event, None], tally: Tally) -> list[str]:
    """The whole text of each choice, its ending added to the tally."""
    texts: list[list[str]] = [[] for _ in tally.endings]
    async for index, piece in events:
        texts[index].append(piece.text)
        tally.prompts[index] += piece.prompt
        tally.shown[index] += piece.shown
        tally.authored[index] += piece.authored
        if piece.ending is not None:
            tally.add(index, piece.ending)
    return ["".join(parts) for parts in texts]
