"""Replaces small operators of a model on a GPU by the Triton kernels of Liger-Kernel.

Of the 30 small kernels that a Llama layer of `transformers` launches, most belong to its norms, its
rotary embedding and its gated product. Liger-Kernel has one kernel for each of these.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import invalid
from outrider.sampling.tensors import triton_works

_SETTING = "fused_layers"


def fuse(model: Any, device: torch.device) -> None:
    """Replace the operators of a loaded `transformers` model.

    The rotary embedding is replaced for all models of its type in this process. Raises
    OutriderError(INVALID_VALUE) where that is not possible.
    """
    if not triton_works(device):
        raise invalid(_SETTING, f"needs a GPU on which Triton works, not {device}")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as cause:
        raise invalid(_SETTING, "needs the package liger-kernel: pip install '.[fused]'") from cause
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise invalid(_SETTING, f"cannot be on for a model of the type {kind}")
    # The fused losses are for training, and would replace the forward.
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
