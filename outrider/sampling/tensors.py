"""Numbers where they are computed with, and what can compute there."""

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
    """A tensor on the device, of `dtype` or that of the numbers, which for none at all is float32.

    The copy does not wait for what the device has to do yet, as one that is asked for without more does.
    """
    return torch.as_tensor(numbers, dtype=dtype).to(device, non_blocking=True)


@cache
def triton_works(device: torch.device) -> bool:
    """Whether our kernels can run there, which takes a C compiler too, for what launches them."""
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    lacking = {
        "Triton": find_spec("triton") is None,
        "GPU of compute capability 8.0": capability < (8, 0),
        "C compiler": not any(
            shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang") if name
        ),
    }
    for name, lacks in lacking.items():
        if lacks:
            log.warning(
                "attention gathers pages, and forwards are no CUDA graphs, all of which is slow: there is no %s",
                name,
            )
    return not any(lacking.values())
