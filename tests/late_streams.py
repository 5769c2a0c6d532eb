"""Streams that compute late: each stream in order, the streams interleaved at random.

Within a `LateStreams` block, operators on the block's tensors are queued, and their results are NaN
until their turn comes. So code that forgets an event reads NaN, or numbers that were written later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.lm import streams

_aten = torch.ops.aten
_COMPUTE = {_aten.clone.default, _aten.cat.default, _aten._to_copy.default}


class _Event:
    done = False

    def set(self) -> bool:
        self.done = True
        return True


def _overwrite(tensor: torch.Tensor) -> bool:
    tensor.fill_(-1)
    return True


class LateStream:
    """One stream, with the part of torch's interface that the tested code uses."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], bool]] = deque()
        """Queued steps. A step returns True if it is done, and False if it has to wait."""

    def record_event(self) -> _Event:
        """Return an event after the queued steps."""
        event = _Event()
        self.queue.append(event.set)
        return event

    def wait_event(self, event: _Event) -> None:
        """Make all steps that are queued later wait for the event."""
        self.queue.append(lambda: event.done)


class LateStreams(TorchDispatchMode):
    """Several streams. One of them is current."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._random = Random(seed)
        self._all: dict[str, LateStream] = {}
        self._current = ""
        # Both are keyed by the address of memory. `_makers` has the memory's tensor and the stream
        # that made it, `_readers` the streams that still read the memory.
        self._makers: dict[int, tuple[torch.Tensor, str]] = {}
        self._readers: dict[int, set[str]] = {}
        monkeypatch.setattr(streams, "_stream_of", lambda tensor: self._all[self._current])
        monkeypatch.setattr(streams, "_keep", self._keep)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Make a stream the current stream."""
        before, self._current = self._current, name
        self._all.setdefault(name, LateStream())
        with self:
            yield
        self._current = before

    def made(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a tensor that the current stream later fills with these numbers."""
        return self._late(lambda: numbers, numbers)

    def _late(self, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(like, torch.nan)
        self._makers[out.untyped_storage().data_ptr()] = out, self._current

        def run() -> bool:
            out.copy_(compute())
            return True

        self._all[self._current].queue.append(run)
        return out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Queue an operator that computes on late tensors; run others, such as views, at once."""
        found = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        late = any(each.untyped_storage().data_ptr() in self._makers for each in tensors)
        if not late or func not in _COMPUTE:
            return found
        return self._late(lambda: func(*args, **(kwargs or {})), found)

    def _keep(self, tensor: torch.Tensor, stream: LateStream) -> None:
        readers = self._readers.setdefault(tensor.untyped_storage().data_ptr(), set())
        readers.add(next(name for name, each in self._all.items() if each is stream))

    def free(self, maker: str, reader: str) -> None:
        """Let the stream `maker` overwrite its memory, as if the allocator had reused it.

        Memory that the stream `reader` still keeps is left alone: the allocator would not get it
        back yet.
        """
        for address, (tensor, name) in self._makers.items():
            if name == maker and reader not in self._readers.get(address, ()):
                self._all[maker].queue.append(partial(_overwrite, tensor))

    def run(self, most: int = 10**9) -> None:
        """Run at most `most` queued steps, each of a stream that need not wait."""
        for _ in range(most):
            able = [each.queue for each in self._all.values() if each.queue]
            self._random.shuffle(able)
            if not any(self._runs(queue) for queue in able):
                assert not able or most < 10**9, "the streams wait for each other"
                return

    @staticmethod
    def _runs(queue: deque[Callable[[], bool]]) -> bool:
        if not queue[0]():
            return False
        queue.popleft()
        return True
