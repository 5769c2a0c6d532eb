"""Converts names in settings to devices and types of numbers."""

from __future__ import annotations

import torch

from outrider.errors import OutriderError, invalid


def find_device(name: str) -> torch.device:
    """Return a CPU or CUDA device; a CUDA device always has an index, as parts of torch require.

    Raises OutriderError(INVALID_VALUE) for other devices, and if there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as cause:
        raise _unknown(name) from cause
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise _unknown(name)
    index = device.index or 0
    count = torch.cuda.device_count()
    if index >= count:
        raise invalid("device", f"is {name}, but torch finds {count} CUDA devices")
    return torch.device("cuda", index)


def _unknown(name: str) -> OutriderError:
    return invalid("device", f"must be auto, cpu or cuda:N, not {name}")


def gpu_uuid(device: torch.device) -> str:
    """Return a GPU's UUID, the same in all processes and containers; empty for another device.

    torch numbers only the GPUs that a process sees, so `cuda:0` may be any GPU of the host.
    """
    if device.type != "cuda":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def find_dtype(name: str) -> torch.dtype | str:
    """Return torch's type, or "auto"; raise OutriderError(INVALID_VALUE) for another name."""
    names: dict[str, torch.dtype | str] = {
        "auto": "auto",
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if name not in names:
        raise invalid("dtype", f"must be one of {', '.join(names)}, not {name}")
    return names[name]
