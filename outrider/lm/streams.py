"""Gives a process's threads CUDA streams of their own, and passes tensors from thread to thread.

A thread computes on one stream, by default the legacy default stream, which all threads share. On
this stream, a drafter's kernels would wait for a forward of the target in the same process. So each
drafter has a stream of its own. Only an event can order the kernels of two streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

# Kernels of a stream with a priority below 0 run before kernels of streams with the usual priority.
# A draft is short, and a step may wait for it.
_HIGH_PRIORITY = -1


def use_own_stream(device: torch.device) -> None:
    """Let this thread compute on `device` in a stream of high priority; on a CPU do nothing."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # torch has no types for `Stream`.
        torch.cuda.set_stream(cast(Any, torch.cuda.Stream)(device, priority=_HIGH_PRIORITY))


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Rows of a tensor that one thread computed, for use by a thread with another stream.

    `_ready` is an event in the stream of the thread that computed the rows, after the last kernel
    that writes them; None on a CPU, where every operator is done when it returns.
    """

    _tensor: torch.Tensor
    _ready: Any

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SharedRows:
        """Share the rows of a tensor that this thread's stream computes."""
        stream = _stream_of(tensor)
        return cls(tensor, None if stream is None else stream.record_event())

    def __len__(self) -> int:
        return len(self._tensor)

    def __getitem__(self, rows: slice) -> SharedRows:
        """Return some of the rows, in the same memory."""
        return SharedRows(self._tensor[rows], self._ready)

    @property
    def nbytes(self) -> int:
        """The size of the rows in bytes."""
        return self._tensor.nbytes

    def alone(self) -> SharedRows:
        """Return the rows, copied to memory of their own if they are parts of a larger tensor.

        The thread that computed the rows calls this.
        """
        if self._tensor.untyped_storage().nbytes() == self.nbytes:
            return self
        return SharedRows.of(self._tensor.clone())

    def read(self) -> torch.Tensor:
        """Return the tensor; first this thread's stream waits until the tensor is written."""
        stream = _stream_of(self._tensor)
        if stream is not None:
            stream.wait_event(self._ready)
            # Without this call, the allocator could give the memory to the other thread's stream
            # before this stream has read the memory.
            _keep(self._tensor, stream)
        return self._tensor


def _stream_of(tensor: torch.Tensor) -> Any:
    """Return this thread's stream on the tensor's device; None on a CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.device.type == "cuda" else None


def _keep(tensor: torch.Tensor, stream: Any) -> None:
    tensor.record_stream(stream)
