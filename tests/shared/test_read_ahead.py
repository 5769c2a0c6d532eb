"""A reader that stops reading pauses its producer, but not for ever."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.process.network.read_ahead import MOST_UNREAD, ReadAhead

LONG = 60.0


class Watched:
    """A read-ahead queue of numbers; `said` has the queue's requests to its producer."""

    def __init__(self, seconds: float = LONG) -> None:
        self.said: list[bool | str] = []
        self.items: ReadAhead[int] = ReadAhead(
            self.said.append, lambda: self.said.append("given up"), seconds
        )

    def fill(self, count: int = MOST_UNREAD) -> None:
        for number in range(count):
            self.items.put(number)

    async def read(self, count: int) -> list[int]:
        return [await self.items.get() for _ in range(count)]


async def due() -> None:
    """Let the loop run the timers that are due; it first runs the callbacks that are ready."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_producer_pauses_once_and_goes_on_when_most_is_read() -> None:
    watched = Watched()
    watched.fill(MOST_UNREAD + 5)
    assert watched.said == [False]
    first = await watched.read(2)
    assert watched.said == [False], "a few items do not end the pause"
    rest = await watched.read(MOST_UNREAD + 3)
    assert watched.said == [False, True]
    assert first + rest == [*range(MOST_UNREAD + 5)]
    watched.fill()
    assert watched.said == [False, True, False]


async def test_a_reader_that_reads_nothing_is_given_up_once() -> None:
    watched = Watched(0.05)
    watched.fill()
    await asyncio.sleep(0.2)
    watched.fill()
    await asyncio.sleep(0.2)
    assert watched.said == [False, "given up"]
    assert len(await watched.read(2 * MOST_UNREAD)) == 2 * MOST_UNREAD, "unread items stay"
    assert watched.said == [False, "given up"]


async def test_each_item_read_gives_a_slow_reader_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test sets the time of the loop."""
    loop = asyncio.get_running_loop()
    real = loop.time
    passed = 0.0
    monkeypatch.setattr(loop, "time", lambda: real() + passed)
    watched = Watched()
    watched.fill()
    for _ in range(3):
        passed += 0.9 * LONG
        await watched.read(1)
        await due()
    assert watched.said == [False]
    passed += 1.1 * LONG
    await due()
    assert watched.said == [False, "given up"]


@given(st.lists(st.integers(-2 * MOST_UNREAD, 2 * MOST_UNREAD), max_size=12))
async def test_each_pause_is_told_when_it_begins_and_when_it_ends(
    changes: list[int],
) -> None:
    """Positive numbers are items to put, and negative numbers are numbers of items to read."""
    told: list[bool] = []
    items: ReadAhead[int] = ReadAhead(lambda _: None, lambda: None, LONG, told.append)
    for change in changes:
        for _ in range(change):
            items.put(0)
        for _ in range(min(-change, len(items))):
            await items.get()
        assert told == [True, False] * (len(told) // 2) + [True] * items.paused
    items.close()
    items.close()
    for _ in range(len(items)):
        await items.get()
    assert told == [True, False] * (len(told) // 2) + [True], "the last pause does not end"


async def test_a_closed_queue_asks_nothing_of_its_producer() -> None:
    watched = Watched(0.05)
    watched.fill()
    watched.items.close()
    watched.fill()
    await watched.read(2 * MOST_UNREAD)
    watched.fill()
    await asyncio.sleep(0.15)
    assert watched.said == [False]


async def test_the_producer_goes_on_before_the_reader_has_nothing_left() -> None:
    """If the producer waited until nothing is left, the reader would get its answer in bursts."""
    watched = Watched()
    watched.fill()
    await watched.read(MOST_UNREAD - 9)
    assert watched.said == [False]
    await watched.read(1)
    assert watched.said == [False, True]
    assert len(watched.items) == 8
