"""Moves numbers to a device and back, and tells whether Triton kernels run on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger(__name__)

# Each array in a block is aligned to `_ALIGNMENT` bytes; no array's elements are larger.
_ALIGNMENT = 16


def on(
    device: torch.device,
    numbers: Sequence[object] | npt.NDArray[np.generic],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a tensor on the device, of `dtype` or the numbers' type (float32 for an empty list).

    A plain copy would wait for the device's queue; this copy does not wait.
    """
    return torch.as_tensor(numbers, dtype=dtype).to(device, non_blocking=True)


class Staged:
    """An array that `Staging.send` copies to the device."""

    __slots__ = ("tensor",)

    tensor: torch.Tensor
    """The array on the device, of the same shape and type; valid after it was sent."""


class Staging:
    """Gathers arrays on the host, and copies all of them to the device at once.

    On a GPU they are copied from one block of pinned memory, so the copy waits for nothing. On a
    CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[Staged, npt.NDArray[np.generic]]] = []

    def add(self, numbers: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> Staged:
        """Add an array, of `dtype` or the numbers' own type.

        The array must not change afterwards.
        """
        array = np.ascontiguousarray(numbers, dtype)
        staged = Staged()
        if self._device.type == "cpu":
            staged.tensor = torch.from_numpy(array)
        else:
            self._parts.append((staged, array))
        return staged

    def send(self) -> None:
        """Copy the arrays that were added since the last call."""
        if not self._parts:
            return
        ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) for _, array in self._parts]) * _ALIGNMENT
        # Torch keeps the block until the device has read it.
        block = torch.empty(
            int(ends[-1]), dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        )
        bytes_on_host = block.numpy()
        firsts = [0, *ends[:-1].tolist()]
        for (_, array), first in zip(self._parts, firsts, strict=True):
            bytes_on_host[first : first + array.nbytes] = array.reshape(-1).view(np.uint8)
        sent = block.to(self._device, non_blocking=True)
        for (staged, array), first in zip(self._parts, firsts, strict=True):
            dtype = torch.from_numpy(array.reshape(-1)[:0]).dtype
            part = sent[first : first + array.nbytes]
            staged.tensor = part.view(dtype).view(array.shape)
        self._parts.clear()


def argmax(numbers_RN: torch.Tensor) -> torch.Tensor:
    """Return the first index of each row's largest number, int64 [R]. NaN counts as the largest."""
    if numbers_RN.device.type == "cpu":
        # At 4,096 numbers a row, NumPy's argmax takes at most a seventh of the time of torch's.
        return torch.from_numpy(numbers_RN.numpy().argmax(-1))
    return numbers_RN.argmax(-1)


def fetch(tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[np.generic]]:
    """Copy tensors of one device to the host with one wait for the device.

    The tensors hold int64, bool or float numbers. From a GPU, bool tensors arrive as int64 and
    float32 tensors as float64.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    words = [_as_words(tensor) for tensor in tensors]
    together = (words[0] if len(words) == 1 else torch.cat(words)).cpu().numpy()
    found: list[npt.NDArray[np.generic]] = []
    first = 0
    for tensor in tensors:
        part = together[first : first + tensor.numel()]
        if tensor.is_floating_point():
            part = part.view(np.float64)
        found.append(part.reshape(tuple(tensor.shape)))
        first += tensor.numel()
    return found


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's numbers in 64 bits each, int64 [N]."""
    if tensor.is_floating_point():
        return tensor.double().view(torch.int64).reshape(-1)
    return tensor.long().reshape(-1)


@cache
def triton_works(device: torch.device) -> bool:
    """Return whether our Triton kernels run on this device; the first call tries a small kernel."""
    if device.type != "cuda":
        return False
    problem = _problem(device)
    if problem is not None:
        log.warning("%s: attention gathers pages without CUDA graphs, which is slow", problem)
    return problem is None


def _problem(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on a GPU; None if they can."""
    if find_spec("triton") is None:
        return "no Triton"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "no GPU of compute capability 8.0"
    return kernel_problem(device)


def kernel_problem(device: torch.device) -> str | None:
    """Run the noise kernel for one token; return why that fails, or None.

    Triton builds launchers with a C compiler and Python's headers, so a missing part shows only
    when a kernel runs. Raises torch.AcceleratorError if the device failed.
    """
    try:
        # This import is not at the top, because not every machine has Triton.
        from outrider.sampling import noise_kernel

        probs, keys = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
        token = noise_kernel.coupled_sample(probs.to(device), keys.to(device)).item()
    except torch.AcceleratorError:
        raise  # the device is lost for this process
    # A missing compiler, header or driver raises errors of many types.
    except Exception as error:  # noqa: BLE001
        return f"Triton kernels do not run ({type(error).__name__}: {' '.join(str(error).split())})"
    return None if token == 0 else f"Triton kernels give wrong results ({token} in place of 0)"
