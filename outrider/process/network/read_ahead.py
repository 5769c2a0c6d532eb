"""A queue between a producer that can pause and a reader that may stop reading."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from outrider.errors import OutriderError, Reason

# The producer pauses at the first number of unread items, and goes on at the second. A reader that
# keeps up has one or two unread items.
MOST_UNREAD = 32
_FEW_UNREAD = 8

_Item = TypeVar("_Item")


def ignore(_: bool) -> None:
    """Do nothing about a pause."""


class ReadAhead(Generic[_Item]):
    """The items of one producer, for one reader on the same event loop.

    `set_reading(False)` asks the producer to pause, and `set_reading(True)` to go on. The producer
    may be late: `put` takes every item. `give_up` is called when nothing has been read for
    `seconds` during a pause. `on_pause` is told of each pause when it begins (True) and when it
    ends (False). A pause that is under way when `close` is called never ends. If none is under way,
    `close` tells `on_pause` that a pause begins.
    """

    def __init__(
        self,
        set_reading: Callable[[bool], object],
        give_up: Callable[[], object],
        seconds: float,
        on_pause: Callable[[bool], object] = ignore,
    ) -> None:
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._set_reading = set_reading
        self._give_up = give_up
        self._seconds = seconds
        self._on_pause = on_pause
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return self._items.qsize()

    @property
    def paused(self) -> bool:
        """True if the producer was asked to pause, and not yet to go on; False after `close`."""
        return self._timer is not None

    def put(self, item: _Item) -> None:
        """Add an item, and ask the producer to pause if too many are unread."""
        self._items.put_nowait(item)
        if len(self) >= MOST_UNREAD and not self.paused and not self._closed:
            self._wait()
            self._set_reading(False)
            self._on_pause(True)

    async def get(self) -> _Item:
        """Take the next item, and ask a paused producer to go on if few are left."""
        item = await self._items.get()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if len(self) <= _FEW_UNREAD:
                self._set_reading(True)
                self._on_pause(False)
            else:
                self._wait()
        return item

    def close(self) -> None:
        """From now on, neither ask the producer to pause or to go on, nor call `give_up`.

        Unread items stay, and `put` still adds items.
        """
        if self._closed:
            return
        self._closed = True
        if self._timer is None:
            self._on_pause(True)
        else:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds, self._too_late)

    def _too_late(self) -> None:
        self.close()
        self._give_up()


def unread_error(seconds: float) -> OutriderError:
    """Return the error that ends an answer if nobody has read any of it for `seconds`."""
    message = f"nothing of the answer was read for {seconds:g} s, so it ends here"
    return OutriderError(Reason.SLOW_READER, message)
