"""Moves numbers to a device, and tells whether Triton kernels run on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger(__name__)


def on(
    device: torch.device,
    numbers: Sequence[object] | npt.NDArray[np.generic],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A tensor on the device, of `dtype` or the numbers' own type (float32 for an empty list).

    The copy does not wait for the device's queue, as a plain copy would.
    """
    return torch.as_tensor(numbers, dtype=dtype).to(device, non_blocking=True)


@cache
def triton_works(device: torch.device) -> bool:
    """Whether our Triton kernels run on this device; the first call tries a small one."""
    if device.type != "cuda":
        return False
    problem = _problem(device)
    if problem is not None:
        log.warning("%s: attention gathers pages without CUDA graphs, which is slow", problem)
    return problem is None


def _problem(device: torch.device) -> str | None:
    """Return what keeps Triton kernels from running on a GPU, if anything."""
    if find_spec("triton") is None:
        return "no Triton"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "no GPU of compute capability 8.0"
    return kernel_problem(device)


def kernel_problem(device: torch.device) -> str | None:
    """Run the noise kernel for one token; return what fails, if anything.

    Triton builds launchers with a C compiler and Python's headers, so what is missing shows only
    when a kernel runs. Raises torch.AcceleratorError if the device failed.
    """
    try:
        # Imported here, because not every machine has Triton.
        from outrider.sampling import noise_kernel

        probs, keys = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
        token = noise_kernel.coupled_sample(probs.to(device), keys.to(device)).item()
    except torch.AcceleratorError:
        raise  # this process cannot use the device again
    # A missing compiler, header or driver raises errors of many types.
    except Exception as error:  # noqa: BLE001
        return f"Triton kernels do not run ({type(error).__name__}: {' '.join(str(error).split())})"
    return None if token == 0 else f"Triton kernels give wrong results ({token} in place of 0)"
