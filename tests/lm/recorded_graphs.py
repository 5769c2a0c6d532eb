"""Records operators, in place of a CUDA graph, on a CPU.

Like a graph, it repeats the operators on the same memory, with the scalars that they got in the
recording. So a test fails if a forward reads anything of the new batch outside the memory of its
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from outrider.lm.gpu import triton_attention
from outrider.lm.layout import KernelArguments
from outrider.lm.softmax import Softmax

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
}
"""Operators that wait for the device, which a graph cannot do."""


def tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """Records the operators of one run; `replay` repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        held = {_memory(tensor) for tensor in tensors((args, kwargs))}

        def again() -> None:
            # Views and results written in place are in their old memory already.
            for made, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if _memory(made) not in held:
                    made.copy_(new)

        self.operators.append(again)
        return out

    def replay(self) -> None:
        for operator in self.operators:
            operator()


class Capture:
    """Replaces `graphs._CudaCapture`; counts recordings and replays.

    Each of the first captures raises its entry of `failures`, unless the entry is None.
    """

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.replays = 0
        self.failures: list[Exception | None] = []

    def __call__(self, run: Callable[[], object]) -> Callable[[], object]:
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        with Recording() as recording:
            run()
        self.recordings.append(recording)

        def replay() -> None:
            self.replays += 1
            # On a GPU a replay is one launch, so counters of operators do not see its operators.
            with _disable_current_modes():
                recording.replay()

        return replay


_by_triton = triton_attention.paged_attention
_calls: list[tuple[KernelArguments, Softmax, int]] = []
_recorded: set[int] = set()


@torch.library.custom_op("outrider_tests::triton_attention", mutates_args=())
def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: int
) -> torch.Tensor:
    if call not in _recorded:
        # Nothing reads the result of a capture, so the slow interpreter need not run.
        _recorded.add(call)
        return query.new_empty(*query.shape[:2], values.shape[-1])
    batch, softmax, max_seq_len = _calls[call]
    return _by_triton(query, keys, values, batch, softmax, max_seq_len=max_seq_len)


def triton_kernel(
    query_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: KernelArguments,
    softmax: Softmax,
    *,
    max_seq_len: int,
) -> torch.Tensor:
    """Call the real kernel as one operator, which computes only when a recording repeats it.

    The batch's tensors belong to the recording. A replay fills their memory with the new batch.
    """
    _calls.append((batch, softmax, max_seq_len))
    return _attend(query_THD, keys, values, len(_calls) - 1)
