"""From the host's numbers to tensors where they are needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def on(device: torch.device, numbers: Sequence[object] | npt.NDArray[np.generic], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor on the device, of `dtype` or that of the numbers; does not wait for what the device has to do yet."""
    return torch.as_tensor(numbers, dtype=dtype).to(device, non_blocking=True)
