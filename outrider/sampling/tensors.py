"""Moves numbers to a device, and tells whether Triton kernels run on it."""

from __future__ import annotations

import logging
import os
import shutil
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
    """Whether our Triton kernels run on this device. Triton builds launchers with a C compiler."""
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    compilers = [name for name in (os.environ.get("CC"), "gcc", "clang") if name]
    present = {
        "Triton": find_spec("triton") is not None,
        "GPU of compute capability 8.0": capability >= (8, 0),
        "C compiler": any(shutil.which(name) for name in compilers),
    }
    for name, is_present in present.items():
        if not is_present:
            log.warning("no %s: attention gathers pages without CUDA graphs, which is slow", name)
    return all(present.values())
